"""Sampling as CUDA graphs. Each number of draws has three forms: greedy, with noise, with noise and truncation.

Every captured step writes its logits, and the rows and positions of its draws, to the buffers of SamplingGraphs. A
sampling graph then draws from these logits.

If several ranks share the model, each rank draws from its own piece of the vocabulary, and the ranks choose the best of
these draws. Truncation needs the whole vocabulary: the logits are then gathered, and all ranks draw the same token. In
both cases every rank has the drawn tokens afterwards, so rank 0 does not broadcast them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from engine.core.step import StepPlan
from engine.kernels.row_settings import NUM_SETTINGS
from engine.kernels.sample import SampleWorkspace, draw
from engine.worker.graphs.capture import Captures
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.sampler import Wants
from engine.worker.upload import STAGING_RING, Staging

DRAWABLE = Wants.NOISE | Wants.TOP_K | Wants.TOP_P | Wants.MIN_P  # the settings that the sampling kernels support
FORMS = 3


class SamplingGraphs:
    """The buffers between a captured step and its draws, and the graphs that draw."""

    def __init__(self, loaded: LoadedModel, most_draws: int) -> None:
        """`most_draws`: the largest number of draws in a captured step."""
        self._loaded = loaded
        self._batch = batch = loaded.batch
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        rows, device = batch.max_rows, loaded.device
        # The step writes these buffers, and the sampling graph reads them. Their first dimension is the draw.
        self.rows = torch.zeros(most_draws, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(most_draws, dtype=torch.int32, device=device)  # 0: draws nothing
        self.logits = torch.zeros(most_draws, loaded.shard.vocab_size, dtype=loaded.dtype, device=device)
        self._settings_input = Staging(rows * (NUM_SETTINGS + 3), torch.int32, device)
        self._settings_version = -1  # Sampler.version of the settings in the graphs' buffer
        cells = rows * NUM_SETTINGS
        at = self._settings_input.target
        self._settings = at[:cells].view(torch.float32).view(rows, NUM_SETTINGS)
        self._keys, self._top_k = at[cells : cells + 2 * rows].view(rows, 2), at[cells + 2 * rows :]
        self._outcome = torch.zeros(most_draws, dtype=torch.int64, device=device)
        self._outcome_host = [torch.zeros(most_draws, dtype=torch.int64, pin_memory=True) for _ in range(STAGING_RING)]
        self._outcome_arrays = [buffer.numpy() for buffer in self._outcome_host]
        self._outcome_slot = 0
        self._scores = torch.zeros(most_draws, dtype=torch.float32, device=device)
        self._workspace = SampleWorkspace(most_draws, loaded.vocab_size, device)

    def draw(
        self, plan: StepPlan, asked: int, bucket: int, num_draws: int, draws: np.ndarray | None, entries: np.ndarray,
        begin: Any,
    ) -> LaunchedStep:
        """Replay the simplest form that supports `asked` (Sampler.asked), and start the copy of the draws to the host.
        `draws` and `entries`: as in LaunchedStep, for the first `num_draws` draws in the buffers."""
        if asked:
            self._send_settings()
        form = 2 if asked & ~Wants.NOISE else 1 if asked else 0
        self._graphs[bucket, form].replay()
        loaded = self._loaded
        loaded.group.count_draw(bucket, gathered=form > 1)
        slot = self._outcome_slot
        self._outcome_slot = (slot + 1) % STAGING_RING
        self._outcome_host[slot][:num_draws].copy_(self._outcome[:num_draws], non_blocking=True)
        load = loaded.take_expert_load()
        return LaunchedStep(
            len(plan.rows), self._outcome_arrays[slot][:num_draws], draws, entries,
            range(plan.num_decodes, plan.num_decoding), events=(begin, loaded.mark()), spent=loaded.group.take_time(),
            expert_load=load,
        )

    def _send_settings(self) -> None:
        """Copy the rows' sampling settings to the graphs' buffer, if any has changed."""
        sampler = self._batch.sampler
        if sampler.version == self._settings_version:
            return
        self._settings_version = sampler.version
        sent = self._settings_input.array()
        settings, keys, top_k = sampler.host_settings()
        cells, rows = self._settings.numel(), self._batch.max_rows
        sent[:cells] = settings.reshape(-1).view(np.int32)
        sent[cells : cells + 2 * rows] = keys.reshape(-1)
        sent[cells + 2 * rows :] = top_k
        self._settings_input.send(len(sent))

    def capture(self, n: int, captures: Captures) -> None:
        """Capture all forms for n draws, unless they are captured."""
        self.rows.zero_()
        self.lengths.zero_()  # draws nothing
        for form in range(FORMS):
            if (n, form) not in self._graphs:
                self._graphs[n, form] = captures.capture(partial(self._run, n, form))

    def run(self, n: int) -> None:
        """Run all forms for n draws, which draw nothing."""
        self.lengths.zero_()
        for form in range(FORMS):
            self._run(n, form)

    def _run(self, n: int, form: int) -> None:
        group, last_token = self._loaded.group, self._batch.last_token
        rows, lengths, outcome, scores = self.rows[:n], self.lengths[:n], self._outcome[:n], self._scores[:n]
        first, end = group.piece
        by_piece = end > first and form < 2
        logits = self.logits[:n, : end - first] if by_piece else group.gather(self.logits[:n])
        draw(
            logits, rows, lengths, self._settings, self._top_k, self._keys, outcome, last_token, self._workspace,
            noisy=form > 0, truncated=form > 1, piece=(first, scores) if by_piece else None,
        )
        if by_piece:
            group.elect(scores, outcome, rows, lengths, last_token)

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
