"""The executor for steps on a CPU. compiled_decoder.py computes all of them; cpu_decode.py only decodes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from engine.attention.grouped import backends_of
from engine.attention.torch_backend import TorchAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.progress import Progress
from engine.worker.cpu.compiled_decoder import CompiledDecoder
from engine.worker.cpu.cpu_decode import CPUDecode
from engine.worker.eager import Eager
from engine.worker.inputs import Draws
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel

MOST_TOKENS = 48  # in larger steps arithmetic dominates call overhead


class CPUSteps:
    """Runs steps of float32 models with dense MLPs. Draws the same tokens as Eager, but faster.

    The kernels of CompiledDecoder are faster than CPUDecode, but they need llvmlite and a processor that they support.
    """

    def __init__(self, loaded: LoadedModel, on_progress: Progress | None = None) -> None:
        self._loaded, self._batch = loaded, loaded.batch
        model, kind, size = loaded.model, loaded.quantization, loaded.block_size
        self._compiled: CompiledDecoder | None = None
        self._prompts: Eager | None = None
        self._decode: CPUDecode | None = None
        if loaded.dtype == loaded.kv_dtype == torch.float32:
            if not CompiledDecoder.why_not(model.config, kind, size):
                self._compiled = CompiledDecoder(model, loaded.pool, kind, size, loaded.max_model_len)
                self._prompts = Eager(loaded, model=self._compiled)
            elif CPUDecode.supports(model):
                self._decode = CPUDecode(model, loaded.pool)
        self._attention = loaded.attention

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Run a step. Returns None for models without support, and for steps in which Eager is as fast."""
        if self._decode is None and self._compiled is None:
            return None
        if plan.num_decoding < len(plan.rows) or plan.num_tokens > MOST_TOKENS:
            if self._compiled is None or self._prompts is None or plan.num_tokens > self._compiled.most_rows:
                return None
            return self._prompts.launch(plan, grammars)
        started = time.perf_counter()
        self._batch.apply(plan)
        logits, draws = self.decode(plan)
        drawn = self._loaded.sample(draws, logits, grammars)
        return self._loaded.launched(plan, draws, drawn, {}, started, None)

    def decode(self, plan: StepPlan) -> tuple[torch.Tensor, Draws]:
        """Returns the logits [T, V] and the draws of a plan that only decodes.

        Each draft token is computed as if it were another sequence. Only the attention of CPUDecode treats a token and
        its drafts as one sequence.
        """
        batch = self._batch
        size, tokens, rows, positions = batch.block_size, plan.token_ids, plan.rows, plan.starts
        entries, bounds = batch.indices[: len(rows)], batch.indices
        lengths = plan.starts + plan.q_lens
        columns = -(-int(lengths.max()) // size)
        tables = [table[rows, :columns] for table in batch.host_tables]
        if plan.num_drafted:
            bounds = np.concatenate((bounds[:1], np.cumsum(plan.q_lens)))
            entries = np.repeat(entries, plan.q_lens)
        if self._decode is not None:
            for attention, table in zip(backends_of(self._attention), tables, strict=True):
                assert isinstance(attention, TorchAttention), "a CPU has no other attention backend"
                attention.plan_arrays(table, lengths, bounds, plan.num_decodes)
        if plan.num_drafted:
            rows, positions = rows[entries], (lengths - bounds[1:])[entries] + np.arange(len(tokens))
            tables, lengths = [table[entries] for table in tables], positions + 1
        slots = batch.slots(rows, positions)
        if (tokens < 0).any():
            tokens = np.where(tokens < 0, batch.last_token.numpy()[rows], tokens)
        if self._compiled is not None:
            logits = self._compiled.step(tokens, positions, slots, tables)
        else:
            assert self._decode is not None
            logits = self._decode.logits(tokens, positions, slots, self._attention)
        device_rows, device_positions = (torch.from_numpy(part.astype(np.int64)) for part in (rows, lengths))
        return logits, Draws(entries, rows, lengths, device_rows, device_positions)

    def close(self) -> None:
        """Do nothing: this executor keeps no device memory."""
