"""Writes down what vLLM's scheduler decides. Runs inside vLLM's engine process; minitui/vllm/scheduler.py calls it.

minitui/vllm/translate.py describes the messages. Python calls cost up to a microsecond, so nothing here is called once
per request and step, and messages leave out what the watcher can conclude from earlier messages. A message is encoded
at once, while its objects are in the processor's caches: a thread that did this 40 ms later took three times as long.
Messages are sent together, because each write wakes the watcher.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, islice
from struct import pack
from typing import TYPE_CHECKING, Any

from minitui.vllm.facts import check_names, describe, managers_of
from minitui.vllm.hooks import Hooks, now
from minitui.vllm.pipe import Pipe
from minitui.vllm.ports import key_variables
from minitui.vllm.tokens import checksum

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

FLUSH_S = 0.1  # between two writes to the watcher
DEVICE_MS = "minitui_device_ms"  # the attribute of vLLM's results that minitui/vllm/worker.py sets
ASKED_EVERY = 256  # steps between two looks at what the watcher asks for, and between two reports of the cost


class Recorder:
    """Collects what one scheduler does, and sends a message after each call of the engine."""

    def __init__(self, scheduler: Scheduler, pipe: Pipe | None = None) -> None:
        """`pipe`: replaces the watcher process, for tests. Raises ValueError if the model cannot be shown."""
        self.scheduler = scheduler
        self.step = -1
        self.checking = bool(os.environ.get("MINITUI_VLLM_CHECK"))
        self._seconds = 0.0  # spent here
        self._flush_at = 0.0
        # Steps: vLLM's output, our number, for how many requests it samples (-1: the watcher does not know which).
        self._in_flight: deque[tuple[SchedulerOutput, int, int]] = deque(maxlen=64)
        check_names(scheduler)
        self._manager, *self._others = managers = managers_of(scheduler)
        self._main = self._manager.kv_cache_group_id
        self._sides = [manager.kv_cache_group_id for manager in self._others]
        self._pool = scheduler.kv_cache_manager.block_pool
        self._info = describe(scheduler, managers)
        self._unit = self._info.get("hash_unit", self._manager.block_size)  # tokens of one of vLLM's hashes
        self._step = self._manager.block_size // self._unit
        self.pipe = pipe or Pipe(key_variables(sys.argv, os.environ))
        try:
            self.pipe.send(("init", now(), self._info))
            self.pipe.flush()
        except Exception:
            self.pipe.close()
            raise
        self.hooks = Hooks(scheduler, self._manager, self._pool, self._others)
        self.hooks.attach()

    @property
    def seconds(self) -> float:
        """What the recording has taken of vLLM's process."""
        return self._seconds + self.hooks.seconds

    def stop(self) -> None:
        """Remove the hooks from the pool and end the watcher."""
        self.hooks.detach()
        try:
            self.pipe.flush()
        finally:
            self.pipe.close()

    def _send(self, t: float, *message: Any) -> None:
        """Send a message; `t`: the time now. Without requests there may be no later message to send it with."""
        self.pipe.send(message)
        if t > self._flush_at or not self.scheduler.requests:
            self._flush_at = t + FLUSH_S
            self.pipe.flush()

    # ---- the scheduler

    def added(self, request: Request) -> None:
        began = now()
        if getattr(request, "resumable", False):  # its tokens would not be those that follow from the messages
            raise ValueError(f"{request.request_id} gets its input in parts, and minitui shows whole prompts only")
        self._send(began, "add", began, *self._facts(request))
        self._seconds += now() - began

    def _facts(self, request: Request) -> tuple[Any, ...]:
        ids = request.prompt_token_ids or [0] * request.num_prompt_tokens
        most = min(request.num_prompt_tokens + request.max_tokens, self.scheduler.max_model_len)
        return request.request_id, ids, most, self._more_than_tokens(request)

    def _more_than_tokens(self, request: Request) -> tuple[list[bytes], bytes] | None:
        """Returns vLLM's hashes of the prompt's blocks, and a name for what else is hashed, if that is not only tokens.

        As vLLM's generate_block_hash_extra_keys says, such blocks have the same content only where these are the same.
        """
        adapter, embeddings = request.lora_request, request.prompt_embeds
        if not (request.mm_features or adapter or request.cache_salt or embeddings is not None):
            return None
        inputs = [feature.identifier for feature in request.mm_features or ()]
        names = adapter and adapter.lora_name, request.cache_salt, inputs, embeddings is not None and request.request_id
        return list(request.block_hashes[: request.num_prompt_tokens // self._unit]), repr(names).encode()

    def scheduled(self, output: SchedulerOutput, began: float) -> None:
        """Send what `schedule` decided."""
        ended = now()
        events = self.hooks.take()
        tokens = output.num_scheduled_tokens
        if not tokens and not events:
            return
        scheduler, cached = self.scheduler, output.scheduled_cached_reqs
        resumed, ids, grows = cached.resumed_req_ids, cached.req_ids, cached.new_block_ids
        new = [self._admission(r.req_id, r.num_computed_tokens, r.block_ids) for r in output.scheduled_new_reqs]
        if resumed:
            rows = zip(ids, cached.num_computed_tokens, grows, strict=True)
            new += [self._admission(id, n, blocks) for id, n, blocks in rows if id in resumed]
        if len(new) > 1:  # vLLM puts resumed requests behind new ones; `tokens` ends with them in their true order
            place = {id: -i for i, id in enumerate(islice(reversed(tokens), len(new)))}
            new.sort(key=lambda row: place[row[0]])
        grown = [
            (ids[i], *self._split(grows[i])) for i in compress(range(len(grows)), grows)  # blocks are None in most rows
            if ids[i] not in resumed
        ]
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
            chunks = sum(scheduler.requests[id].is_prefill_chunk for id, _ in several)
            self._in_flight.append((output, step, len(tokens) - chunks))
        check = self._check() if self.checking else None
        self._send(
            ended, "schedule", began, ended, step, events, new, grown, left_out, several, drafts,
            output.total_num_scheduled_tokens, running, waiting, check,
        )
        if step % ASKED_EVERY == ASKED_EVERY - 1:
            self.pipe.send(("cost", self.step + 1, self.seconds))
            if self.pipe.asked():
                self.send_whole_state()
        if self.pipe.recover():
            self.send_whole_state()
        self._seconds += now() - ended

    def _admission(self, id: str, computed: int, blocks: Sequence[list[int]]) -> tuple[Any, ...]:
        table, others = self._split(blocks)
        return id, computed, table, self.scheduler.requests[id].num_tokens, others

    def _split(self, blocks: Sequence[list[int]]) -> tuple[list[int], list[list[int]]]:
        """Returns the blocks of full attention, and those of the other groups."""
        return blocks[self._main], [blocks[group] for group in self._sides]

    def updated(
        self, output: SchedulerOutput, result: ModelRunnerOutput, replies: dict[int, EngineCoreOutputs], began: float
    ) -> None:
        """Send what `update_from_output` did; it returned `replies`."""
        ended = now()
        events = self.hooks.take()
        # An output without tokens is not in the queue, and steps that were launched after it may be in flight.
        in_flight = self._in_flight
        step = sampled = -1
        if in_flight and in_flight[0][0] is output:
            _, step, sampled = in_flight.popleft()
        elif any(scheduled is output for scheduled, _, _ in in_flight):
            while step < 0:
                scheduled, number, sampled = in_flight.popleft()
                step = number if scheduled is output else -1
        accepted = None
        if output.scheduled_spec_decode_tokens:
            index, drawn = result.req_id_to_index, result.sampled_token_ids
            accepted = [
                (id, len(draft), max(0, len(drawn[index[id]]) - 1))
                for id, draft in output.scheduled_spec_decode_tokens.items()
                if id in index and drawn and drawn[index[id]]
            ]
        tokens, ids = self._new_tokens(replies, sampled, accepted is None)
        if step < 0 and not events and not tokens:
            return
        check = self._check() if self.checking else None
        device_ms = getattr(result, DEVICE_MS, None)
        self._send(ended, "update", began, ended, step, events, accepted, tokens, ids, device_ms, check)
        self._seconds += now() - ended

    def _new_tokens(
        self, replies: dict[int, EngineCoreOutputs], sampled: int, one: bool
    ) -> tuple[bytes | list[list[int]], list[str] | None]:
        """Returns the new tokens of requests, and their ids, unless they are all those that the step samples.

        If they are, and the step samples one token of each (`one`), the tokens are an array. Tokens are read here,
        where vLLM has just written them. Its requests are spread over the memory: reading a block of each, when it is
        full, took longer than all the rest.
        """
        [*groups] = replies.values()
        if one and len(groups) == 1 and len(rows := groups[0].outputs) == sampled:
            with suppress(IndexError):  # one ended without a token
                return pack(f"{sampled}i", *[row.new_token_ids[0] for row in rows]), None
        rows = [row for group in groups for row in group.outputs]
        return [list(row.new_token_ids) for row in rows], [row.request_id for row in rows]

    def send_events(self) -> None:
        """Send what was done outside of a step: requests that were cancelled."""
        began, events = now(), self.hooks.take()
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
            hashes = request.block_hashes[: manager.num_cached_block.get(id, 0) * self._step]
            hashes = hashes[self._step - 1 :: self._step]
            first = [self._pool.get_cached_block(hash, [manager.kv_cache_group_id]) for hash in hashes]
            hits = [found[0].block_id if found else blocks[i] for i, found in enumerate(first)]
            requests.append((
                *self._facts(request), request.num_computed_tokens, list(request._all_token_ids),
                request.is_prefill_chunk, blocks, hits, request.num_preemptions, self.hooks.tables(id),
                [self._cached_in(manager, id) for manager in self._others],
            ))
        running = [request.request_id for request in scheduler.running]
        self._in_flight = deque(((output, number, -1) for output, number, _ in self._in_flight), maxlen=64)
        self.pipe.send(("whole", now(), self.step, requests, waiting, running))

    def _cached_in(self, manager: Any, id: str) -> list[tuple[int, int]]:
        """Returns the cached blocks in a request's table of another group: block, tokens of the text that it ends."""
        size, found = manager.block_size, []
        for i, block in enumerate(manager.req_to_blocks.get(id, ())):
            if block.block_hash is not None:
                end = getattr(block, "block_hash_num_tokens", None) or (i + 1) * size
                found.append((block.block_id, end))
        return found

    def _check(self) -> tuple[Any, ...]:
        """Returns vLLM's own numbers, which the watcher compares with its state. They are the number of free blocks,
        every block table, and a checksum of every request's tokens; with several groups, also the tables of the others,
        and their cached blocks."""
        tables = {
            id: [block.block_id for block in blocks] for id, blocks in self._manager.req_to_blocks.items() if blocks
        }
        sums = {id: checksum(request._all_token_ids) for id, request in self.scheduler.requests.items()}
        return self._pool.get_num_free_blocks(), tables, sums, self._check_others() if self._others else None

    def _check_others(self) -> tuple[dict[str, list[list[int]]], list[list[int]]]:
        cached: list[list[int]] = [[] for _ in self._others]
        for block in self._pool.blocks:
            if block.block_hash is not None:
                group = int.from_bytes(block.block_hash[-4:], "big")  # as vLLM's get_group_id
                if group != self._main:
                    cached[self._sides.index(group)].append(block.block_id)
        return {id: self.hooks.tables(id) for id in self.scheduler.requests}, cached
