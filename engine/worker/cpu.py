"""The runner of a CPU: decode steps of few sequences go a way of their own, for there the calls cost what counts.

Everything else is engine/worker/runner.py's. Which way a step goes depends on the plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from engine.attention.torch_backend import TorchAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.progress import Progress
from engine.worker.cpu_decode import CPUDecode
from engine.worker.inputs import Inputs
from engine.worker.launch import Launched
from engine.worker.runner import Runner

MOST_SEQUENCES = 48  # beyond, there is enough arithmetic in a call for the plain way to be as fast


class CPURunner(Runner):
    """Runner for float32 (the KV cache, too) and dense MLPs. The same tokens, sooner."""

    attention: TorchAttention

    def _prepare(self, on_progress: Progress | None) -> None:
        able = CPUDecode.supports(self.model, self.dtype, self.kv_dtype)
        self._decode = CPUDecode(self.model, self.pool) if able else None

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Launched:
        """Run a step; it is over when this returns."""
        if self._decode is None or plan.num_decoding < len(plan.rows) or plan.num_tokens > MOST_SEQUENCES:
            return super().launch(plan, grammars)
        started = time.perf_counter()
        with torch.inference_mode():
            self.apply(plan)
            logits, inputs = self.decode(plan)
            drawn = self.sample(inputs, logits, grammars)
            self.last_token.index_copy_(0, inputs.device_rows, drawn.ids)
            return self._finish(plan, inputs, drawn, {}, started, None)

    def decode(self, plan: StepPlan) -> tuple[torch.Tensor, Inputs]:
        """Logits [T, V] of a plan of decodes, and what the sampler has to know of it. A token with drafts behind it and
        those drafts are columns like the others; only attention has to know that they are one sequence."""
        assert self._decode is not None
        size, tokens, samples, rows, positions = self.block_size, plan.token_ids, self._indices, plan.rows, plan.starts
        lengths = plan.starts + plan.q_lens
        table = self._host_table[rows, : -(-int(lengths.max()) // size)]
        if plan.num_drafted:
            bounds = np.concatenate((samples[:1], np.cumsum(plan.q_lens)))
            self.attention.plan_arrays(table, lengths, bounds, plan.num_decodes)
            samples = np.repeat(samples[: len(rows)], plan.q_lens)
            rows, positions = rows[samples], (lengths - bounds[1:])[samples] + np.arange(len(tokens))
            lengths = positions + 1
        else:
            self.attention.plan_decodes(table, lengths)
        blocks, offsets = np.divmod(positions, size)
        slots = self._host_table[rows, blocks] * np.int64(size) + offsets
        if (tokens < 0).any():
            tokens = np.where(tokens < 0, self.last_token.numpy()[rows], tokens)
        logits = self._decode.logits(tokens, positions, slots, self.attention)
        return logits, Inputs(
            token_ids=torch.from_numpy(tokens),
            meta=None,
            samples=samples[: len(tokens)],
            rows=rows,
            positions=lengths,
            device_rows=torch.from_numpy(rows.astype(np.int64)),
            device_positions=torch.from_numpy(lengths.astype(np.int64)),
            sampled_hidden=None,
            prompt_hidden={},
        )
