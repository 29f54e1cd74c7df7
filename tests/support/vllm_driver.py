"""vLLM's own scheduler without a model: random tokens stand for the results of steps, as in vLLM's tests/v1/core.
Import this only where vLLM is installed."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from minitui.vllm.scheduler import recording_scheduler

BLOCK = 16
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}


def make_scheduler(
    directory: Path, blocks: int = 60, rows: int = 8, budget: int = 128, caching: bool = True,
    asynchronous: bool = False, drafts: int = 0, policy: str = "fcfs", chunked: bool = True, log_stats: bool = True,
    rank: int = 0, groups: str = "", size: int = BLOCK, unit: int = 0, states: str = "align",
    dense: bool = False,
) -> Any:
    """Returns vLLM's scheduler, recorded. Its watcher runs, unless a test has replaced minitui.vllm.recorder.Pipe.

    `rank`: of a dense model's engine. `groups`: KV cache groups, as "full window:64 state": see `_spec`. `size`: tokens
    of a block; `unit`: of a hash, 0: of a block. `states`: vLLM's mode of caching recurrent states. `dense`: all pages
    of windows and states are cached, as before 0.28; else what the version retains by default.
    """
    (directory / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig(
        model=str(directory), tokenizer=str(directory), skip_tokenizer_init=True, dtype="float32", seed=0,
        max_model_len=4096,
    )
    schedule = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=budget if chunked else 4096, max_model_len=4096,
        is_encoder_decoder=False,
        enable_chunked_prefill=chunked, async_scheduling=asynchronous, policy=policy,
    )
    cache = CacheConfig(block_size=size, enable_prefix_caching=caching)
    cache.mamba_cache_mode = states if caching else "none"
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=4)
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=schedule, parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"), speculative_config=speculative,
    )
    config.parallel_config.data_parallel_index = config.parallel_config.data_parallel_rank_local = rank
    cache.num_gpu_blocks = blocks
    specs = [_spec(words, size, cache.mamba_cache_mode, drafts) for words in (groups or "full").split()]
    retains = {} if dense else {
        name: getattr(cache, name) for name in ("prefix_cache_retention_interval",) if hasattr(cache, name)
    }
    pool = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)],
        **retains,
    )
    init_none_hash(sha256)
    sizes = [spec.block_size for spec in specs]
    if caching:
        unit = unit or math.gcd(*sizes)
    return recording_scheduler(
        vllm_config=config, kv_cache_config=pool, structured_output_manager=StructuredOutputManager(config),
        block_size=math.lcm(*sizes), log_stats=log_stats,
        **({"hash_block_size": unit} if len(sizes) > 1 and unit else {}),
    )


def _spec(words: str, size: int, states: str, drafts: int) -> Any:
    """Returns the specification of one KV cache group: "full", "window:TOKENS", "chunks:TOKENS" or "state". Another
    number of tokens of a block may follow: "window:64:8"."""
    kind, *numbers = words.split(":")
    shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind in ("full", "state"):
        size = int(numbers[0]) if numbers else size
    elif len(numbers) > 1:
        size = int(numbers[1])
    if kind == "full":
        return FullAttentionSpec(block_size=size, **shape)
    if kind == "window":
        return SlidingWindowSpec(block_size=size, sliding_window=int(numbers[0]), **shape)
    if kind == "chunks":
        return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=int(numbers[0]), **shape)
    return MambaSpec(
        block_size=size if states == "align" else 4096, shapes=((1,),), dtypes=(torch.float32,),
        mamba_cache_mode=states, num_speculative_blocks=drafts,
    )


class Grammar:
    """Stands for a compiled schema: it accepts all tokens."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens


class Load:
    """Drives a scheduler with random requests, steps and cancellations. `in_flight`: steps that may overlap."""

    def __init__(
        self, scheduler: Any, seed: int, in_flight: int = 1, vocabulary: int = 40, drafts: int = 0, longest: int = 0,
        schemas: float = 0.0,
    ) -> None:
        """`longest`: tokens of the longest prompts; `schemas`: the share of requests with a schema."""
        self.longest, self.schemas = longest, schemas
        self.scheduler, self.random, self.drafts = scheduler, random.Random(seed), drafts
        self.most_in_flight, self.vocabulary = in_flight, vocabulary
        self.steps = self.requests = 0
        self.waited = 0  # requests that waited for their schema
        self._compiling: list[Future[Grammar]] = []
        self._queue: deque[Any] = deque()
        self._alive: list[str] = []
        self._hasher = get_request_block_hasher(scheduler.kv_cache_manager.block_pool.hash_block_size, sha256)
        draw = self.random.randrange
        self._prefixes = [[draw(vocabulary) for _ in range(draw(1, 160))] for _ in range(5)]

    def add(
        self, prompt: list[int], max_tokens: int, priority: int = 0, salt: str | None = None, schema: bool = False
    ) -> str:
        """Submit one request; returns its id. `schema`: it waits until its schema is compiled, some steps later."""
        id = f"chatcmpl-{self.requests:08x}"
        self.requests += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if schema:
            params.structured_outputs = StructuredOutputsParams(json_object=True)
        request = Request(
            request_id=id, prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
            block_hasher=self._hasher, priority=priority, cache_salt=salt,
        )
        if schema:
            assert request.structured_output_request is not None
            request.structured_output_request.grammar = future = Future()
            self._compiling.append(future)
            self.waited += 1
        self.scheduler.add_request(request)
        self._alive.append(id)
        return id

    def add_random(self) -> None:
        """Submit a request that may share a prefix, or all of its prompt, with others."""
        rnd = self.random
        prompt = list(rnd.choice(self._prefixes)) + [
            rnd.randrange(self.vocabulary) for _ in range(rnd.choice([0, 1, 9, 60]))
        ]
        if rnd.random() < 0.1:
            prompt += [rnd.randrange(self.vocabulary) for _ in range(300)]
        if self.longest and rnd.random() < 0.2:
            prompt += [rnd.randrange(self.vocabulary) for _ in range(rnd.randrange(self.longest))]
        salt = "s" if rnd.random() < 0.1 else None
        schema = rnd.random() < self.schemas
        self.add(prompt, rnd.choice([1, 2, 20, 80, 200]), priority=rnd.randrange(3), salt=salt, schema=schema)

    def step(self) -> None:
        """Schedule a step, and end steps until at most `in_flight` - 1 are left."""
        if self._compiling and (self.random.random() < 0.2 or not self.scheduler.get_request_counts()[0]):
            self._compiling.pop(0).set_result(Grammar())
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.steps += bool(output.total_num_scheduled_tokens)
            self._queue.append((output, self.chunks(output)))
        while len(self._queue) >= self.most_in_flight or (self._queue and self.random.random() < 0.1):
            self._end_step(*self._queue.popleft())

    def finish(self) -> None:
        """Run until nothing is left to do."""
        while self.scheduler.has_requests() or self._queue:
            self.step()
            while self._queue:
                self._end_step(*self._queue.popleft())

    def sample(self, id: str) -> int:
        """Returns the next token of a request."""
        return self.random.randrange(self.vocabulary)

    def chunks(self, output: Any) -> set[str]:
        """Returns the requests of which this step, the last one, does not complete the prefill."""
        return {id for id in output.num_scheduled_tokens if self.scheduler.requests[id].is_prefill_chunk}

    def result_of(self, output: Any, chunks: set[str]) -> ModelRunnerOutput:
        """Returns the tokens that a step samples."""
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for id in ids:
            drafts = output.scheduled_spec_decode_tokens.get(id, ())
            if id in chunks:
                sampled.append([])
            else:
                accepted = self.random.randint(0, len(drafts))
                sampled.append([self.sample(id) for _ in range(accepted + 1)])
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={id: i for i, id in enumerate(ids)}, sampled_token_ids=sampled,
        )

    def draft(self, ids: list[str]) -> DraftTokenIds:
        """Returns drafts for the next step of these requests."""
        alive = [id for id in ids if id in self.scheduler.requests]
        most = [self.random.randint(0, self.drafts) for _ in alive]
        return DraftTokenIds(alive, [[self.random.randrange(self.vocabulary) for _ in range(n)] for n in most])

    def _end_step(self, output: Any, chunks: set[str]) -> None:
        result = self.result_of(output, chunks)
        self.scheduler.update_from_output(output, result)
        _reuse(output)
        if self.drafts:
            self.scheduler.update_draft_token_ids(self.draft(result.req_ids))

    def cancel(self) -> None:
        """Cancel a random request, as when its client goes away."""
        alive = [id for id in self._alive if id in self.scheduler.requests]
        self._alive = alive
        if alive:
            self.scheduler.finish_requests(self.random.choice(alive), RequestStatus.FINISHED_ABORTED)

    def run(self, steps: int) -> None:
        """Run this many steps under a load that changes: quiet, busy, more than the pool holds."""
        while self.steps < steps:
            busy = (0.05, 0.3, 0.9)[self.steps // 50 % 3]
            while self.random.random() < busy and len(self.scheduler.requests) < 60:
                self.add_random()
            if not self.scheduler.has_requests() and not self._queue:
                self.add_random()
            if self.random.random() < 0.03:
                self.cancel()
            self.step()


def _reuse(output: Any) -> None:
    """Change what vLLM's worker may change, after the step: it keeps the lists of blocks and appends to them."""
    cached = output.scheduled_cached_reqs
    for id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if id in cached.resumed_req_ids:
            blocks[0].append(0)
    for new in output.scheduled_new_reqs:
        new.block_ids[0].append(0)
    output.num_scheduled_tokens.clear()
    output.scheduled_spec_decode_tokens.clear()
