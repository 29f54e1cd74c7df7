"""Writes down what vLLM's scheduler decides. Runs inside vLLM's engine process; minitui/vllm/scheduler.py calls it.

minitui/vllm/translate.py describes the messages. Python calls cost up to a microsecond, so nothing here is called once
per request and step, and messages leave out what the watcher can conclude from earlier messages. A message is encoded
at once, while its objects are in the processor's caches: a thread that did this 40 ms later took three times as long.
Messages are sent together, because each write wakes the watcher.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections import deque
from itertools import compress, islice
from struct import Struct
from typing import TYPE_CHECKING, Any

from minitui.vllm.facts import OF_POOL, check_names, describe, only_manager
from minitui.vllm.pipe import Pipe
from minitui.vllm.ports import key_variables

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

now = time.perf_counter  # the same clock in all processes of a machine
FLUSH_S = 0.1  # between two writes to the watcher
ASKED_EVERY = 256  # steps between two looks at what the watcher asks for, and between two reports of the cost


class Recorder:
    """Collects what one scheduler does, and sends a message after each call of the engine."""

    def __init__(self, scheduler: Scheduler, pipe: Pipe | None = None) -> None:
        """`pipe`: replaces the watcher process, for tests. Raises ValueError if the model cannot be shown."""
        self.scheduler = scheduler
        self.step = -1
        self.checking = bool(os.environ.get("MINITUI_VLLM_CHECK"))
        self.seconds = 0.0  # spent here
        self.events: list[tuple[Any, ...]] = []  # since the last message
        self._flush_at = 0.0
        self._in_flight: deque[tuple[SchedulerOutput, int]] = deque(maxlen=64)
        check_names(scheduler)
        self._manager = only_manager(scheduler)
        self._pool = scheduler.kv_cache_manager.block_pool
        self._info = describe(scheduler, self._manager.block_size)
        self.pipe = pipe or Pipe(key_variables(sys.argv, os.environ))
        try:
            self.pipe.send(("init", now(), self._info))
            self.pipe.flush()
        except Exception:
            self.pipe.close()
            raise
        self._broken: Exception | None = None
        self.attach()

    def attach(self) -> None:
        """Put the hooks into the pool."""
        self._hook_caching()
        self._hook("evict_blocks", self.evicted)
        if self.scheduler.connector is not None:  # it takes blocks for requests that are not scheduled yet
            self._hook("get_new_blocks", self.taken)

    def detach(self) -> None:
        """Remove the hooks from the pool."""
        for name in OF_POOL:
            self._pool.__dict__.pop(name, None)

    def stop(self) -> None:
        """Remove the hooks from the pool and end the watcher."""
        self.detach()
        try:
            self.pipe.flush()
        finally:
            self.pipe.close()

    # ---- inside vLLM's calls: nothing is raised here; the next message raises the error

    def observe(self, note: Any, request: Request) -> None:
        """Call `note` with a request."""
        try:
            note(request)
        except Exception as error:
            self._broken = error

    def _hook(self, name: str, note: Any) -> None:
        """Call `note` after each call of a method of the pool, with its result and its arguments."""
        original = getattr(self._pool, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            began = now()
            try:
                note(result, *arguments, **options)
            except Exception as error:
                self._broken = error
            self.seconds += now() - began
            return result

        setattr(self._pool, name, hooked)

    def _hook_caching(self) -> None:
        """Note full blocks that are cached now: the call of the pool that is by far the most frequent."""
        original = self._pool.cache_full_blocks
        size = self._manager.block_size
        pack = Struct(f"{size}i").pack  # half of the time of array("i", …), for the one block of a decoding request

        def cache_full_blocks(
            request: Request, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int,
            *arguments: Any, **options: Any,
        ) -> Any:  # fmt: skip
            result = original(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, *arguments, **options
            )
            if num_cached_blocks >= num_full_blocks:
                return result
            began = now()
            try:
                # Each token of a reply is an object somewhere in memory: it is read once here, and not again later.
                ids = request._all_token_ids[num_cached_blocks * block_size : num_full_blocks * block_size]
                hashes = request.block_hashes[num_cached_blocks:num_full_blocks]
                packed = pack(*ids) if len(ids) == size else array("i", ids)
                self.events.append(("c", request.request_id, num_cached_blocks, hashes, packed))
            except Exception as error:
                self._broken = error
            self.seconds += now() - began
            return result

        self._pool.cache_full_blocks = cache_full_blocks

    def taken(self, blocks: Any, *_: Any, **__: Any) -> None:
        """Note blocks that the pool gave away."""
        self.events.append(("g", [block.block_id for block in blocks]))

    def evicted(self, _: Any, block_ids: set[int], *__: Any, **___: Any) -> None:
        """Note blocks whose content a connector evicted."""
        self.events.append(("e", sorted(block_ids)))

    def preempted(self, request: Request) -> None:
        """Note a preemption, before vLLM takes the request's blocks away: it may have got some in this step."""
        id = request.request_id
        self.events.append(("p", id, [block.block_id for block in self._manager.req_to_blocks.get(id, ())]))

    def freed(self, request: Request) -> None:
        """Note the end of a request."""
        self.events.append(("f", request.request_id, request.status.name, request.num_output_tokens))

    def left(self, request: Request) -> None:
        """Note that a request has ended, but a connector still reads its blocks: `freed` follows later."""
        if request.request_id in self.scheduler.requests:
            self.events.append(("l", request.request_id))

    def _take_events(self) -> list[tuple[Any, ...]]:
        """Returns the events since the last call. Raises the error of a hook, if one has failed."""
        if self._broken is not None:
            raise self._broken
        events, self.events = self.events, []
        return events

    def _send(self, t: float, *message: Any) -> None:
        """Send a message; `t`: the time now. Without requests there may be no later message to send it with."""
        self.pipe.send(message)
        if t > self._flush_at or not self.scheduler.requests:
            self._flush_at = t + FLUSH_S
            self.pipe.flush()

    # ---- the scheduler

    def added(self, request: Request) -> None:
        began = now()
        self._send(began, "add", began, *self._facts(request))
        self.seconds += now() - began

    def _facts(self, request: Request) -> tuple[Any, ...]:
        ids = request.prompt_token_ids or [0] * request.num_prompt_tokens
        most = min(request.num_prompt_tokens + request.max_tokens, self.scheduler.max_model_len)
        return request.request_id, ids, most

    def scheduled(self, output: SchedulerOutput, began: float) -> None:
        """Send what `schedule` decided."""
        ended = now()
        events = self._take_events()
        tokens = output.num_scheduled_tokens
        if not tokens and not events:
            return
        scheduler, cached = self.scheduler, output.scheduled_cached_reqs
        resumed, ids, grows = cached.resumed_req_ids, cached.req_ids, cached.new_block_ids
        new = [self._admission(r.req_id, r.num_computed_tokens, r.block_ids[0]) for r in output.scheduled_new_reqs]
        if resumed:
            rows = zip(ids, cached.num_computed_tokens, grows, strict=True)
            new += [self._admission(id, n, blocks[0]) for id, n, blocks in rows if id in resumed]
        if len(new) > 1:  # vLLM puts resumed requests behind new ones; `tokens` ends with them in their true order
            place = {id: -i for i, id in enumerate(islice(reversed(tokens), len(new)))}
            new.sort(key=lambda row: place[row[0]])
        grown = [
            (ids[i], grows[i][0]) for i in compress(range(len(grows)), grows)  # blocks are None in most rows
            if ids[i] not in resumed
        ]  # fmt: skip
        drafts = {id: len(ids) for id, ids in output.scheduled_spec_decode_tokens.items()}
        several = [(row[0], tokens[row[0]]) for row in new]
        rest = output.total_num_scheduled_tokens - len(tokens) - sum(drafts.values())
        if rest != sum(n for _, n in several) - len(several) or (drafts and new):  # a prompt in several steps
            several = [item for item in tokens.items() if item[1] != 1]
        running, waiting = scheduler.get_request_counts()
        left_out: list[str] = []
        if tokens and len(tokens) != running:
            missing = (r.request_id for r in scheduler.running if r.request_id not in tokens)
            left_out = list(islice(missing, running - len(tokens)))
        step = -1
        if tokens:
            step = self.step = self.step + 1
            self._in_flight.append((output, step))
        check = self._check() if self.checking else None
        self._send(
            ended, "schedule", began, ended, step, events, new, grown, left_out, several, drafts,
            output.total_num_scheduled_tokens, running, waiting, check,
        )  # fmt: skip
        if step % ASKED_EVERY == ASKED_EVERY - 1:
            self.pipe.send(("cost", self.step + 1, self.seconds))
            if self.pipe.asked():
                self.send_whole_state()
        if self.pipe.recover():
            self.send_whole_state()
        self.seconds += now() - ended

    def _admission(self, id: str, computed: int, blocks: list[int]) -> tuple[Any, ...]:
        request = self.scheduler.requests[id]
        hits = computed // self._manager.block_size
        replied = request._all_token_ids[request.num_prompt_tokens : computed] if request.num_preemptions else []
        return id, computed, blocks, request.num_tokens, request.block_hashes[: hits + 1], replied

    def updated(self, output: SchedulerOutput, result: ModelRunnerOutput, began: float) -> None:
        """Send what `update_from_output` did."""
        ended = now()
        events = self._take_events()
        # An output without tokens is not in the queue, and steps that were launched after it may be in flight.
        in_flight = self._in_flight
        if in_flight and in_flight[0][0] is output:
            step = in_flight.popleft()[1]
        else:
            step = next((number for scheduled, number in in_flight if scheduled is output), -1)
            while step >= 0 and in_flight.popleft()[1] != step:
                pass
        if step < 0 and not events:
            return
        accepted = None
        if output.scheduled_spec_decode_tokens:
            index, sampled = result.req_id_to_index, result.sampled_token_ids
            accepted = [
                (id, len(draft), max(0, len(sampled[index[id]]) - 1))
                for id, draft in output.scheduled_spec_decode_tokens.items()
                if id in index and sampled and sampled[index[id]]
            ]
        check = self._check() if self.checking else None
        self._send(ended, "update", began, ended, step, events, accepted, check)
        self.seconds += now() - ended

    def send_events(self) -> None:
        """Send what was done outside of a step: requests that were cancelled."""
        began, events = now(), self._take_events()
        if events:
            self._send(began, "events", began, events)

    def send_whole_state(self) -> None:
        """Send the state of every request, after messages were lost or did not fit what came before."""
        scheduler, manager = self.scheduler, self._manager
        queues = (scheduler.waiting, getattr(scheduler, "skipped_waiting", ()))  # the second is not in vLLM 0.16
        waiting = [request.request_id for queue in queues for request in queue]
        requests = []
        for id, request in scheduler.requests.items():
            blocks = [block.block_id for block in manager.req_to_blocks.get(id, ())]
            hashes = request.block_hashes[: manager.num_cached_block.get(id, 0)]
            first = [self._pool.get_cached_block(hash, [manager.kv_cache_group_id]) for hash in hashes]
            hits = [found[0].block_id if found else blocks[i] for i, found in enumerate(first)]
            requests.append((
                *self._facts(request), request.num_computed_tokens, request.num_tokens, request.is_prefill_chunk,
                blocks, hits, hashes, request._all_token_ids[: len(hashes) * manager.block_size],
                request.num_preemptions,
            ))  # fmt: skip
        running = [request.request_id for request in scheduler.running]
        self.pipe.send(("whole", now(), self.step, requests, waiting, running))

    def _check(self) -> tuple[Any, ...]:
        """Returns vLLM's own numbers, which the watcher compares with its state: free blocks, and every block table."""
        tables = {
            id: [block.block_id for block in blocks] for id, blocks in self._manager.req_to_blocks.items() if blocks
        }
        return self._pool.get_num_free_blocks(), tables
