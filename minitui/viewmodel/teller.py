"""Turns the engine's records into lines of text: one for each decision, step, and run of equal decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.trace.records import Record
from minitui.text import count
from minitui.viewmodel.model import View
from minitui.viewmodel.narrate import computed
from minitui.viewmodel.step_row import StepRow
from minitui.visible import visible_line

if TYPE_CHECKING:
    from minitui.trace.reader import TraceReader

LONGEST_RUN_S = 2.0  # a run of decode steps that lasts longer gets several lines
# Kinds of events that the text of the event does not name.
KIND_PREFIXES = {"evict": "eviction: ", "refuse": "refused: ", "fail": "failure: "}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text about one record, step or run. `step`: -1 before the first step. `kind`: one of
    minitui.viewmodel.events.KINDS, "step", "steps", "submit" or "gap"."""

    t: float
    step: int
    kind: str
    text: str

    def __str__(self) -> str:
        where = f"step {self.step:,}" if self.kind != "steps" else ""
        return f"{self.t:9.2f} s  {where + '  ' if where else ''}{visible_line(self.text)}"


@dataclass(slots=True)
class _Run:
    """Consecutive steps in which the same number of requests decoded and nothing else happened."""

    first: StepRow
    last: StepRow
    t: float
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    total_ms: float = 0.0
    worst_ms: float = 0.0
    worst_step: int = -1


class Teller:
    """Turns records into lines of text. Also folds the records into `view`."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._batch: list[Record] = []
        self._run: _Run | None = None

    def tell(self, records: Iterable[Record]) -> Iterator[Line]:
        """Yields the lines for these records. A line that later records may change is held back."""
        for record in records:
            self._batch.append(record)
            if record[2] in ("time", "fail", "refuse", "gate", "pace", "finish"):
                yield from self._fold()

    def rest(self) -> Iterator[Line]:
        """Yields the lines held back so far."""
        yield from self._fold()
        yield from self._flush()

    def tell_all(self, reader: TraceReader) -> Iterator[Line]:
        """Yields the lines of a whole recording, with one line for each gap in its records."""
        last = -1  # the number of the last record
        for index, keyframe in enumerate(reader.keyframes):
            part = reader.part(index)
            if keyframe.seq != last:
                yield from self.rest()
                self.view.reset(part.snapshot)
                if index:
                    missing = f"({keyframe.seq - last:,} records are missing here)"
                    yield Line(part.state.t, keyframe.step, "gap", missing)
            yield from self.tell(part.records)
            last = keyframe.seq + len(part.records)
        yield from self.rest()

    def _fold(self) -> Iterator[Line]:
        batch, self._batch = self._batch, []
        if not batch:
            return
        view = self.view
        view.fold(batch)
        events = view.events.since(batch[0][0])
        submits = [record for record in batch if record[2] == "submit"]
        ended = [view.steps.get(record[3]) for record in batch if record[2] == "time"]
        rows = [row for row in ended if row is not None]
        quiet = not events and not submits and all(row.kind == "decode" for row in rows)
        if quiet:
            for row in rows:
                yield from self._extend(row)
            return
        yield from self._flush()
        lines = [
            Line(r[1], view.lanes.lanes[r[3]].submitted_step, "submit", self._submit(r))
            for r in submits if r[3] in view.lanes.lanes
        ]  # fmt: skip
        lines += [
            Line(event.record[1], event.step, event.kind, KIND_PREFIXES.get(event.kind, "") + view.event_text(event))
            for event in events
        ]
        yield from sorted(lines, key=lambda line: line.t)
        for row in rows:
            yield Line(row.ended or row.t, row.step, "step", step_text(row, view))

    def _submit(self, record: Record) -> str:
        _, _, _, request, group, tokens, _ = record
        chat = f" of {self.view.group_name(group)}" if group else ""
        return f"r{request}{chat} joins the queue with {count(tokens, 'prompt token')}"

    def _extend(self, row: StepRow) -> Iterator[Line]:
        run = self._run
        if run is not None and (run.last.decodes != row.decodes or (row.ended or row.t) - run.t > LONGEST_RUN_S):
            yield from self._flush()
            run = None
        if run is None:
            run = self._run = _Run(row, row, row.ended or row.t)
        run.last = row
        run.tokens += row.decodes + row.accepted
        run.drafted += row.drafted
        run.accepted += row.accepted
        wall = row.wall_ms or 0.0
        run.total_ms += wall
        if wall > run.worst_ms:
            run.worst_ms, run.worst_step = wall, row.step

    def _flush(self) -> Iterator[Line]:
        run, self._run = self._run, None
        if run is None:
            return
        if run.first.step == run.last.step:
            yield Line(run.t, run.first.step, "step", step_text(run.first, self.view))
            return
        n = run.last.step - run.first.step + 1
        requests = count(run.last.decodes, "request")
        verb = "decodes" if run.last.decodes == 1 else "decode"
        steps = f"steps {run.first.step:,} to {run.last.step:,}"
        text = f"{steps}  {requests} {verb} one token per step · {run.tokens:,} tokens"
        if run.drafted:
            text += f" · {run.accepted:,} of {run.drafted:,} drafts accepted"
        if run.total_ms:
            text += f" · {run.total_ms / n:.1f} ms per step"
            if run.worst_ms > 2 * run.total_ms / n:
                text += f", the slowest {run.worst_ms:.1f} ms (step {run.worst_step:,})"
        yield Line(run.last.ended or run.t, run.first.step, "steps", text)


def step_text(row: StepRow, view: View) -> str:
    """Returns what a step computed, how much of the token budget it used, and how long it took."""
    text = f"{' '.join(computed(view, row)).removesuffix('.')} · {row.tokens:,} of {view.live.state.budget:,} tokens"
    if row.waiting:
        text += f" · {row.waiting:,} waiting"
    if row.wall_ms is not None:
        text += f" · {row.wall_ms:.1f} ms"
    return text.lstrip(" ·")
