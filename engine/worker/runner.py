"""The device side of a step: takes a StepPlan, runs the model over it, draws the tokens.

`launch` reads as the step does: apply the plan's changes to the persistent rows, build the inputs, forward, sample,
remember what was drawn. Each is a method, so that a runner with CUDA graphs replaces those it does differently.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.attention.choose import choose_attention
from engine.attention.kv_fp8 import FP8
from engine.attention.kv_pool import KVPool
from engine.config import EngineConfig
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.errors import EngineError
from engine.model import ops as torch_ops
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.group import ALONE, Group
from engine.model.kv_scales import kv_scales
from engine.model.weights import Slot, dummy_weights, load_weights
from engine.progress import Progress
from engine.worker.inputs import Inputs, Layout, drawing_tokens, logit_rows
from engine.worker.launch import Launched, PromptLogprobs
from engine.worker.limits import resolve
from engine.worker.quantised import KINDS
from engine.worker.sampler import Drawn, Logprobs, Sampler, pick_logprobs
from engine.worker.upload import Uploader, to_host

CPU_KV_BYTES = 1 << 30  # the pool's default size on a CPU, or 16 sequences of full length if that is less
CPU_KV_SEQUENCES = 16
EXPERT_LOAD_SECONDS = 0.25
LOGPROB_ROWS = 256  # prompt logprobs: positions whose logits exist at once


@dataclass(slots=True)
class MemoryReport:
    """Bytes, as they were found when the runner started."""

    weights: int
    kv_cache: int
    notes: list[str] = field(default_factory=list)


class Runner:
    """Owns the model, the KV pool and the persistent state of every row: block table, last token, sampling settings.

    Public attributes: num_blocks (the null block included), block_size, vocab_size, max_rows, max_num_batched_tokens,
    max_model_len, device, device_name, dtype, model_config, attention_name, memory, notes.
    """

    ops: ModuleType = torch_ops  # the decoder's small operations
    group: Group = ALONE  # the ranks that share the model
    notes: tuple[str, ...] = ()  # what a user may want to know of how it runs

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        model_dir: Path | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Loads the weights (random ones if engine_config.dummy_weights) and sizes the pool; raises EngineError."""
        limits = resolve(engine_config, model_config)
        self.model_config = model_config
        self.config = engine_config
        self.device, self.dtype = self._own_device(limits.device), limits.dtype
        self.kv_dtype = limits.kv_dtype
        self.shard = self._shard(model_config)
        self.max_rows = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_model_len = limits.max_model_len
        if self.device.type == "cpu":
            threads = ((os.cpu_count() or 2) - 1) // self.group.size
            torch.set_num_threads(engine_config.cpu_threads or max(1, threads))
        self.block_size = engine_config.block_size
        self.vocab_size = model_config.vocab_size
        self.device_name = _device_name(self.device)
        with torch.inference_mode():
            self.model = self._load(model_dir, on_progress)
            self._kv_scales = kv_scales(self.model) if self.kv_dtype == FP8 else None
            self.attention = choose_attention(
                engine_config.attention_backend,
                self.shard,
                self.block_size,
                self.dtype,
                self.device,
                self.max_rows,
                self.max_model_len,
                self.kv_dtype,
            )
            self.attention_name = self.attention.name
            self.memory = MemoryReport(weights=self.model.nbytes, kv_cache=0)
            self._upload = Uploader(self.device)
            # Host and device block table are one on a CPU; on a GPU the device's follows by copies in stream order.
            columns = -(-self.max_model_len // self.block_size)
            self._host_table = np.zeros((self.max_rows, columns), dtype=np.int32)
            self.block_table = torch.from_numpy(self._host_table).to(self.device)
            self._indices = np.arange(self.max_rows + 1)
            self._bounds = torch.arange(self.max_rows + 1, dtype=torch.int32, device=self.device)
            self.last_token = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)
            self.sampler = Sampler(self.max_rows, model_config.vocab_size, self.device, self._upload)
            self.num_blocks = self._count_blocks() + 1  # and the null block
            self.pool = self._make_pool(self.num_blocks)
        self.memory.kv_cache = self.pool.nbytes
        self._expert_load_due = math.inf if model_config.experts is None else 0.0
        with torch.inference_mode():
            self._prepare(on_progress)
            if model_config.experts is not None:
                self.model.take_expert_load()  # what was sent them on the way here

    def _prepare(self, on_progress: Progress | None) -> None:
        """The last of the start: what the runners of some devices make for their own ways to run a step."""

    @property
    def synchronous(self) -> bool:
        """The device is the host: a step is over when `launch` returns."""
        return self.device.type == "cpu"

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Launched:
        """Enqueue a step; on a CPU it is over when this returns."""
        started = time.perf_counter()
        with torch.inference_mode():
            begin = self._mark()
            self.apply(plan)
            inputs = self.build_inputs(plan)
            logits, prompt_logprobs = self.forward(plan, inputs)
            drawn = self.sample(inputs, logits, grammars)
            self.last_token.index_copy_(0, inputs.device_rows, drawn.ids)
            return self._finish(plan, inputs, drawn, prompt_logprobs, started, begin)

    def apply(self, plan: StepPlan) -> None:
        """The plan's changes to the persistent rows: new blocks in the table, new requests' sampling settings."""
        self._change_table(plan)
        for settings in plan.joins:
            self.sampler.set_row(settings)

    def _change_table(self, plan: StepPlan) -> None:
        if len(plan.table_rows):
            self._host_table[plan.table_rows, plan.table_columns] = plan.table_blocks
            if self.device.type != "cpu":
                changes = np.stack((plan.table_rows, plan.table_columns, plan.table_blocks)).astype(np.int64)
                rows, columns, blocks = self._upload(changes)
                self.block_table[rows, columns] = blocks.to(torch.int32)

    def layout(self, plan: StepPlan) -> Layout:
        """Computed on the host; the plan's changes to the block table have been applied."""
        n, tokens = len(plan.rows), plan.num_tokens
        seq_lens = plan.starts + plan.q_lens
        if tokens == n:  # one token each
            ends, rows, positions = self._indices[1 : n + 1], plan.rows, plan.starts
        else:
            ends = np.cumsum(plan.q_lens)
            rows = np.repeat(plan.rows, plan.q_lens)
            positions = np.arange(tokens) - np.repeat(ends - seq_lens, plan.q_lens)
        blocks, offsets = np.divmod(positions, self.block_size)
        slots = self._host_table[rows, blocks] * np.int64(self.block_size) + offsets
        return Layout(ends, seq_lens, rows, positions, slots)

    def build_inputs(self, plan: StepPlan) -> Inputs:
        """What the model has to know of every token, sent in one piece."""
        n, tokens, rows = len(plan.rows), plan.num_tokens, plan.rows
        ends, seq_lens, token_rows, positions, slots = self.layout(plan)
        bounds = np.concatenate((self._indices[:1], ends)).astype(np.int32) if tokens > n else None
        bounds_ = self._bounds[: n + 1] if bounds is None else self._upload(bounds)
        samples, drawing = self._indices[:n], ends - 1
        if plan.num_drafted:
            samples, drawing = drawing_tokens(plan, ends)
        elif not plan.samples.all():
            samples = np.flatnonzero(plan.samples)
            drawing = drawing[samples]
        draw_rows, draw_positions = rows[samples], positions[drawing] + 1
        wanted, sampled_hidden, prompt_hidden = logit_rows(plan, ends, drawing)
        every = len(wanted) == tokens
        token_ids, positions_, slots_, draw_rows_, draw_positions_, wanted_ = self._upload_together(
            plan.token_ids, positions, slots, draw_rows, draw_positions, wanted[:0] if every else wanted
        )
        if (plan.token_ids < 0).any():
            drawn_last = self.last_token.index_select(0, self._upload(token_rows.astype(np.int64)))
            token_ids = torch.where(token_ids < 0, drawn_last, token_ids)
        longest = int(seq_lens.max())
        meta = ForwardMeta(
            positions=positions_,
            slot_mapping=slots_,
            cu_seqlens_q=bounds_,
            seq_lens=self._upload(seq_lens),
            block_table=self._upload(self._host_table[rows, : -(-longest // self.block_size)]),
            max_q_len=1 if tokens == n else int(plan.q_lens.max()),
            max_seq_len=longest,
            num_decodes=plan.num_decodes,
            logit_rows=None if every else wanted_,
            fresh=not plan.starts[plan.num_decodes :].any(),
        )
        return Inputs(
            token_ids=token_ids,
            meta=meta,
            samples=samples,
            rows=draw_rows,
            positions=draw_positions,
            device_rows=draw_rows_,
            device_positions=draw_positions_,
            sampled_hidden=sampled_hidden,
            prompt_hidden=prompt_hidden,
        )

    def forward(self, plan: StepPlan, inputs: Inputs) -> tuple[torch.Tensor, dict[int, PromptLogprobs]]:
        """Logits [s, V] of the entries that sample, and what prompt logprobs were asked for.

        Afterwards the KV cache holds this step's tokens.
        """
        meta = inputs.meta
        assert meta is not None
        self.attention.plan(meta)
        hidden = self.model.forward(inputs.token_ids, meta, self.attention, self.pool)
        prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden)
        if inputs.sampled_hidden is not None:
            hidden = hidden.index_select(0, self._upload(inputs.sampled_hidden))
        return self.model.logits(hidden), prompt_logprobs

    def sample(self, inputs: Inputs, logits: torch.Tensor, grammars: Mapping[int, Grammar]) -> Drawn:
        """One token for each entry that samples; logits [s, V] may be overwritten. `grammars`: by entry."""
        if not len(inputs.samples):  # prefill chunks only, none of them a prompt's last
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return Drawn(nothing, nothing > 0, inputs.samples, None)
        return self.sampler.sample(
            logits,
            inputs.rows,
            inputs.positions,
            inputs.device_rows,
            inputs.device_positions,
            {i: grammars[entry] for i, entry in enumerate(inputs.samples.tolist()) if entry in grammars}
            if grammars
            else None,
        )

    def _finish(
        self,
        plan: StepPlan,
        inputs: Inputs,
        drawn: Drawn,
        prompt_logprobs: dict[int, PromptLogprobs],
        started: float,
        begin: Any,
    ) -> Launched:
        counts = self.sampler.logprob_counts(inputs.rows[drawn.logprob_rows]) if drawn.logprobs is not None else []
        device_ms, events, load = None, None, self._take_expert_load()
        outcome: Any
        if begin is None:
            ids, bad = drawn.ids.numpy(), drawn.bad.numpy()
            outcome = np.where(bad, -1 - ids, ids) if bad.any() else ids
            device_ms = (time.perf_counter() - started) * 1e3
        else:
            outcome = to_host(torch.where(drawn.bad, -1 - drawn.ids, drawn.ids))
            if drawn.logprobs is not None:
                drawn.logprobs = drawn.logprobs.fetched()
            prompt_logprobs = {
                entry: (found.fetched(), tokens, top) for entry, (found, tokens, top) in prompt_logprobs.items()
            }
            events = (begin, self._mark())
        drafted, spent = range(plan.num_decodes, plan.num_decoding), self.group.take()
        return Launched(
            len(plan.rows), inputs.samples, drawn, counts, prompt_logprobs, device_ms, events, outcome, drafted,
            spent, load,
        )  # fmt: skip

    def _take_expert_load(self) -> tuple[list[int], torch.Tensor] | None:
        """What the experts of a mixture were sent, on its way to the host; at most every EXPERT_LOAD_SECONDS, because
        people look at it."""
        now = time.perf_counter()
        if now < self._expert_load_due:
            return None
        self._expert_load_due = now + EXPERT_LOAD_SECONDS
        layers, load = self.model.take_expert_load()
        return layers, load if self.synchronous else to_host(load)

    def _mark(self) -> Any:
        """A point in the compute stream whose time can be read later; None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _prompt_logprobs(self, plan: StepPlan, inputs: Inputs, hidden: torch.Tensor) -> dict[int, PromptLogprobs]:
        """For each chunk that wants them: the logprobs of the prompt tokens at start + 1 … start + q_len.

        Position 0 has none. A prompt's last token predicts the first of the reply, which is not the prompt's.
        """
        found = {}
        for entry, at in inputs.prompt_hidden.items():
            tokens, top = plan.prompt_targets[entry]
            parts = []
            for first in range(0, len(tokens), LOGPROB_ROWS):
                part = np.array(tokens[first : first + LOGPROB_ROWS], dtype=np.int64)
                logits = self.model.logits(hidden[at + first : at + first + len(part)])
                logits = logits if logits.dtype == torch.float64 else logits.float()
                parts.append(pick_logprobs(logits.log_softmax(-1), self._upload(part), top))
            if parts:
                found[entry] = (Logprobs.joined(parts), tokens, top)
        return found

    def _load(self, model_dir: Path | None, on_progress: Progress | None) -> Decoder:
        quantised = KINDS[self.config.quantization]
        model = Decoder(self.shard, self.dtype, self.device, self.max_model_len, self.ops, quantised, self.group)
        slots = self._slots(model)
        if self.config.dummy_weights:
            dummy_weights(slots, self.config.seed)
        elif model_dir is None:
            raise EngineError("no model directory was given, and dummy_weights is off: give one of the two")
        else:
            load_weights(slots, model_dir, self.model_config.tie_word_embeddings, on_progress)
        return model

    def close(self) -> None:
        """End what this runner has started: no processes, where there is one rank."""

    # What engine/worker/rank_runner.py does differently: a rank has a device of its own, and a shard of the model.

    def _own_device(self, device: torch.device) -> torch.device:
        return device

    def _shard(self, config: ModelConfig) -> ModelConfig:
        return config

    def _slots(self, model: Decoder) -> Iterable[Slot]:
        return model.slots()

    def _upload_together(self, *parts: np.ndarray) -> tuple[torch.Tensor, ...]:
        """All parts as int64 tensors, in one copy."""
        return self._upload(np.concatenate(parts, dtype=np.int64)).split([len(part) for part in parts])

    def _make_pool(self, num_blocks: int) -> KVPool:
        return KVPool(self.shard, num_blocks, self.block_size, self.kv_dtype, self.device, self._kv_scales)

    def _count_blocks(self) -> int:
        """Blocks for requests: as configured, else as many as memory allows."""
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        if self.config.kv_tokens is not None:
            return -(-self.config.kv_tokens // self.block_size)
        per_block = self.block_size * self.shard.kv_bytes_per_token(self.kv_dtype)
        if self.device.type == "cpu":
            enough = CPU_KV_SEQUENCES * -(-self.max_model_len // self.block_size)
            return max(1, min(enough, CPU_KV_BYTES // per_block))
        return self._measure_blocks(per_block)

    def _measure_blocks(self, per_block: int) -> int:
        """What `gpu_memory_utilization` leaves after weights, other processes and the largest step's activations."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        logits = self._warm_up(self.max_num_batched_tokens)
        logits.float().sort(descending=True).values.softmax(-1).cumsum(-1)  # for top-p: the most of any way to sample
        del logits
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        elsewhere = total - free - torch.cuda.memory_reserved(self.device)
        room = int(total * self.config.gpu_memory_utilization) - peak - elsewhere
        torch.cuda.empty_cache()
        if room < per_block:
            share = self.config.gpu_memory_utilization
            raise EngineError(
                f"no room for a KV cache: gpu_memory_utilization {share:g} allows {total * share / 1e9:.1f} of "
                f"{total / 1e9:.1f} GB, weights and activations take {peak / 1e9:.1f} and others "
                f"{elsewhere / 1e9:.1f}: raise it, lower max_num_batched_tokens, or free the GPU"
            )
        return room // per_block

    def _warm_up(self, tokens: int) -> torch.Tensor:
        """A step of so many prompt tokens, in a null block of its own: the logits of as many as can be drawn."""
        pool, n = self._make_pool(1), min(self.max_rows, tokens)
        lengths = np.full(n, tokens // n)
        lengths[0] += tokens - int(lengths.sum())
        lengths = np.minimum(lengths, self.max_model_len)
        ends = np.cumsum(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        longest = int(lengths.max())
        drawn = ends - 1
        if self.config.speculation != "off":  # every token of a draft
            drawn = np.arange(len(positions))[: self.max_rows * (1 + self.config.speculative_tokens)]
        meta = ForwardMeta(
            positions=self._upload(positions),
            slot_mapping=self._upload(np.zeros(len(positions), dtype=np.int64)),
            cu_seqlens_q=self._upload(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=self._upload(lengths.astype(np.int32)),
            block_table=self.block_table[:n, : -(-longest // self.block_size)],
            max_q_len=longest,
            max_seq_len=longest,
            num_decodes=0,
            logit_rows=self._upload(drawn),
            fresh=True,
        )
        token_ids = torch.zeros(len(positions), dtype=torch.int64, device=self.device)
        self.attention.plan(meta)
        return self.model.logits(self.model.forward(token_ids, meta, self.attention, pool))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
