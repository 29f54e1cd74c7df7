"""Writes down how vLLM's engine calls its scheduler, for machines without vLLM: tests/vllm/calls.json.xz.

    python -m tests.support.vllm_calls        writes the file again; needs vLLM

vLLM's own EngineCore calls its scheduler; random tokens stand for the results of the model. A call is a list: its kind,
its arguments, and then

    events          in order: ["t", request, tokens] appended, ["c", request, first, end] blocks are cached,
                    ["p", request, blocks that stay, new blocks] preempted, ["f", request, status] finished
    free            the number of free blocks afterwards
    tables          [request, blocks that stay, new blocks] of each block table that is another one now
    running         the running requests in vLLM's order; None: as after the last call
    waiting         the waiting requests

Requests are numbers. tests/support/vllm_played.py plays the calls.
"""

from __future__ import annotations

import json
import logging
import lzma
import os
import queue
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.vllm_played import FACTS_EVERY, FILE, PLAIN

STEPS = 150
RUNS: dict[str, dict[str, Any]] = {  # second: vLLM's second model runner, in which resumed requests come as new ones
    "asynchronous": {"asynchronous": True, "blocks": 90, "rows": 12},
    "second runner": {"asynchronous": True, "blocks": 90, "rows": 12, "second": True, "seed": 0},
    "second runner, three stages": {"asynchronous": True, "rows": 24, "second": True, "stages": 3, "seed": 10},
    "second runner, priorities": {"asynchronous": True, "policy": "priority", "second": True, "seed": 14},
    "second runner, drafts and priorities": {"drafts": 3, "policy": "priority", "second": True, "seed": 28},
    "synchronous with drafts": {"drafts": 3},
    "without prefix cache": {"caching": False, "asynchronous": True},
}


class Tape:
    """Writes down the calls of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.calls: list[list[Any]] = []
        self._manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self._pool = scheduler.kv_cache_manager.block_pool
        self._events: list[list[Any]] = []
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}
        self._queues: list[list[int]] = [[], []]
        self._steps = 0  # with tokens
        self._outputs: list[Any] = []  # of `schedule`, which `update_from_output` names by number
        for name in ("add_request", "schedule", "update_from_output", "finish_requests", "reset_prefix_cache"):
            self._wrap(scheduler, name, after=getattr(self, f"_{name}"))
        self._wrap(self._pool, "cache_full_blocks", before=self._cached)
        self._wrap(scheduler, "_preempt_request", before=self._preempted)
        self._wrap(scheduler, "_free_blocks", before=self._freed)

    def _wrap(self, owner: Any, name: str, before: Callable[..., None] | None = None, after: Any = None) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if before:
                before(*arguments, **options)
            result = original(*arguments, **options)
            if after:
                after(result, *arguments)
            return result

        setattr(owner, name, wrapped)

    # ---- events

    def _cached(self, request: Any, num_cached_blocks: int, num_full_blocks: int, **_: Any) -> None:
        if num_cached_blocks < num_full_blocks:
            self._grow(request)
            self._events.append(["c", number(request), num_cached_blocks, num_full_blocks])

    def _preempted(self, request: Any, *_: Any) -> None:
        self._events.append(["p", *self._changed(request.request_id)])
        self._tables[number(request)] = []

    def _freed(self, request: Any) -> None:
        self._grow(request)
        self._events.append(["f", number(request), request.status.name])
        self._tables.pop(number(request), None)

    def _grow(self, request: Any) -> None:
        id, tokens = number(request), request._all_token_ids
        if len(tokens) > self._tokens[id]:
            self._events.append(["t", id, tokens[self._tokens[id] :]])
            self._tokens[id] = len(tokens)

    def _changed(self, id: str) -> list[Any]:
        n, table = int(id[-8:], 16), [block.block_id for block in self._manager.req_to_blocks.get(id, ())]
        before = self._tables.get(n, [])
        same = next((i for i, (a, b) in enumerate(zip(before, table, strict=False)) if a != b), None)
        same = min(len(before), len(table)) if same is None else same
        self._tables[n] = table
        return [n, same, table[same:]]

    # ---- calls

    def _end(self, *call: Any) -> None:
        scheduler = self.scheduler
        for request in scheduler.requests.values():
            self._grow(request)
        tables = []
        for id in scheduler.requests:
            before = self._tables.get(int(id[-8:], 16), [])
            changed = self._changed(id)
            if changed[2] or changed[1] != len(before):
                tables.append(changed)
        waiting = [number(request) for queue in (scheduler.waiting, scheduler.skipped_waiting) for request in queue]
        queues = [[number(request) for request in scheduler.running], waiting]
        changes = [now if now != last else None for now, last in zip(queues, self._queues, strict=True)]
        self._queues = queues
        self.calls.append([*call, self._events, self._pool.get_num_free_blocks(), tables, *changes])
        self._events = []

    def _add_request(self, _: None, request: Any) -> None:
        self._tokens[number(request)] = request.num_prompt_tokens
        self._end("add", request.prompt_token_ids, request.max_tokens, request.cache_salt)

    def _schedule(self, output: Any, *_: Any) -> None:
        self._outputs.append(output)
        cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
        new = [[int(r.req_id[-8:], 16), r.num_computed_tokens] for r in output.scheduled_new_reqs]
        old = [
            [int(id[-8:], 16), n, len(blocks[0]) if blocks else 0, int(id in cached.resumed_req_ids)]
            for id, n, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        ]
        drafts = {int(id[-8:], 16): len(ids) for id, ids in output.scheduled_spec_decode_tokens.items()}
        pairs = [[int(id[-8:], 16), n] for id, n in tokens.items()]
        self._steps += bool(tokens)
        facts = self._facts() if tokens and self._steps % FACTS_EVERY == 0 else None
        self._end("schedule", new, old, pairs, drafts, facts)

    def _facts(self) -> list[Any]:
        """Returns what a message with the whole state says of each request, beside its tokens and its table."""
        manager, facts = self._manager, []
        for id, request in self.scheduler.requests.items():
            hashes = request.block_hashes[: manager.num_cached_block.get(id, 0)]
            found = [self._pool.get_cached_block(hash, [manager.kv_cache_group_id]) for hash in hashes]
            hits = [hit[0].block_id if hit else 0 for hit in found]
            facts.append([number(request), request.num_computed_tokens, request.is_prefill_chunk, hits])
        return facts

    def _update_from_output(self, _: Any, output: Any, result: Any) -> None:
        at = next(i for i, scheduled in enumerate(self._outputs) if scheduled is output)
        self._outputs[at] = None
        sampled = {int(id[-8:], 16): len(ids) for id, ids in zip(result.req_ids, result.sampled_token_ids, strict=True)}
        self._end("update", at, sampled if output.scheduled_spec_decode_tokens else {})

    def _finish_requests(self, *_: Any) -> None:
        if self._events:
            self._end("finish")

    def _reset_prefix_cache(self, done: bool, *_: Any) -> None:
        self._end("reset", done)


def number(request: Any) -> int:
    """Returns a request's number."""
    return int(request.request_id[-8:], 16)


def run(name: str) -> dict[str, Any]:
    """Returns the facts about an engine, and its calls."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    import minitui.vllm.recorder as recording
    from tests.support.vllm_direct import Direct
    from tests.support.vllm_driver import make_scheduler
    from tests.support.vllm_wild import Wild

    class Answer:
        """Stands for a future: its result is computed when vLLM waits for it."""

        def __init__(self, result: Callable[[], Any]) -> None:
            self.result = result

    class Engine(Wild):
        """vLLM's engine decides when to call the scheduler; this is its executor, too."""

        def __init__(self, scheduler: Any, seed: int, in_flight: int, drafts: int) -> None:
            super().__init__(scheduler, seed, in_flight, drafts)
            self.losses = 0.0
            core = self.core = EngineCore.__new__(EngineCore)
            core.scheduler, core.vllm_config, core.model_executor = scheduler, scheduler.vllm_config, self
            core.batch_queue_size = in_flight
            core.batch_queue = deque(maxlen=in_flight) if in_flight > 1 else None
            core.check_for_draft_tokens = core.use_spec_decode = bool(drafts)
            core.async_scheduling = scheduler.vllm_config.scheduler_config.async_scheduling
            core.is_ec_consumer, core.is_pooling_model, core.aborts_queue = True, False, queue.Queue()
            self._launched: Any = None
            self._ids: list[str] = []

        def step(self) -> None:
            self.disturb()
            core = self.core
            if core.batch_queue is not None:
                core.step_with_batch_queue()
            else:
                core.post_step(core.step()[1])

        def finish(self) -> None:
            while self.scheduler.has_requests() or self.core.batch_queue:
                self.step()

        def execute_model(self, output: Any, non_block: bool) -> Answer:
            if not output.total_num_scheduled_tokens:
                return Answer(lambda: EMPTY_MODEL_RUNNER_OUTPUT)
            self.steps += 1
            self._launched = output, self.chunks(output)
            return Answer(lambda: None)

        def sample_tokens(self, _: Any, non_block: bool = False) -> Any:
            launched = self._launched

            def sampled() -> Any:
                result = self.result_of(*launched)
                self._ids = result.req_ids
                requests = list(self.scheduler.requests)
                if requests and self.random.random() < 0.03:  # a client goes away while the step is computed
                    self.core.aborts_queue.put([self.random.choice(requests)])
                return result

            return Answer(sampled) if non_block else sampled()

        def take_draft_token_ids(self) -> Any:
            return self.draft(self._ids)

    options = dict(RUNS[name])
    second, stages, seed = options.pop("second", False), options.pop("stages", 1), options.pop("seed", 6)
    recording.Pipe = Direct  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory() as directory:
        scheduler = make_scheduler(Path(directory), **options)
    scheduler.use_v2_model_runner, scheduler.pp_size = second, stages
    tape = Tape(scheduler)
    in_flight = (stages + 1) if options.get("asynchronous") else 1
    load = Engine(scheduler, seed, in_flight, options.get("drafts", 0))
    for _ in range(3):  # the last block of a prompt is always computed: equal prompts give copies of this block
        load.add([1] * 64, 5)
    load.run(STEPS)
    load.finish()
    pipe = load.pipe
    assert scheduler._recorder is not None and not pipe.repairs
    assert not pipe.translator.faults and not pipe.wrong
    info = pipe.translator.info
    return {"info": {key: info[key] for key in PLAIN}, "calls": tape.calls}


def main() -> None:
    """Write the file."""
    os.environ["MINITUI_VLLM_CHECK"] = "1"
    logging.getLogger("vllm").setLevel(logging.ERROR)
    text = json.dumps({name: run(name) for name in RUNS}, separators=(",", ":"))
    FILE.write_bytes(lzma.compress(text.encode(), preset=9))
    print(f"{FILE.stat().st_size:,} bytes of {len(text):,}")


if __name__ == "__main__":
    main()
