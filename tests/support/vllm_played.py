"""Plays recorded calls of vLLM's engine (tests/support/vllm_calls.py) into minitui's recorder, without vLLM. A stand-in
for vLLM's scheduler does in each call what vLLM's scheduler did: it caches blocks, preempts, frees, and has the numbers
that vLLM had afterwards. The recorder and its scheduler classes are the real ones."""

from __future__ import annotations

import importlib
import json
import logging
import lzma
import os
import sys
from array import array
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.vllm_direct import Kept

FILE = Path(__file__).resolve().parents[1] / "vllm" / "calls.json.xz"
FACTS_EVERY = 40  # steps between two facts about the whole state
PLAIN = (
    "num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "vocab_size",
    "prefix_caching", "async_scheduling", "scheduling_policy",
)
OURS = ("facts", "hooks", "recorder", "scheduler")  # the modules that import vLLM


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """Returns the facts and the calls of each run."""
    runs: dict[str, dict[str, Any]] = json.loads(lzma.decompress(FILE.read_bytes()))
    return runs


def id_of(n: int) -> str:
    """Returns vLLM's id of a request."""
    return f"chatcmpl-{n:08x}"


class Request:
    """What the recorder reads of vLLM's request."""

    def __init__(self, n: int, prompt: list[int], max_tokens: int, salt: str | None, size: int) -> None:
        self.request_id, self.prompt_token_ids, self.max_tokens = id_of(n), prompt, max_tokens
        self.num_prompt_tokens, self.num_preemptions, self.num_computed_tokens = len(prompt), 0, 0
        self.is_prefill_chunk = True
        self.mm_features, self.lora_request, self.cache_salt, self.prompt_embeds = [], None, salt, None
        self.status = SimpleNamespace(name="WAITING")
        self._all_token_ids = list(prompt)
        self._size, self._last = size, repr(salt).encode()
        self.block_hashes: list[bytes] = []
        self.append([])

    def append(self, tokens: list[int]) -> None:
        """Append tokens, and hash the blocks that are full now."""
        self._all_token_ids += tokens
        size, done = self._size, len(self.block_hashes)
        for i in range(done, len(self._all_token_ids) // size):
            text = array("i", self._all_token_ids[i * size : (i + 1) * size]).tobytes()
            self._last = blake2b(self._last + text, digest_size=16).digest()
            self.block_hashes.append(self._last)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._all_token_ids) - self.num_prompt_tokens


class Pool:
    """vLLM's block pool: `free` and `first` are what vLLM's pool had."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.free = num_blocks - 1
        self.first: dict[bytes, int] = {}

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_cached_block(self, hash: bytes, _groups: list[int]) -> Any:
        return [SimpleNamespace(block_id=self.first[hash])] if hash in self.first else None

    def cache_full_blocks(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int
    ) -> None:
        pass

    def get_new_blocks(self, n: int) -> Any:
        raise NotImplementedError

    evict_blocks = get_new_blocks


class Spec:
    """Stands for vLLM's FullAttentionSpec."""


class Played:
    """Stands for vLLM's scheduler. `call`: what the next method does."""

    def __init__(self, vllm_config: Any) -> None:
        info = vllm_config.info
        self.vllm_config, self.connector = vllm_config, None
        self.size = info["block_size"]
        self.max_num_scheduled_tokens, self.max_num_running_reqs, self.max_model_len = (
            info[name] for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
        )
        self.manager = FullAttentionManager(
            block_size=self.size, kv_cache_spec=Spec(), kv_cache_group_id=0, req_to_blocks={}, num_cached_block={}
        )
        self.pool = Pool(info["num_blocks"])
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool, coordinator=SimpleNamespace(single_type_managers=[self.manager])
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._ever: list[Request] = []
        self.call: list[Any] = []
        self._left: dict[str, int] = {}  # request -> tokens that its prefill still has to compute

    # ---- what vLLM does inside a call

    def _play(self) -> None:
        *_, events, free, tables, running, waiting = self.call
        for kind, n, *rest in events:
            request = self._ever[n]
            if kind == "t":
                request.append(rest[0])
            elif kind == "c":
                self.pool.cache_full_blocks(
                    request=request, blocks=[], num_cached_blocks=rest[0], num_full_blocks=rest[1], block_size=self.size
                )
            elif kind == "p":
                self._set_table(n, *rest)
                self._preempt_request(request, 0.0)
            else:
                request.status.name = rest[0]
                self._free_request(request)
        for row in tables:
            self._set_table(*row)
        self.pool.free = free
        if running is not None:
            self.running = [self._ever[n] for n in running]
        if waiting is not None:
            self.waiting = [self._ever[n] for n in waiting]

    def _set_table(self, n: int, stay: int, new: list[int]) -> None:
        table = self.manager.req_to_blocks.setdefault(id_of(n), [])
        table[stay:] = [SimpleNamespace(block_id=block) for block in new]

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self.manager.req_to_blocks.pop(request.request_id, None)
        request.num_preemptions += 1

    def _free_request(self, request: Request) -> None:
        self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        self.manager.req_to_blocks.pop(request.request_id, None)
        del self.requests[request.request_id]

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    # ---- calls of the engine

    def add_request(self, request: Request) -> None:
        self._ever.append(request)
        self.requests[request.request_id] = request
        self._play()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        _, new, old, tokens, drafts, facts, *_ = self.call
        self._play()
        chunks: dict[int, bool] = {}
        for n, computed, is_chunk, hits in facts or ():
            request = self._ever[n]
            request.num_computed_tokens, chunks[n] = computed, is_chunk
            self.manager.num_cached_block[request.request_id] = len(hits)
            self.pool.first.update({hash: hit for hash, hit in zip(request.block_hashes, hits, strict=False) if hit})
        tables = {id: [block.block_id for block in blocks] for id, blocks in self.manager.req_to_blocks.items()}
        admitted = dict(new) | {n: computed for n, computed, _, resumed in old if resumed}
        for n, count in tokens:
            request = self._ever[n]
            if n in admitted:
                self._left[request.request_id] = request.num_tokens - admitted[n]
            left = self._left[request.request_id] = self._left[request.request_id] - count
            request.is_prefill_chunk = left > 0
            assert chunks.get(n, left > 0) == (left > 0), "vLLM says something else"
        cached = SimpleNamespace(
            req_ids=[id_of(n) for n, *_ in old], num_computed_tokens=[computed for _, computed, *_ in old],
            new_block_ids=[(tables[id_of(n)][-grown:],) if grown else None for n, _, grown, _ in old],
            resumed_req_ids={id_of(n) for n, *_, resumed in old if resumed},
        )
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=id_of(n), num_computed_tokens=computed, block_ids=(tables[id_of(n)],))
                for n, computed in new
            ],
            scheduled_cached_reqs=cached, num_scheduled_tokens={id_of(n): count for n, count in tokens},
            total_num_scheduled_tokens=sum(count for _, count in tokens),
            scheduled_spec_decode_tokens={id_of(int(n)): [0] * count for n, count in drafts.items()},
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        self._play()
        new = {id_of(n): tokens for kind, n, tokens in (event for event in self.call[-5] if event[0] == "t")}
        rows = [
            SimpleNamespace(request_id=id, new_token_ids=new[id])
            for id in scheduler_output.num_scheduled_tokens if id in new
        ]
        return {0: SimpleNamespace(outputs=rows)} if rows else {}

    def finish_requests(self) -> None:
        self._play()

    def reset_prefix_cache(self) -> bool:
        self._play()
        return bool(self.call[1])

    def shutdown(self) -> None:
        pass


class PlayedAsync(Played):
    """Stands for vLLM's asynchronous scheduler."""


@cache
def messages_of(name: str) -> list[tuple[Any, ...]]:
    """Returns what the recorder sends in a run, with vLLM's own numbers."""
    run = recorded()[name]
    with mock.patch.dict(os.environ, {"MINITUI_VLLM_CHECK": "1"}):
        scheduler = make_scheduler(run["info"], Kept)
    for _ in play(scheduler, run["calls"]):
        pass
    sent: list[tuple[Any, ...]] = scheduler._recorder.pipe.messages
    return sent


def _module(name: str, **values: Any) -> tuple[str, ModuleType]:
    module = ModuleType(name)
    module.__dict__.update(values, __path__=[])
    return name, module


def _config(info: dict[str, Any]) -> Any:
    return SimpleNamespace(
        info=info,
        model_config=SimpleNamespace(
            model="m", served_model_name="m", tokenizer="none", tokenizer_revision=None, dtype="torch.float32",
            quantization=None, get_vocab_size=lambda: info["vocab_size"], get_diff_sampling_param=dict,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=info["prefix_caching"]),
        parallel_config=SimpleNamespace(
            data_parallel_index=0, data_parallel_rank_local=0, world_size=1, tensor_parallel_size=1
        ),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=info["async_scheduling"], policy=info["scheduling_policy"]),
    )


SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")


class FullAttentionManager(SimpleNamespace):
    """Of the only KV cache group."""


def make_scheduler(info: dict[str, Any], pipe: type) -> Any:
    """Returns minitui's scheduler class over the stand-in. `pipe`: of the recorder."""
    import minitui.vllm as package

    platform = SimpleNamespace(get_device_name=lambda: "CPU", device_type="cpu")
    stubs = dict([
        _module("vllm", __version__="0.25.1"), _module("vllm.logger", init_logger=logging.getLogger),
        _module("vllm.platforms", current_platform=platform), _module("vllm.v1"), _module("vllm.v1.core"),
        _module("vllm.v1.core.sched"), _module("vllm.v1.core.sched.scheduler", Scheduler=Played),
        _module("vllm.v1.core.sched.async_scheduler", AsyncScheduler=PlayedAsync),
        _module("vllm.v1.kv_cache_interface", **dict.fromkeys(SPECS, Spec)),
    ])
    with mock.patch.dict(sys.modules, stubs), mock.patch.dict(vars(package)):  # both are as before afterwards
        for name in OURS:
            sys.modules.pop(f"minitui.vllm.{name}", None)
        scheduling = importlib.import_module("minitui.vllm.scheduler")
        recording = importlib.import_module("minitui.vllm.recorder")
        recording.Pipe = pipe  # type: ignore[attr-defined]
        return scheduling.recording_scheduler(_config(info))


def play(scheduler: Any, calls: list[list[Any]]) -> Iterator[list[Any]]:
    """Yields each call before the scheduler is called."""
    outputs: list[Any] = []
    added = 0
    for call in calls:
        yield call
        scheduler.call = call
        kind = call[0]
        if kind == "add":
            _, prompt, max_tokens, salt, *_ = call
            scheduler.add_request(Request(added, prompt, max_tokens, salt, scheduler.size))
            added += 1
        elif kind == "schedule":
            outputs.append(scheduler.schedule())
        elif kind == "update":
            _, at, sampled, *_ = call
            result = SimpleNamespace(
                req_id_to_index={id_of(int(n)): i for i, n in enumerate(sampled)},
                sampled_token_ids=[[0] * count for count in sampled.values()],
            )
            scheduler.update_from_output(outputs[at], result)
            outputs[at].num_scheduled_tokens.clear()  # as vLLM's worker may do
        elif kind == "finish":
            scheduler.finish_requests()
        else:
            scheduler.reset_prefix_cache()
