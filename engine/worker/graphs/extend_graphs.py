"""CUDA graphs of steps with chunks of few prompts. Other sequences may decode one token each in the same step.

A chunk has only one token if the rest of its prompt is cached. The graphs differ in two sizes:

    tokens    of the step, padded
    decodes   0: the step has at most SEQUENCES sequences, and all are computed as chunks
              otherwise: the largest number of sequences of the step. The sequences that decode come first. The kernel
              for decodes is launched for `decodes` sequences, the kernel for chunks for SEQUENCES sequences

The tokens of a step lie end to end, padding last. So the kernel for decodes also reaches tokens of chunks and padding.
There, the length of the sequence is 0, and the kernel writes zeros. The kernel for chunks runs after it and writes the
outputs of the chunks. The inputs of a graph:

    per token      id, position, row, slot in the cache of each group with pages
    per sequence   row of the block table, index of the last token, number of its keys if a token is drawn, number of
                   its keys if it decodes
    per chunk      row of the block table, end of its tokens in the step, number of its keys
    once           number of decodes, number of sequences
    for states     the segments of recurrent states, and where those of each sequence begin (StateMeta)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import ForwardMeta, PagedGroup, StateMeta
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.kernels.prefill_attention import BLOCK_M, num_splits
from engine.worker.graphs.fused_decode import DecodeLayers
from engine.worker.graphs.sampling_graphs import SamplingGraphs
from engine.worker.graphs.step_graphs import Shapes, StepGraphs, divided, length
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.upload import Staging

SEQUENCES = 8
TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072)
DECODES = (16, 32, 64, 128, 256, 512)  # also sizes of `ladder` (cuda_graphs.py), whose sampling graphs are used here
PER_TOKEN, PER_SEQUENCE, PER_CHUNK, ONCE = 3, 4, 3, 2  # a token has a slot in each group, too
MORE_SEGMENTS = 24  # of recurrent states: so many more than sequences


class Size(NamedTuple):
    """The sizes of a graph; see above."""

    tokens: int
    decodes: int

    @property
    def draws(self) -> int:
        """The largest number of sequences."""
        return self.decodes or SEQUENCES

    @property
    def segments(self) -> int:
        """The largest number of segments of recurrent states. With as many as tokens, each would have one token."""
        return min(self.draws + MORE_SEGMENTS, self.tokens - 1)

    def __str__(self) -> str:
        return f"{self.tokens}" + (f" with {self.decodes}" if self.decodes else "")


class ExtendGraphs(StepGraphs):
    """Steps with chunks of at most SEQUENCES sequences."""

    form = "extend"

    def __init__(self, loaded: LoadedModel, layers: DecodeLayers, sampling: SamplingGraphs, most_useful: int) -> None:
        """`most_useful`: larger steps take longer to compute than to launch; all ranks give the same number."""
        limit = min(loaded.max_num_batched_tokens, loaded.max_model_len, max(64, most_useful))
        sizes = extend_sizes(limit, loaded.batch.max_rows)
        super().__init__(loaded, layers, sampling, sizes)
        most = max((length(self._shapes(size)) for size in sizes), default=0)
        self._input = Staging(most, torch.int64, loaded.device)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        n, tokens = len(plan.rows), plan.num_tokens
        if plan.num_drafted or plan.prompt_targets or n - plan.num_decodes > SEQUENCES:
            return None
        fitting = (s for s in self.sizes if s.tokens >= tokens and n <= s.draws and (n > SEQUENCES) == (s.decodes > 0))
        size = next(fitting, None)
        if size is None or (plan.segments is not None and len(plan.segments) > size.segments):
            return None
        if not self._captured(size):
            return None
        started, begin = time.perf_counter(), self._loaded.mark()
        self._batch.apply(plan)
        self._send(plan, size)
        self._replay(size, size.tokens)
        every = bool(plan.samples.all())
        entries = self._batch.indices[:n] if every else np.flatnonzero(plan.samples)
        drawing, positions = None if every else entries, plan.starts + plan.q_lens
        return self._draw(plan, grammars, size.draws, positions, drawing, entries, started, begin)

    def size_of(self, size: Size) -> tuple[int, int, int]:
        return size.decodes or 1, size.tokens, size.draws

    def _shapes(self, size: Size) -> Shapes:
        shapes: Shapes = [
            (PER_TOKEN + len(self._batch.tables), size.tokens), (PER_SEQUENCE, size.draws), (PER_CHUNK, SEQUENCES),
            (ONCE,),
        ]
        return shapes + ([(size.segments, 4), (size.draws + 1,)] if self._has_states else [])

    def _send(self, plan: StepPlan, size: Size) -> None:
        n, tokens = len(plan.rows), plan.num_tokens
        first = plan.num_decodes if size.decodes else 0  # the sequences before `first` are computed as decodes
        ends, seq_lens, token_rows, positions, slots = self._batch.layout(plan)
        sent, shapes = self._input.array(), self._shapes(size)
        sent[: length(shapes)] = 0
        by_token, by_sequence, by_chunk, once, *of_states = divided(sent, shapes)
        by_token[:, :tokens] = plan.token_ids, positions, token_rows, *slots
        by_sequence[0, :n] = plan.rows
        by_sequence[1, :n] = ends - 1
        by_sequence[2, :n] = np.where(plan.samples, seq_lens, 0)  # 0: draws nothing
        by_sequence[3, :first] = seq_lens[:first]
        by_chunk[0, : n - first] = plan.rows[first:]
        by_chunk[1, : n - first], by_chunk[1, n - first :] = ends[first:], tokens  # chunks of padding are empty
        by_chunk[2, : n - first] = seq_lens[first:]
        once[:] = first, n
        if self._has_states:
            assert plan.segments is not None and plan.cu_segments is not None, "the plan has the states' segments"
            segments, cu_segments = of_states
            m = len(plan.segments)
            segments[:m], segments[m:, :2] = plan.segments, tokens
            cu_segments[: n + 1], cu_segments[n:] = plan.cu_segments, m
        self._input.send(length(shapes))

    def _run(self, size: Size) -> None:
        by_token, by_sequence, by_chunk, once, *of_states = divided(self._input.target, self._shapes(size))
        ids, positions, token_rows, *slots = by_token
        rows, logit_rows, draws, decoded = by_sequence
        chunk_rows, ends, chunk_lens = by_chunk
        self._sampling.rows[: size.draws].copy_(rows)
        self._sampling.lengths[: size.draws].copy_(draws)
        table_rows, seq_lens = chunk_rows, chunk_lens
        if size.decodes:
            table_rows, seq_lens = torch.cat((rows, chunk_rows)), torch.cat((decoded, chunk_lens))
        bounds = torch.zeros(size.decodes + SEQUENCES + 1, dtype=torch.int32, device=self._loaded.device)
        bounds[size.decodes : size.decodes + 1].copy_(once[:1])
        bounds[size.decodes + 1 :].copy_(ends)
        tables = [table.index_select(0, table_rows) for table in self._batch.tables]
        states = StateMeta(of_states[0].to(torch.int32), of_states[1].to(torch.int32), None, 0) if of_states else None
        meta = ForwardMeta(
            positions=positions, slot_mapping=slots[0], cu_seqlens_q=bounds, seq_lens=seq_lens.to(torch.int32),
            block_table=tables[0], max_q_len=size.tokens, max_seq_len=self._loaded.max_model_len,
            num_decodes=size.decodes, logit_rows=logit_rows, live=bounds[-1:], live_rows=once[1:].to(torch.int32),
            groups=tuple(map(PagedGroup, slots[1:], tables[1:])), states=states,
        )
        ids = torch.where(ids < 0, self._batch.last_token.index_select(0, token_rows), ids)
        # Most of the graph's sequences are padding, so the number of splits depends on the tokens. Beside decodes, a
        # chunk behind a long text has few: as many as a target for gaps allows.
        few = max(TOKENS[0], (size.tokens - size.decodes) // (4 if size.decodes else 2))
        for attention, own in zip(self._layers.attention, meta.by_group(), strict=True):
            tiles = -(-few * attention.group // BLOCK_M)
            attention.plan(own, padded=True, splits=num_splits(tiles, attention.kv_heads))
        self._layers.logits_of_chunks(ids, meta, self._sampling.logits[: size.draws])


def extend_sizes(limit: int, max_rows: int) -> list[Size]:
    """Returns the sizes to capture, ascending, for steps of at most `limit` tokens and max_rows sequences."""
    if max_rows < SEQUENCES:
        return []
    decodes = [0, *(n for n in DECODES if SEQUENCES < n < max_rows), *([max_rows] if max_rows > SEQUENCES else [])]
    return [Size(tokens, n) for tokens in TOKENS if tokens <= limit for n in decodes if n < tokens]
