"""The scheduler that vLLM runs with --scheduler-cls minitui.vllm.RecordingScheduler. Runs inside vLLM's engine process.

It is vLLM's own scheduler; after each decision it writes down what was decided. minitui/vllm/translate.py describes the
messages. Nothing here may disturb vLLM: the first exception ends the recording, with one line in vLLM's log. Python
calls cost up to a microsecond, so nothing here is called once per request and step. A message is encoded at once, while
its objects are in the processor's caches; messages are sent together, because each write wakes the watcher.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from itertools import compress, filterfalse
from typing import TYPE_CHECKING, Any

from vllm import __version__
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from minitui.vllm.pipe import Pipe
from minitui.vllm.ports import api_port

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.minitui")  # below "vllm": else vLLM's log would not show it
now = time.perf_counter  # the same clock in all processes of a machine
FLUSH_S = 0.04  # between two writes to the watcher
ASKED_EVERY = 256  # steps between two looks at what the watcher asks for, and between two reports of the cost


def recording_scheduler(vllm_config: VllmConfig, *arguments: Any, **options: Any) -> Scheduler:
    """Returns a scheduler that records its decisions: vLLM's asynchronous one, unless that is switched off."""
    kind = RecordingAsync if vllm_config.scheduler_config.async_scheduling else RecordingSync
    return kind(vllm_config, *arguments, **options)


class Recorder:
    """Collects what one scheduler does, and sends a message after each call of the engine."""

    def __init__(self, scheduler: Scheduler, pipe: Pipe | None = None) -> None:
        """`pipe`: replaces the watcher process, for tests. Raises ValueError if the model cannot be shown."""
        self.scheduler = scheduler
        self.step = -1
        self.checking = bool(os.environ.get("MINITUI_VLLM_CHECK"))
        self.seconds = 0.0  # spent here
        self.events: list[tuple[Any, ...]] = []  # since the last message
        self._tokens: dict[str, int] = {}  # of the last step: request -> tokens
        self._ids: list[str] = []
        self._counts: list[int] = []
        self._flush_at = 0.0
        self._in_flight: deque[tuple[SchedulerOutput, int]] = deque(maxlen=64)
        self._manager = _only_manager(scheduler)
        self._pool = scheduler.kv_cache_manager.block_pool
        self._info = describe(scheduler, self._manager.block_size)
        self.pipe = pipe or Pipe({"MINITUI_VLLM_RANK": str(self._info["rank"])})
        for name, method in (("get_new_blocks", self._get_new_blocks), ("cache_full_blocks", self._cache_full_blocks),
                             ("evict_blocks", self._evict_blocks)):  # fmt: skip
            setattr(self._pool, name, method(getattr(self._pool, name)))
        self.pipe.send(("init", now(), self._info))
        self.pipe.flush()

    def stop(self) -> None:
        """Remove the hooks from the pool and end the watcher."""
        for name in ("get_new_blocks", "cache_full_blocks", "evict_blocks"):
            self._pool.__dict__.pop(name, None)
        try:
            self.pipe.flush()
        finally:
            self.pipe.close()

    # ---- the pool

    def _get_new_blocks(self, original: Any) -> Any:
        def get_new_blocks(num_blocks: int) -> Any:
            blocks = original(num_blocks)
            began = now()
            self.events.append(("g", [block.block_id for block in blocks]))
            self.seconds += now() - began
            return blocks

        return get_new_blocks

    def _cache_full_blocks(self, original: Any) -> Any:
        def cache_full_blocks(
            request: Request, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int, *rest: Any,
            **options: Any,
        ) -> None:  # fmt: skip
            original(request, blocks, num_cached_blocks, num_full_blocks, block_size, *rest, **options)
            began = now()
            if num_cached_blocks < num_full_blocks:
                self.events.append((
                    "c", request.request_id, num_cached_blocks,
                    [block.block_id for block in blocks[num_cached_blocks:num_full_blocks]],
                    request.block_hashes[num_cached_blocks:num_full_blocks],
                    request._all_token_ids[num_cached_blocks * block_size : num_full_blocks * block_size],
                ))  # fmt: skip
            self.seconds += now() - began

        return cache_full_blocks

    def _evict_blocks(self, original: Any) -> Any:
        def evict_blocks(block_ids: set[int]) -> None:
            original(block_ids)
            self.events.append(("e", sorted(block_ids)))

        return evict_blocks

    def _take_events(self) -> list[tuple[Any, ...]]:
        """Returns the events since the last call."""
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
        grown = [
            (ids[i], grows[i][0]) for i in compress(range(len(grows)), grows)  # blocks are None in most rows
            if ids[i] not in resumed
        ]  # fmt: skip
        drafts = {id: len(ids) for id, ids in output.scheduled_spec_decode_tokens.items()}
        step = -1
        if tokens:
            step = self.step = self.step + 1
            self._in_flight.append((output, step))
        changed = self._changed(tokens, new)
        running, waiting = scheduler.get_request_counts()
        check = self._check() if self.checking else None
        self._send(ended, "schedule", began, ended, step, events, new, grown, changed, drafts, running, waiting, check)
        if step % ASKED_EVERY == ASKED_EVERY - 1:
            self.pipe.send(("cost", self.step + 1, self.seconds))
            if self.pipe.asked():
                self.send_whole_state()
        if self.pipe.recover():
            self.send_whole_state()
        self.seconds += now() - ended

    def _changed(self, tokens: dict[str, int], new: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
        """Returns how a step's requests and their tokens differ from the step before: most steps are equal."""
        ids, counts = list(tokens), list(tokens.values())
        same = ids == self._ids
        if same and counts == self._counts:
            return None
        gone: list[str] = []
        come: list[str] = []
        old, self._tokens, self._ids, self._counts = self._tokens, tokens, ids, counts
        if not same:
            gone = list(filterfalse(tokens.__contains__, old))
            come = [row[0] for row in new if row[0] in tokens and row[0] not in old]
            if len(come) != len(tokens) - len(old) + len(gone):  # a running request that the last step left out
                come = list(filterfalse(old.__contains__, tokens))
        one = counts.count(1) == len(counts)
        return gone, come, [] if one else [item for item in tokens.items() if item[1] != 1]

    def _admission(self, id: str, computed: int, blocks: list[int]) -> tuple[Any, ...]:
        request = self.scheduler.requests[id]
        hits = computed // self._manager.block_size
        return id, computed, blocks, request.num_tokens, request.block_hashes[: hits + 1]

    def updated(self, output: SchedulerOutput, result: ModelRunnerOutput, began: float) -> None:
        """Send what `update_from_output` did."""
        ended = now()
        events = self._take_events()
        # An output without tokens is not in the queue, and steps that were launched after it may be in flight.
        step = next((number for scheduled, number in self._in_flight if scheduled is output), -1)
        while step >= 0 and self._in_flight.popleft()[1] != step:
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
        waiting = [request.request_id for queue in (scheduler.waiting, scheduler.skipped_waiting) for request in queue]
        requests = []
        for id, request in scheduler.requests.items():
            blocks = [block.block_id for block in manager.req_to_blocks.get(id, ())]
            cached = manager.num_cached_block.get(id, 0)
            requests.append((
                *self._facts(request), request.num_computed_tokens, request.num_tokens, blocks,
                request.block_hashes[:cached], request._all_token_ids[: cached * manager.block_size],
                request.num_preemptions,
            ))  # fmt: skip
        self._tokens, self._ids, self._counts = {}, [], []
        self.pipe.send(("whole", now(), self.step, requests, waiting))

    def _check(self) -> tuple[Any, ...]:
        """Returns vLLM's own numbers, which the watcher compares with its state: free blocks, and every block table."""
        tables = {
            id: [block.block_id for block in blocks] for id, blocks in self._manager.req_to_blocks.items() if blocks
        }
        return self._pool.get_num_free_blocks(), tables


def _only_manager(scheduler: Scheduler) -> Any:
    """Returns the manager of the only group of KV caches. Raises ValueError if minitui cannot show this model."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1:
        raise ValueError(f"this model has {len(managers)} KV cache groups; minitui shows models with one")
    if not isinstance(managers[0].kv_cache_spec, FullAttentionSpec | MLAAttentionSpec):
        kind = type(managers[0].kv_cache_spec).__name__
        raise ValueError(f"the KV cache of this model is a {kind}; minitui shows full attention only")
    return managers[0]


def describe(scheduler: Scheduler, block_size: int) -> dict[str, Any]:
    """Returns facts about the engine, with the names of minitui's own."""
    config = scheduler.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    served = model.served_model_name
    name = served if isinstance(served, str) else (served or [model.model])[0]
    return {
        "engine": f"vLLM {__version__}", "model": os.path.basename(name) if os.path.isdir(name) else name,
        "tokenizer": str(model.tokenizer), "revision": model.tokenizer_revision,
        "dtype": str(model.dtype).split(".")[-1],
        "quantization": model.quantization or "none", "kv_cache_dtype": str(cache.cache_dtype),
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks, "block_size": block_size,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens, "max_num_seqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len, "vocab_size": model.get_vocab_size(),
        "prefix_caching": bool(cache.enable_prefix_caching), "device": _device(parallel.world_size),
        "dummy_weights": str(config.load_config.load_format) == "dummy", "rank": parallel.data_parallel_index,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "scheduling_policy": str(config.scheduler_config.policy),
        "tensor_parallel_size": parallel.tensor_parallel_size, "api_port": api_port(sys.argv),
        "generation": model.get_diff_sampling_param(),
    }  # fmt: skip


def _device(count: int) -> str:
    from vllm.platforms import current_platform

    try:
        name = str(current_platform.get_device_name() or current_platform.device_type)
    except Exception:
        name = str(current_platform.device_type)
    return name if count == 1 else f"{count} × {name}"


class _Recording(Scheduler):
    """Overrides the methods that decide something. `_recorder` is None after a failure."""

    _recorder: Recorder | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        try:
            self._recorder = Recorder(self)
        except Exception as error:
            logger.warning("minitui does not record this engine: %s", error)

    def _stop_recording(self, error: Exception) -> None:
        recorder, self._recorder = self._recorder, None
        gone = isinstance(error, BrokenPipeError)
        logger.warning("minitui's recording ends: %s", "its watcher has ended" if gone else repr(error))
        if recorder is not None:
            try:
                recorder.stop()
            except Exception:
                logger.debug("minitui's recorder could not be removed", exc_info=True)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self._recorder is not None:
            try:
                if self.requests.get(request.request_id) is request:  # else: more input for a known request
                    self._recorder.added(request)
            except Exception as error:
                self._stop_recording(error)

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        recorder = self._recorder
        if recorder is None:
            return super().schedule(*arguments, **options)
        began = now()
        output = super().schedule(*arguments, **options)
        try:
            recorder.scheduled(output, began)
        except Exception as error:
            self._stop_recording(error)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        recorder = self._recorder
        if recorder is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        began = now()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        try:
            recorder.updated(scheduler_output, model_runner_output, began)
        except Exception as error:
            self._stop_recording(error)
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        if self._recorder is not None:
            try:
                self._recorder.send_events()
            except Exception as error:
                self._stop_recording(error)
        return finished

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        super()._preempt_request(request, timestamp)
        if self._recorder is not None:
            self._recorder.events.append(("p", request.request_id))

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        if self._recorder is not None:
            self._recorder.events.append(("f", request.request_id, request.status.name, request.num_output_tokens))

    def reset_prefix_cache(self, *arguments: Any, **options: Any) -> bool:
        done = super().reset_prefix_cache(*arguments, **options)
        if self._recorder is not None and done:
            self._recorder.events.append(("r",))
            try:
                self._recorder.send_events()
            except Exception as error:
                self._stop_recording(error)
        return done

    def shutdown(self) -> None:
        super().shutdown()
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.stop()


class RecordingSync(_Recording):
    """vLLM's synchronous scheduler, recorded."""


class RecordingAsync(_Recording, AsyncScheduler):
    """vLLM's asynchronous scheduler, recorded."""
