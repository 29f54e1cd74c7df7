"""The executor that can run any step, kernel by kernel. Every runner tries it last."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.progress import Progress
from engine.worker.cpu.compiled_decoder import CompiledDecoder
from engine.worker.inputs import Draws, Inputs, drawing_tokens, logit_rows
from engine.worker.launch import LaunchedStep, PromptLogprobs
from engine.worker.loaded import LoadedModel
from engine.worker.logprobs import Logprobs, pick_logprobs
from engine.worker.runner import Executor

LOGPROB_ROWS = 256  # for prompt logprobs: number of positions whose logits are in memory at the same time


def padded(indices: np.ndarray, most: int) -> np.ndarray:
    """Returns `indices` [n] with the last one repeated until their number is a power of two, or `most`."""
    n = len(indices)
    return np.pad(indices, (0, max(0, min(most, 1 << (n - 1).bit_length()) - n)), "edge") if n else indices


class Eager(Executor):
    """Runs any step: inputs, forward pass, sampling."""

    def __init__(
        self, loaded: LoadedModel, on_progress: Progress | None = None, model: CompiledDecoder | None = None
    ) -> None:
        """`model`: computes what the decoder computes, faster; None: the decoder."""
        self._loaded, self._model = loaded, model or loaded.model
        self._batch = loaded.batch
        # On a GPU, the number of rows after the last attention is padded to one of few numbers. For the first product
        # of a number of rows, CUDA loads a kernel, and waits until the device has no work. At the end of a step with
        # prompts, that takes as long as the step, and only then the host hands out the results of the step before.
        self.pads = loaded.device.type == "cuda"

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep:
        """Enqueue a step. On a CPU the step is complete when this method returns."""
        loaded = self._loaded
        started, begin = time.perf_counter(), loaded.mark()
        self._batch.apply(plan)
        inputs = self.build_inputs(plan)
        logits, prompt_logprobs = self.forward(plan, inputs)
        drawn = loaded.sample(inputs.draws, logits, grammars)
        return loaded.launched(plan, inputs.draws, drawn, prompt_logprobs, started, begin)

    def build_inputs(self, plan: StepPlan) -> Inputs:
        """Returns the inputs of a step. The values of all tokens and draws are uploaded in one copy."""
        batch, n, tokens, rows = self._batch, len(plan.rows), plan.num_tokens, plan.rows
        ends, seq_lens, token_rows, positions, slots = batch.layout(plan)
        bounds = np.concatenate((batch.indices[:1], ends)).astype(np.int32) if tokens > n else None
        bounds_ = batch.bounds[: n + 1] if bounds is None else batch.upload(bounds)
        entries, drawing = batch.indices[:n], ends - 1
        if plan.num_drafted:
            entries, drawing = drawing_tokens(plan, ends)
        elif not plan.samples.all():
            entries = np.flatnonzero(plan.samples)
            drawing = drawing[entries]
        draw_rows, draw_positions = rows[entries], positions[drawing] + 1
        wanted, sampled_hidden, prompt_hidden = logit_rows(plan, ends, drawing)
        every, live_rows = len(wanted) == tokens, None
        if self.pads and 0 < len(wanted) < tokens:
            live_rows = batch.upload(np.array([len(wanted)], np.int32))
            wanted = padded(wanted, batch.max_rows)
            sampled_hidden = None if sampled_hidden is None else padded(sampled_hidden, batch.max_rows)
        token_ids, positions_, slots_, draw_rows_, draw_positions_, wanted_ = batch.upload_together(
            plan.token_ids, positions, slots[0], draw_rows, draw_positions, wanted[:0] if every else wanted
        )
        if (plan.token_ids < 0).any():
            drawn_last = batch.last_token.index_select(0, batch.upload(token_rows.astype(np.int64)))
            token_ids = torch.where(token_ids < 0, drawn_last, token_ids)
        longest = int(seq_lens.max())
        columns = -(-longest // batch.block_size)
        meta = ForwardMeta(
            positions=positions_, slot_mapping=slots_, cu_seqlens_q=bounds_, seq_lens=batch.upload(seq_lens),
            block_table=batch.upload(batch.host_table[rows, :columns]),
            max_q_len=1 if tokens == n else int(plan.q_lens.max()), max_seq_len=longest, num_decodes=plan.num_decodes,
            logit_rows=None if every else wanted_, live_rows=live_rows, fresh=not plan.starts[plan.num_decodes :].any(),
            groups=batch.window_groups(plan, slots, columns), states=batch.states(plan),
        )
        draws = Draws(entries, draw_rows, draw_positions, draw_rows_, draw_positions_)
        return Inputs(token_ids, meta, draws, sampled_hidden, prompt_hidden)

    def forward(self, plan: StepPlan, inputs: Inputs) -> tuple[torch.Tensor, dict[int, PromptLogprobs]]:
        """Returns the logits [s, V] of the draws, and the prompt logprobs that requests asked for. Also writes the keys
        and values of this step's tokens to the KV cache."""
        loaded = self._loaded
        if self._model is loaded.model:
            loaded.attention.plan(inputs.meta)
        hidden = self._model.forward(inputs.token_ids, inputs.meta, loaded.attention, loaded.pool)
        prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden)
        if inputs.sampled_hidden is not None:
            hidden = hidden.index_select(0, self._batch.upload(inputs.sampled_hidden))
        return self._model.logits(hidden)[: len(inputs.draws.entries)], prompt_logprobs

    def _prompt_logprobs(self, plan: StepPlan, inputs: Inputs, hidden: torch.Tensor) -> dict[int, PromptLogprobs]:
        """Returns {entry: logprobs of the prompt tokens that the entry's chunk predicts}. Position 0 has no logprob. A
        prompt's last token predicts the reply's first token, so it scores no prompt token."""
        found = {}
        for entry, at in inputs.prompt_hidden.items():
            tokens, top = plan.prompt_targets[entry]
            parts = []
            for first in range(0, len(tokens), LOGPROB_ROWS):
                part = np.array(tokens[first : first + LOGPROB_ROWS], dtype=np.int64)
                logits = self._model.logits(hidden[at + first : at + first + len(part)])
                logits = logits if logits.dtype == torch.float64 else logits.float()
                parts.append(pick_logprobs(logits.log_softmax(-1), self._batch.upload(part), top))
            if parts:
                found[entry] = PromptLogprobs(Logprobs.joined(parts), tokens, top)
        return found
