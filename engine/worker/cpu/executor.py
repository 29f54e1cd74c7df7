"""The executor for steps on a CPU, which compiled_decoder.py computes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.progress import Progress
from engine.worker.cpu.compiled_decoder import CompiledDecoder
from engine.worker.eager import Eager
from engine.worker.inputs import Draws
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.runner import Executor

MOST_TOKENS = 48  # in larger steps arithmetic dominates call overhead


class CPUSteps(Executor):
    """Runs steps of float32 models with dense MLPs by the kernels of CompiledDecoder, which need llvmlite and a
    processor that they support. Draws the same tokens as Eager, but faster."""

    def __init__(self, loaded: LoadedModel, on_progress: Progress | None = None) -> None:
        self._loaded, self._batch = loaded, loaded.batch
        model, kind, size = loaded.model, loaded.quantization, loaded.block_size
        self.compiled: CompiledDecoder | None = None  # None: the kernels cannot run this model
        in_float32 = loaded.dtype == loaded.kv_dtype == torch.float32
        why_not = CompiledDecoder.why_not(model.config, kind, size) if in_float32 else "they compute in float32"
        if why_not:
            loaded.notes += (f"torch computes the steps, without most of our compiled kernels: {why_not}",)
        else:
            self.compiled = CompiledDecoder(model, loaded.pool, kind, size, loaded.max_model_len)
            self._prompts = Eager(loaded, model=self.compiled)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Run a step. Returns None for models without support, and for steps in which Eager is as fast."""
        if self.compiled is None:
            return None
        if plan.num_decoding < len(plan.rows) or plan.num_tokens > MOST_TOKENS:
            if plan.num_tokens > self.compiled.most_rows:
                return None
            return self._prompts.launch(plan, grammars)
        started = time.perf_counter()
        self._batch.apply(plan)
        logits, draws = self.decode(plan, self.compiled)
        drawn = self._loaded.sample(draws, logits, grammars)
        return self._loaded.launched(plan, draws, drawn, {}, started, None)

    def decode(self, plan: StepPlan, compiled: CompiledDecoder) -> tuple[torch.Tensor, Draws]:
        """Returns the logits [T, V] and the draws of a plan that only decodes. Each draft token is computed as if it
        were another sequence."""
        batch = self._batch
        size, tokens, rows, positions = batch.block_size, plan.token_ids, plan.rows, plan.starts
        entries, lengths = batch.indices[: len(rows)], plan.starts + plan.q_lens
        columns = -(-int(lengths.max()) // size)
        tables = [table[rows, :columns] for table in batch.host_tables]
        if plan.num_drafted:
            before = np.cumsum(plan.q_lens) - lengths
            entries = np.repeat(entries, plan.q_lens)
            rows, positions = rows[entries], np.arange(len(tokens)) - before[entries]
            tables, lengths = [table[entries] for table in tables], positions + 1
        slots = batch.slots(rows, positions)
        if (tokens < 0).any():
            tokens = np.where(tokens < 0, batch.last_token.numpy()[rows], tokens)
        logits = compiled.step(tokens, positions, slots, tables)
        device_rows, device_positions = (torch.from_numpy(part.astype(np.int64)) for part in (rows, lengths))
        return logits, Draws(entries, rows, lengths, device_rows, device_positions)
