"""The model on its device, with its KV pool and the rows of the batch: the state that all executors share.

A block of full attention is needed for each block of text. A running request needs few pages of a window, however long
its text is, and few slots of states; what is left of these pools are pages and checkpoints that later requests may use.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention.base import ForwardMeta, PagedGroup, StateMeta
from engine.attention.choose import choose_attention
from engine.attention.kv_fp8 import FP8
from engine.attention.kv_pool import KVPool
from engine.config import EngineConfig
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.errors import EngineError
from engine.groups import CacheGroup, cache_groups, paged_groups
from engine.model.config import ModelConfig
from engine.model.experts import Ops
from engine.model.group import ALONE, Group
from engine.model.kv_scales import kv_scales
from engine.progress import Progress
from engine.trace.side_pool import SideGroup, window_pages
from engine.worker.batch import Batch
from engine.worker.cpu.cores import default_threads
from engine.worker.inputs import Draws
from engine.worker.launch import DrawnLogprobs, LaunchedStep, PromptLogprobs
from engine.worker.limits import graph_bytes, resolve, step_limits
from engine.worker.sampler import Drawn
from engine.worker.upload import to_host
from engine.worker.weights.load_model import load_model
from engine.worker.weights.quantised import weight_bytes

if TYPE_CHECKING:
    from engine.kernels.compile_ahead import CompileAhead

CPU_KV_BYTES = 1 << 30  # default pool on a CPU; smaller if CPU_KV_SEQUENCES sequences of maximum length need less
CPU_KV_SEQUENCES = 16
SORT_BYTES = 46  # of a logit, while torch sorts logits for top-p draws: copies, sorted values, their indices
EXPERT_LOAD_SECONDS = 0.25  # seconds between two reports of the experts' load; the reports are only displayed


class DrawFailed(Exception):
    """Sampling raised `error` on rank 0 of several ranks. Even so, all ranks have run the same collectives."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class MemoryReport:
    """Sizes in bytes, measured when the runner started."""

    weights: int
    kv_cache: int
    notes: list[str] = field(default_factory=list)


class LoadedModel:
    """Owns the model, the KV pool and the batch. `shard`: the configuration of this rank's part of the model."""

    def __init__(
        self, model_config: ModelConfig, engine_config: EngineConfig, ops: Ops, model_dir: Path | None = None,
        on_progress: Progress | None = None, group: Group = ALONE, reserved_bytes: int = 0,
        compiler: CompileAhead | None = None,
    ) -> None:
        """Loads the weights (random weights if engine_config.dummy_weights) and sizes the pool. Raises EngineError.
        `reserved_bytes`: device memory that the KV cache leaves to the executors. `compiler`: None: each kernel is
        compiled when it is launched for the first time."""
        limits = resolve(engine_config, model_config)
        self.model_config = model_config
        self.config = engine_config
        self.group = group
        self._reserved_bytes = reserved_bytes
        self.compiler = compiler
        self.device, self.dtype, self.kv_dtype = group.own_device(limits.device), limits.dtype, limits.kv_dtype
        self.quantization = limits.quantization
        self.shard = group.shard(model_config)
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_model_len = limits.max_model_len
        if self.device.type == "cpu":
            torch.set_num_threads(engine_config.cpu_threads or max(1, default_threads() // group.size))
        self.block_size = engine_config.block_size
        self.vocab_size = model_config.vocab_size
        self.device_name = _device_name(self.device, group.size)
        self.graphs: dict[str, Any] = {}  # EngineInfo.graphs
        self.notes: tuple[str, ...]  # sentences for the user about the runner
        with torch.inference_mode():
            self.model, self.notes = load_model(
                model_config, replace(limits, device=self.device), engine_config, group, ops, model_dir, on_progress
            )
            if note := group.join(model_config.hidden_size, self.dtype):
                self.notes += (note,)
            self._kv_scales = kv_scales(self.model) if self.kv_dtype == FP8 else None
            max_rows = limits.max_num_seqs
            self.attention = choose_attention(
                engine_config.attention_backend, self.shard, self.block_size, self.dtype, self.device, max_rows,
                self.max_model_len, self.kv_dtype, self.model.sinks,
            )
            self.attention_name = self.attention.name
            self.memory = MemoryReport(weights=self.model.nbytes, kv_cache=0)
            self.batch = Batch(
                max_rows, self.max_model_len, self.block_size, self.vocab_size, self.device,
                engine_config.logprobs_mode == "processed_logprobs",
                tuple(group.window for group in paged_groups(self.shard)[1:]),
            )
            if on_progress is not None:
                on_progress({"stage": "warm-up", "done": 0, "total": 0, "text": "measuring the memory of a step"})
            for tokens in (self.max_num_batched_tokens, 1):
                self.compile_ahead(partial(self.warm_up, tokens))
            self._sizes = PoolSizes(self.shard, engine_config, max_rows, self.max_num_batched_tokens, self.kv_dtype)
            self.block_bytes = self._sizes.block_bytes
            blocks = group.least(self._count_blocks())
            self.num_blocks = blocks + 1  # plus the null block
            self.groups = self._sizes.sides(blocks)
            if on_progress is not None:
                on_progress({"stage": "pool", "done": 0, "total": 0, "text": "allocating the KV cache"})
            self.pool = self._make_pool(self.num_blocks, tuple(side.num_blocks for side in self.groups))
        self.memory.kv_cache = self.pool.nbytes
        self._expert_load_due = math.inf if model_config.experts is None else 0.0

    @property
    def synchronous(self) -> bool:
        """True on a CPU: a step is complete when `launch` returns."""
        return self.device.type == "cpu"

    def sample(self, draws: Draws, logits: torch.Tensor, grammars: Mapping[int, Grammar]) -> Drawn:
        """Draw one token for each of `draws`, and store it as the row's last token. May overwrite logits [s, V]. With
        several ranks only rank 0 draws; it broadcasts the ids to the other ranks."""
        group, batch = self.group, self.batch
        if group.rank:
            ids = group.broadcast(self._no_ids(draws))
            drawn = Drawn(ids, torch.zeros_like(ids, dtype=torch.bool), np.zeros(0, dtype=np.int64), None)
        else:
            try:
                drawn = self._draw(draws, logits, grammars)
            except Exception as error:
                if group.size == 1:
                    raise
                group.broadcast(self._no_ids(draws))  # the other ranks wait for this broadcast
                raise DrawFailed(error) from error
            group.broadcast(drawn.ids)
        batch.last_token.index_copy_(0, draws.device_rows, drawn.ids)
        return drawn

    def _draw(self, draws: Draws, logits: torch.Tensor, grammars: Mapping[int, Grammar]) -> Drawn:
        if not len(draws.entries):  # only prefill chunks, and no chunk ends its prompt
            nothing = self._no_ids(draws)
            return Drawn(nothing, nothing > 0, draws.entries, None)
        by_draw: dict[int, Grammar] = {}
        if grammars:
            by_draw = {i: grammars[entry] for i, entry in enumerate(draws.entries.tolist()) if entry in grammars}
        return self.batch.sampler.sample(
            logits, draws.rows, draws.positions, draws.device_rows, draws.device_positions, by_draw
        )

    def _no_ids(self, draws: Draws) -> torch.Tensor:
        return torch.zeros(len(draws.entries), dtype=torch.int64, device=self.device)

    def launched(
        self, plan: StepPlan, draws: Draws, drawn: Drawn, prompt_logprobs: dict[int, PromptLogprobs], started: float,
        begin: Any,
    ) -> LaunchedStep:
        """Start the copy of `drawn` to the host; return the step. `begin`: the step's first `mark`; None on a CPU."""
        logprobs = None
        if drawn.logprobs is not None:
            counts = self.batch.sampler.logprob_counts(draws.rows[drawn.logprob_rows])
            logprobs = DrawnLogprobs(drawn.logprob_rows, drawn.logprobs, counts)
        device_ms, events, load = None, None, self.take_expert_load()
        if begin is None:
            ids, bad = drawn.ids.numpy(), drawn.bad.numpy()
            outcome = np.where(bad, -1 - ids, ids) if bad.any() else ids
            device_ms = (time.perf_counter() - started) * 1e3
        else:
            outcome = to_host(torch.where(drawn.bad, -1 - drawn.ids, drawn.ids)).numpy()
            if logprobs is not None:
                logprobs = logprobs._replace(values=logprobs.values.fetched())
            prompt_logprobs = {
                entry: scored._replace(values=scored.values.fetched()) for entry, scored in prompt_logprobs.items()
            }
            events = (begin, self.mark())
        return LaunchedStep(
            len(plan.rows), outcome, None, draws.entries, range(plan.num_decodes, plan.num_decoding), device_ms,
            events, logprobs, prompt_logprobs, self.group.take_time(), load,
        )

    def take_expert_load(self) -> tuple[list[int], torch.Tensor] | None:
        """Returns (indices of the layers with experts, number of tokens of each expert); starts the copy to the host.
        Returns None if the model has no experts, or if the last report is younger than EXPERT_LOAD_SECONDS."""
        now = time.perf_counter()
        if now < self._expert_load_due:
            return None
        self._expert_load_due = now + EXPERT_LOAD_SECONDS
        layers, load = self.model.take_expert_load()
        return layers, load if self.synchronous else to_host(load)

    def mark(self) -> Any:
        """Record an event in the compute stream and return it, for measuring times. Returns None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # ---- the pool

    def _make_pool(self, num_blocks: int, side_blocks: tuple[int, ...] = ()) -> KVPool:
        return KVPool(self.shard, num_blocks, self.block_size, self.kv_dtype, self.device, self._kv_scales, side_blocks)

    def _count_blocks(self) -> int:
        """Returns the number of blocks without the null block: as configured, else as many as memory allows."""
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        if self.config.kv_tokens is not None:
            return -(-self.config.kv_tokens // self.block_size)
        if self.device.type == "cpu":
            enough = CPU_KV_SEQUENCES * -(-self.max_model_len // self.block_size)
            return max(1, min(enough, self._sizes.blocks_in(CPU_KV_BYTES)))
        return max(1, self._sizes.blocks_in(self._free_bytes() - self._reserved_bytes))

    def _free_bytes(self) -> int:
        """Returns what is left of the `gpu_memory_utilization` share of the GPU's memory beside all other use: weights,
        activations and other processes.
        """
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        logits = self.warm_up(self.max_num_batched_tokens)
        logits.float().sort(descending=True).values.softmax(-1).cumsum(-1)  # no sampling needs more memory than top-p
        del logits
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        elsewhere = total - free - torch.cuda.memory_reserved(self.device)
        room = int(total * self.config.gpu_memory_utilization) - peak - elsewhere
        torch.cuda.empty_cache()
        if room < self._sizes.bytes_for(1):
            share = self.config.gpu_memory_utilization
            raise EngineError(
                f"no room for a KV cache: gpu_memory_utilization {share:g} allows {total * share / 1e9:.1f} of "
                f"{total / 1e9:.1f} GB, but weights and activations take {peak / 1e9:.1f} GB and other processes "
                f"{elsewhere / 1e9:.1f} GB: raise gpu_memory_utilization, lower max_num_batched_tokens, or free the GPU"
            )
        return room

    def compile_ahead(self, run: Callable[[], object]) -> int:
        """Let other threads compile the kernels that `run` launches, which are not launched now. Returns the bytes of
        device memory that `run` needs; 0 if unknown. Without a compiler, this does nothing."""
        if self.compiler is None:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with self.first_layers():
            self.compiler.gather(run)
        return torch.cuda.max_memory_allocated(self.device) - before

    @contextlib.contextmanager
    def first_layers(self) -> Iterator[None]:
        """Within this context, the model has only the layers up to the first of each kind. Layers of a kind launch the
        same kernels."""
        layers, kinds = self.model.layers, dict[Any, int]()
        for i, layer in enumerate(layers):
            kinds.setdefault((self.shard.window(i) > 0, _kind(layer), _kind(layer.mlp)), i)
        self.model.layers = layers[: max(kinds.values()) + 1]
        try:
            yield
        finally:
            self.model.layers = layers

    def warm_up(self, tokens: int, pool: KVPool | None = None) -> torch.Tensor:
        """Run a step of at most `tokens` prompt tokens, whose keys and values go to the null block of `pool`. None: a
        pool of its own, with only a null block. Returns logits for the largest number of draws of a step."""
        pool, n = pool or self._make_pool(1), min(self.batch.max_rows, tokens)
        lengths = np.full(n, tokens // n)
        lengths[0] += tokens - int(lengths.sum())
        lengths = np.minimum(lengths, self.max_model_len)
        ends = np.cumsum(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        longest = int(lengths.max())
        drawn = ends - 1
        if self.config.speculation != "off":  # an entry with drafts draws once for each of its tokens
            drawn = np.arange(len(positions))[: self.batch.max_rows * (1 + self.config.speculative_tokens)]
        slots = self.batch.upload(np.zeros(len(positions), dtype=np.int64))
        table = torch.zeros(n, -(-longest // self.block_size), dtype=torch.int32, device=self.device)
        segments = np.stack((ends - lengths, ends, 0 * ends, 0 * ends), 1).astype(np.int32)  # written to no slot
        meta = ForwardMeta(
            positions=self.batch.upload(positions),
            slot_mapping=slots,
            cu_seqlens_q=self.batch.upload(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=self.batch.upload(lengths.astype(np.int32)),
            block_table=table,
            max_q_len=longest,
            max_seq_len=longest,
            num_decodes=0,
            logit_rows=self.batch.upload(drawn),
            fresh=True,
            groups=(PagedGroup(slots, table),) * len(self.batch.windows),
            states=StateMeta(
                self.batch.upload(segments), self.batch.bounds[: n + 1], list(map(tuple, segments.tolist())), 0
            )
            if self.shard.state_layers
            else None,
        )
        token_ids = torch.zeros(len(positions), dtype=torch.int64, device=self.device)
        self.attention.plan(meta)
        return self.model.logits(self.model.forward(token_ids, meta, self.attention, pool))


def _kind(part: object) -> tuple[Any, ...]:
    """Returns the types and shapes of what a part of the model consists of."""
    found = vars(part).items()
    return tuple((name, type(each), tuple(getattr(each, "shape", ()))) for name, each in found if each is not None)


def _device_name(device: torch.device, ranks: int) -> str:
    threads = torch.get_num_threads()
    name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return name if ranks == 1 else f"{ranks} ranks of {name}"


TEXT = 1024  # tokens of a running request, as assumed for the number of states that a pool of blocks can use
SLOTS = 3  # of a running request: its own, the checkpoint that it makes, and the one that it read or made before


class PoolSizes:
    """The pools for the groups of one model."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, max_rows: int, budget: int, kv_dtype: torch.dtype
    ) -> None:
        """`max_rows`: requests that run at the same time. `budget`: tokens of a step."""
        self._groups, self._config = cache_groups(model), config
        # Of a block, page or slot of each group.
        self.block_bytes = [group.block_bytes(config.block_size, kv_dtype) for group in self._groups]
        self._size, self._rows, self._budget = config.block_size, max_rows, budget
        self._drafts = config.speculative_tokens if config.speculation != "off" else 0

    def sides(self, blocks: int) -> tuple[SideGroup, ...]:
        """Returns the side groups for a pool of `blocks` blocks of full attention, with their null blocks. Raises
        EngineError if the configured sizes are too small for one request."""
        return tuple(
            SideGroup(group.name, group.kind, 1 + self._count(group, blocks), group.window)
            for group in self._groups[1:]
        )

    def _count(self, group: CacheGroup, blocks: int) -> int:
        size, config = self._size, self._config
        if group.kind == "window":
            pages = min(blocks, window_pages(group.window, size))
            least, given, what = pages + -(-self._drafts // size), config.window_blocks, "window_blocks"
            chosen = max(least, min(blocks, self._rows * pages + -(-self._budget // size)))
        else:
            least, given, what = 2 + self._drafts, config.state_slots, "state_slots"
            running = max(1, min(self._rows, blocks * size // TEXT))
            chosen = running * (SLOTS + self._drafts) + blocks * size // config.checkpoint_interval
        if given is not None and given < least:
            raise EngineError(
                f"{what} is {given:,}, but one request needs {least:,} in the group {group.name!r}"
                + (f" with {self._drafts} drafts" if self._drafts else "")
                + f": raise --{what.replace('_', '-')}, or leave it out"
            )
        return chosen if given is None else given

    def bytes_for(self, blocks: int) -> int:
        """Returns the bytes of all pools, for a number of blocks of full attention."""
        numbers = blocks + 1, *(side.num_blocks for side in self.sides(blocks))
        return sum(number * size for number, size in zip(numbers, self.block_bytes, strict=True))

    def blocks_in(self, room: int) -> int:
        """Returns the largest number of blocks of full attention whose pools fit in `room` bytes; 0: none."""
        low, high = 0, room // max(1, self.block_bytes[0]) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= room else (low, middle)
        return low


def expected_tokens(model: ModelConfig, config: EngineConfig, total: int, used: int) -> int:
    """Returns how many tokens the KV cache of a GPU would have; 0: the model does not fit. `total`: bytes of its
    memory; `used`: those that its driver and other processes take. LoadedModel measures the memory of a step; here it
    is estimated: that of the sort for top-p draws, or of gate, up, their product and the hidden states."""
    rows, budget = step_limits(config, total)
    experts = model.experts
    inner = model.intermediate_size if experts is None else experts.inner_size * experts.per_token
    tokens = 2 * budget * (3 * inner + 4 * model.hidden_size)
    expanded = 4 * inner * model.hidden_size if config.quantization == "int4" and experts is None else 0  # gate and up
    step = max(SORT_BYTES * rows * model.vocab_size, tokens, expanded + tokens // 2)
    weights = weight_bytes(config.quantization, model, torch.bfloat16)
    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else torch.bfloat16
    room = int(total * config.gpu_memory_utilization) - weights - step - graph_bytes(total) - used
    return PoolSizes(model, config, rows, budget, kv_dtype).blocks_in(room) * config.block_size
