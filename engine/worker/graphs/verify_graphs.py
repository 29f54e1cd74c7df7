"""CUDA graphs of steps with drafts (engine/core/speculation.py), in which a row has several tokens and draws.

Such a step runs like a decode step, except in attention: there, the tokens of a row are a chunk that follows the row's
cached tokens. There is one graph per bucket; a bucket is a number of tokens. The graphs read

    per token      id, position, row, the position of the token that is drawn after it (0: none is drawn), and its slot
                   in the cache of each group with pages
    per sequence   row of the block table, end of its tokens in the batch, number of its keys
    for states     the segments of recurrent states, one for each token, and where those of each sequence begin

The padding of a bucket is one more sequence; its keys are written to the null block. The sampling graphs draw after
every token independently, whether the token is a draft or not. A step may also contain prompt chunks, if all its tokens
and sequences fit into a bucket. A step that fits into no bucket runs without a graph.

On an H200, with Qwen3-0.6B, drafts of 8 tokens and contexts of 300, a step with one row takes 1.23 ms (a decode step:
0.74 ms), with eight rows 1.75 ms (0.93 ms), with 28 rows 1.94 ms (1.24 ms). Without a graph, each of these steps
takes 6.3 ms or more.

A graph for 16 tokens uses other matrix kernels than a graph for one token. In half precision these kernels round
differently. So speculation may change a token if the two best scores at its position differ by less than the rounding
error. Decode steps of different batch sizes have the same effect. With float32 no graph is captured, and speculation
changes no token (tests/engine/gpu/test_speculation.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from engine.attention.base import ForwardMeta, PagedGroup, StateMeta
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.worker.graphs.fused_decode import DecodeLayers
from engine.worker.graphs.sampling_graphs import SamplingGraphs
from engine.worker.graphs.step_graphs import Shapes, StepGraphs, divided, length
from engine.worker.inputs import drawing_tokens
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.upload import Staging

SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)  # tokens; also sizes of `ladder`, whose sampling graphs are used here
PROGRAMS = 256  # number of attention programs that keep a GPU busy
MOST_SPLITS = 8


class VerifyGraphs(StepGraphs):
    """Steps in which some sequences have drafts."""

    form = "verify"

    def __init__(self, loaded: LoadedModel, layers: DecodeLayers, sampling: SamplingGraphs) -> None:
        super().__init__(loaded, layers, sampling, verify_sizes(loaded))
        self._input = Staging(length(self._shapes(self.sizes[-1])), torch.int64, loaded.device)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        n, tokens = len(plan.rows), plan.num_tokens
        if not plan.num_drafted or plan.prompt_targets or (self._has_states and plan.num_decoding < n):
            return None
        bucket = next((t for t in self.sizes if tokens <= t and n < _sequences(t)), None)
        if bucket is None or not self._captured(bucket):
            return None
        started, begin = time.perf_counter(), self._loaded.mark()
        self._batch.apply(plan)
        ends, seq_lens, token_rows, positions, slots = self._batch.layout(plan)
        entries, drawing = drawing_tokens(plan, ends)
        sent, shapes = self._input.array(), self._shapes(bucket)
        by_token, by_sequence, *of_states = divided(sent, shapes)
        by_token[:, tokens:] = 0
        by_token[:3, :tokens] = plan.token_ids, positions, token_rows
        by_token[3, :tokens] = 0
        by_token[3, drawing] = positions[drawing] + 1
        by_token[4:, :tokens] = slots
        by_sequence[:, n:] = 0
        by_sequence[0, :n] = plan.rows
        by_sequence[1, :n], by_sequence[1, n:] = ends, tokens
        by_sequence[2, :n] = seq_lens
        if self._has_states:
            assert plan.segments is not None and plan.cu_segments is not None, "the plan has the states' segments"
            segments, cu_segments = of_states
            segments[:tokens], segments[tokens:, :2], segments[tokens:, 2:] = plan.segments, tokens, 0
            cu_segments[: n + 1], cu_segments[n:] = plan.cu_segments, tokens
        self._input.send(length(shapes))
        self._replay(bucket, bucket)
        return self._draw(plan, grammars, bucket, positions + 1, drawing, entries, started, begin)

    def size_of(self, size: int) -> tuple[int, int, int]:
        return max(1, size // (1 + self._loaded.config.speculative_tokens)), size, size

    def _shapes(self, tokens: int) -> Shapes:
        n = _sequences(tokens)
        shapes: Shapes = [(4 + len(self._batch.tables), tokens), (3, n)]
        return shapes + ([(tokens, 4), (n + 1,)] if self._has_states else [])

    def _run(self, tokens: int) -> None:
        n = _sequences(tokens)
        by_token, (rows, ends, seq_lens), *of_states = divided(self._input.target, self._shapes(tokens))
        ids, positions, token_rows, draws, *slots = by_token
        self._sampling.rows[:tokens].copy_(token_rows)
        self._sampling.lengths[:tokens].copy_(draws)
        bounds = torch.full((n + 1,), tokens, dtype=torch.int32, device=self._loaded.device)
        bounds[:1] = 0
        bounds[1:n].copy_(ends[:-1])  # the last sequence is the padding
        tables = [table.index_select(0, rows) for table in self._batch.tables]
        states = StateMeta(of_states[0].to(torch.int32), of_states[1].to(torch.int32), None, 0) if of_states else None
        meta = ForwardMeta(
            positions=positions, slot_mapping=slots[0], cu_seqlens_q=bounds,
            seq_lens=torch.maximum(seq_lens.to(torch.int32), bounds.diff()), block_table=tables[0], max_q_len=tokens,
            max_seq_len=self._loaded.max_model_len, num_decodes=0, logit_rows=None, live=bounds[n - 1 : n],
            groups=tuple(map(PagedGroup, slots[1:], tables[1:])), states=states,
        )
        # The number of programs that have keys to read: one for each KV head of each row, if all drafts are full.
        rows_with_drafts = -(-tokens // (1 + self._loaded.config.speculative_tokens))
        for attention, own in zip(self._layers.attention, meta.by_group(), strict=True):
            tiles = rows_with_drafts * attention.kv_heads
            splits = min(MOST_SPLITS, 1 << max(0, (PROGRAMS // tiles).bit_length() - 1))
            attention.plan(own, splits=splits)
        self._layers.logits_of_chunks(ids, meta, self._sampling.logits[:tokens])


def verify_sizes(loaded: LoadedModel) -> tuple[int, ...]:
    """Returns the sizes to capture: up to the first size that holds a full draft for every row."""
    enough = loaded.batch.max_rows * (1 + loaded.config.speculative_tokens)
    largest = next((t for t in SIZES if t >= enough), SIZES[-1])
    return tuple(t for t in SIZES if t <= largest)


def _sequences(tokens: int) -> int:
    """Returns the number of sequences that a graph for `tokens` tokens can hold, including the padding."""
    return tokens // 2 + 1
