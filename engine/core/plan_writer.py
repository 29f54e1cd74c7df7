"""Writes the entries of a step as the arrays of a StepPlan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.core.cache import KVCache
from engine.core.request import Grammar, Request
from engine.core.side_groups import States
from engine.core.step import PromptTargets, RowSettings, Scheduled, StepPlan
from engine.trace.records import RecordLog

Entry = tuple[Request, int, int]  # the request, the position of its first token in this step, the number of tokens


class _Batch(NamedTuple):
    """The parts of a plan that stay the same while the same requests decode."""

    requests: tuple[Request, ...]
    rows: np.ndarray
    q_lens: np.ndarray
    samples: np.ndarray
    epochs: list[int]
    grammars: dict[int, Grammar]


class PlanWriter:
    """Makes the plans and their records. A step record names only the requests that joined or left the decoding set, so
    the writer keeps that set."""

    def __init__(self, cache: KVCache, log: RecordLog) -> None:
        self._cache = cache
        self._log = log
        self.decoding: dict[int, Request] = {}  # the decoding set after the last record, by id
        self._decodes: tuple[Request, ...] = ()  # the requests that decoded in the last step, in order
        self._batch: _Batch | None = None  # the last step's batch, if it had only decodes without drafts

    def write(
        self, step: int, entries: list[Entry], num_decoding: int, drafts: dict[int, list[int]], joins: list[Request],
        num_waiting: int,
    ) -> Scheduled:
        """Write the plan of `entries`. They are in this order: decodes without drafts, decodes with `drafts` (by
        request id), prefill chunks. `num_decoding` counts the entries before the chunks."""
        num_decodes = num_decoding - len(drafts)
        requests, starts, q_lens = zip(*entries, strict=True)
        for request in requests:
            request.last_step = step
        decodes = requests[:num_decoding]
        token_ids = [
            request.ids[-1] if len(request.ids) == request.planned else -1 for request in decodes[:num_decodes]
        ]
        for request in decodes[num_decodes:]:
            token_ids += [request.ids[-1], *drafts[request.id]]
        prefills: list[tuple[int, int, int, bool]] = []
        targets: dict[int, PromptTargets] = {}
        for request, start, q in entries[num_decoding:]:
            token_ids += request.ids[start : start + q]
            if request.params.prompt_logprobs is not None:
                predicted = request.ids[start + 1 : min(start + q + 1, request.prompt_len)]
                targets[num_decoding + len(prefills)] = PromptTargets(predicted, request.params.prompt_logprobs)
            request.decoding = start + q == len(request.ids)
            prefills.append((request.id, start, q, request.decoding))
        joined, left = self._changes(decodes)
        self._log.append("step", step, prefills, joined, left, len(token_ids), num_waiting)
        batch = self._batch
        if prefills or drafts or batch is None or requests != batch.requests:
            batch = _Batch(
                requests, rows=np.array([request.row for request in requests], np.int32),
                q_lens=np.array(q_lens, np.int32),
                samples=np.array([True] * num_decoding + [samples for *_, samples in prefills], bool),
                epochs=[request.epoch for request in requests],
                grammars={i: request.grammar for i, request in enumerate(requests) if request.grammar is not None},
            )
            self._batch = None if prefills or drafts else batch
        plan = StepPlan(
            step=step, rows=batch.rows, starts=np.array(starts, np.int32), q_lens=batch.q_lens, samples=batch.samples,
            token_ids=np.array(token_ids, np.int32), num_decodes=num_decodes, num_drafted=len(drafts),
            tables=self._cache.take_table_changes(), joins=[RowSettings.of(request) for request in joins],
            prompt_targets=targets,
        )
        if self._cache.states is not None:
            self._write_segments(plan, entries, drafts, self._cache.states)
        return Scheduled(plan, requests, batch.epochs, batch.grammars)

    def _write_segments(
        self, plan: StepPlan, entries: list[Entry], drafts: dict[int, list[int]], states: States
    ) -> None:
        """Write the segments of the recurrent states."""
        caching = self._cache.prefix_caching
        rows: list[tuple[int, int, int, int]] = []
        bounds, at = [0], 0
        for request, start, n in entries:
            for tokens, source, target in states.segments(request, start, n, request.id in drafts, caching):
                rows.append((at, at + tokens, source, target))
                at += tokens
            bounds.append(len(rows))
        plan.segments, plan.cu_segments = np.array(rows, np.int32), np.array(bounds, np.int32)

    def _changes(self, decodes: tuple[Request, ...]) -> tuple[list[int], list[int]]:
        """Returns the ids of the requests that join the decoding set in this step, and of those that leave it but still
        run."""
        if decodes == self._decodes:
            return [], []
        before = self.decoding
        now = {request.id: request for request in decodes}
        self._decodes, self.decoding = decodes, now
        return [id for id in now if id not in before], [id for id in before if id not in now]
