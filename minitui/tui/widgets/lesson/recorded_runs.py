"""Recorded runs: what did host and device do, in the same steps run in different ways? One scale for all."""

from __future__ import annotations

from minitui.text import ms
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, fit, legend, wrapped
from minitui.tui.widgets.tracks import KERNELS, PAUSES, STYLES, Scale, mark, ruler, track
from minitui.viewmodel.board import RecordedRun, RecordedRuns
from minitui.viewmodel.history.spans import Span, Timeline
from minitui.viewmodel.view import View

LABEL = 15  # cells: the name of a run, and of its track
NAMES = ("plan", "launch", "wait", "commit", "emit")


class HostAndDevice(LinePanel):
    """Draws two tracks for each run, and a sentence below them."""

    TITLE = "Host and device"

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, RecordedRuns):
            return Picture(wrapped("no picture yet: the experiment has not run", "dim", width))
        rows: list[Runs] = []
        for name, span, runs in board.groups:
            group = _group(name, span, runs, board.until, width)
            if rows and len(rows) + len(group) > height:
                break
            rows += group
        key = legend(
            *((mark(kind), STYLES[kind], kind) for kind in NAMES), (mark(KERNELS), STYLES[KERNELS], "kernels"),
            (mark(PAUSES), STYLES[PAUSES], "with pauses"),
        )
        return Picture(rows, board.title, legend=key)


def _group(name: str, span: float, runs: tuple[RecordedRun, ...], until: float, width: int) -> list[Runs]:
    columns = max(1, width - LABEL)
    rows = [Row(fit(name, LABEL), "bold ink").extend(ruler(Scale(0.0, span / columns, columns), None)).done(width)]
    for run in runs:
        line = Timeline(run.steps, run.steps.last)
        begin = line.arrived(max(line.first, run.first))  # the end of a step: from here on, all is known
        scale = Scale(begin, span / columns, columns)
        shown = begin + span * until
        host, device = (_clipped(spans, begin, shown) for spans in (
            line.host(line.first, line.last), line.device(line.first, line.last)
        ))
        device = [span._replace(kind=PAUSES if run.pauses else KERNELS) for span in device]
        for label, spans in ((f"{fit(run.name, 8)}host", host), ("        device", device)):
            cells: list[Run] = track(spans, scale, None, _labels)
            rows.append(Row(fit(label, LABEL), "ink").extend(cells).done(width))
        rows.append(Row(" " * 8 + run.line, "dim").done(width))
    return rows


def _clipped(spans: list[Span], begin: float, end: float) -> list[Span]:
    return [
        span._replace(begin=max(begin, span.begin), end=min(end, span.end))
        for span in spans
        if span.end > begin and span.begin < end
    ]


def _labels(span: Span) -> list[str]:
    name = "kernels and pauses" if span.kind == PAUSES else span.kind
    return [f"{name} {ms(span.ms)}", name]
