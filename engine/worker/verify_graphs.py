"""Steps with drafts (engine/core/speculation.py) as CUDA graphs: a few tokens of each row, and a draw at every one of
them.

Such a step is a decode step but for attention, where the tokens of a row are a chunk behind what it has cached. Its
graphs are bucketed by tokens, and read

    per token      id, position, slot, row, and where the token drawn there will stand (0: nothing is drawn)
    per sequence   line of the block table, where its tokens end, its keys

What is left of a bucket is the last sequence, whose keys go to the null block. The sampling graphs do not know drafts:
to them every token is an entry. Prompt chunks may ride along while tokens and sequences fit; steps that do not fit any
bucket go kernel by kernel, as without graphs.

Measured on an H200, Qwen3-0.6B, drafts of 8 behind contexts of 300 / 2,000 tokens: one row 1.23 / 1.55 ms (a decode
step 0.74 / 0.77), eight rows 1.75 / 2.5 ms (0.93 / 1.57), 28 rows 1.94 / 3.4 ms (1.24 / 2.58); kernel by kernel all of
them take 6.3 to 6.8 ms.

A graph for 16 tokens multiplies with other kernels than one for a single token, and in half precision that rounds
otherwise, as it does between decode steps of different batch sizes. Tokens are therefore those of the same model
without speculation wherever its best two are further apart than rounding reaches, not bit for bit; in float32, where
nothing is captured, and wherever logits are bit-equal, they are the same (tests/engine/gpu/test_speculation.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.core.request import Grammar
from engine.core.step import StepPlan, StepResult
from engine.progress import Progress
from engine.worker.cuda_graphs import DRAWABLE, Drawing, GraphRunner, Staging, Work, ladder
from engine.worker.inputs import Inputs, drawing_tokens
from engine.worker.launch import Launched, enter_draws, listed_load

SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)  # tokens; from 16 on as in `ladder`, whose sampling graphs serve
PROGRAMS = 256  # that keep a GPU reading keys
MOST_SPLITS = 8


@dataclass(slots=True)
class Verified:
    """A step with drafts on its way: draws of all tokens, of which some count."""

    entries: int  # n of the plan
    drawing: Drawing
    tokens: np.ndarray  # int64 [s]: those whose draws count
    samples: np.ndarray  # int64 [s]: their entries
    drafted: range  # the entries with drafts

    def wait(self) -> StepResult:
        """The step's outcome, on the host."""
        drawing = self.drawing
        drawing.end.synchronize()
        result = StepResult([-1] * self.entries, device_ms=drawing.begin.elapsed_time(drawing.end))
        enter_draws(result, self.samples.tolist(), drawing.outcome[self.tokens].tolist(), self.drafted)
        if drawing.expert_load is not None:
            result.expert_load = listed_load(*drawing.expert_load)
        return result


class SpeculativeGraphRunner(GraphRunner):
    """GraphRunner that has graphs for steps with drafts, too."""

    def _prepare(self, on_progress: Progress | None) -> None:
        self._verify: dict[int, torch.cuda.CUDAGraph] = {}
        super()._prepare(on_progress)

    def launch(  # type: ignore[override]
        self, plan: StepPlan, grammars: Mapping[int, Grammar]
    ) -> Launched | Drawing | Verified:
        """Enqueue a step: by a graph if one is large enough, else kernel by kernel."""
        bucket = self._bucket(plan) if plan.num_drafted and self._verify else None
        with torch.inference_mode():
            return super().launch(plan, grammars) if bucket is None else self._launch_verify(plan, grammars, bucket)

    def _bucket(self, plan: StepPlan) -> int | None:
        n, tokens = len(plan.rows), plan.num_tokens
        if plan.prompt_targets:
            return None
        return next((t for t in self._verify_sizes() if tokens <= t and n < _sequences(t)), None)

    def _launch_verify(self, plan: StepPlan, grammars: Mapping[int, Grammar], bucket: int) -> Launched | Verified:
        started = time.perf_counter()
        n, tokens, limit = len(plan.rows), plan.num_tokens, _sequences(bucket)
        begin = self._mark()
        self.apply(plan)
        ends, seq_lens, token_rows, positions, slots = self.layout(plan)
        samples, drawing = drawing_tokens(plan, ends)
        sent = self._verify_input.array()
        by_token = sent[: 5 * bucket].reshape(5, bucket)
        by_token[:, tokens:] = 0
        by_token[0, :tokens] = plan.token_ids
        by_token[1, :tokens] = positions
        by_token[2, :tokens] = slots
        by_token[3, :tokens] = token_rows
        by_token[4, :tokens] = 0
        by_token[4, drawing] = positions[drawing] + 1
        by_sequence = sent[5 * bucket : 5 * bucket + 3 * limit].reshape(3, limit)
        by_sequence[:, n:] = 0
        by_sequence[0, :n] = plan.rows
        by_sequence[1, :n], by_sequence[1, n:] = ends, tokens
        by_sequence[2, :n] = seq_lens
        self._verify_input.send(5 * bucket + 3 * limit)
        self._verify[bucket].replay()
        asked = self.sampler.asked(plan.rows)
        if asked & ~DRAWABLE:
            return self._sample_drafts_eagerly(plan, grammars, samples, drawing, positions[drawing] + 1, started, begin)
        drawn = self._draw(bucket, asked, tokens, None, begin)
        return Verified(n, drawn, drawing, samples, range(plan.num_decodes, plan.num_decoding))

    def _sample_drafts_eagerly(
        self, plan: StepPlan, grammars: Mapping[int, Grammar], samples: np.ndarray, drawing: np.ndarray,
        positions: np.ndarray, started: float, begin: torch.cuda.Event,
    ) -> Launched:  # fmt: skip
        """Rows with penalties, masks or logprobs: the graph's logits, then the sampler of engine/worker/sampler.py."""
        rows = plan.rows[samples]
        tokens_, rows_, positions_ = self._upload_together(drawing, rows, positions)
        inputs = Inputs(
            token_ids=tokens_, meta=None, samples=samples, rows=rows, positions=positions, device_rows=rows_,
            device_positions=positions_, sampled_hidden=None, prompt_hidden={},
        )  # fmt: skip
        drawn = self.sample(inputs, self._logits.index_select(0, tokens_).float(), grammars)
        self.last_token.index_copy_(0, rows_, drawn.ids)
        return self._finish(plan, inputs, drawn, {}, started, begin)

    # ---- capture

    def _most_draws(self) -> int:
        return max(super()._most_draws(), self._verify_sizes()[-1])

    def _verify_sizes(self) -> tuple[int, ...]:
        """Enough for every row with a whole draft, or all there are."""
        enough = self.max_rows * (1 + self.config.speculative_tokens)
        largest = next((t for t in SIZES if t >= enough), SIZES[-1])
        return tuple(t for t in SIZES if t <= largest)

    def _make_buffers(self) -> None:
        super()._make_buffers()
        largest = self._verify_sizes()[-1]
        self._verify_input = Staging(5 * largest + 3 * _sequences(largest), torch.int64, self.device)

    def _work(self) -> list[Work]:
        sizes = self._verify_sizes()
        work: list[Work] = [(f"verify {t}", self._verify, t, partial(self._run_verify, t)) for t in reversed(sizes)]
        return work + super()._work() + self._sampling_work(set(sizes) - set(ladder(self.max_rows)))

    def _run_verify(self, tokens: int) -> None:
        sent, n = self._verify_input.target, _sequences(tokens)
        ids, positions, slots, token_rows, draws = sent[: 5 * tokens].view(5, tokens)
        rows, ends, seq_lens = sent[5 * tokens : 5 * tokens + 3 * n].view(3, n)
        self._rows[:tokens].copy_(token_rows)
        self._lengths[:tokens].copy_(draws)
        bounds = torch.full((n + 1,), tokens, dtype=torch.int32, device=self.device)
        bounds[:1] = 0
        bounds[1:n].copy_(ends[:-1])  # the last sequence takes what is left
        meta = ForwardMeta(
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=bounds,
            seq_lens=torch.maximum(seq_lens.to(torch.int32), bounds.diff()),
            block_table=self.block_table.index_select(0, rows),
            max_q_len=tokens,
            max_seq_len=self.max_model_len,
            num_decodes=0,
            logit_rows=None,
            live=bounds[n - 1 : n],
        )
        # One tile of queries for each row with a whole draft: as many programs have keys to read.
        tiles = -(-tokens // (1 + self.config.speculative_tokens)) * self.shard.num_kv_heads
        splits = min(MOST_SPLITS, 1 << max(0, (PROGRAMS // tiles).bit_length() - 1))
        self.attention.plan(meta, splits=splits)
        self._layers.logits_of_chunks(ids, meta, self._logits[:tokens])


def _sequences(tokens: int) -> int:
    """What a graph for so many tokens has room for, the padding included."""
    return tokens // 2 + 1
