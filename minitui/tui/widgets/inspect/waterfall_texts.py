"""The texts of the waterfall: the labels of spans, the figures of a step, and what is at the cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minitui.text import duration, ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.inspect.step_bar import contents
from minitui.tui.widgets.rows import Row, Run, Runs, first_rows, legend, named, runs_width
from minitui.tui.widgets.tracks import STYLES, UNKNOWN, mark
from minitui.viewmodel.explain.timing import why_slow
from minitui.viewmodel.history.spans import HOST, LAUNCH_OR_WAIT, NOT_REPORTED, PERHAPS, REQUESTS, Span, parts_of
from minitui.viewmodel.history.steps import PARTS, StepRow, Steps
from minitui.viewmodel.view import View

WHY_ROWS = 4  # of the cause of a step


def labels(span: Span) -> list[str]:
    """Returns the texts of a span, the longest first."""
    if span.kind == "step":
        number = f"{span.step:,}"
        return [f"{number}  {duration(span.ms)}", number] if span.ms else [number]
    if span.kind in ("idle", "gate", "gc", "delayed"):
        return [f"{span.kind} {duration(span.ms)}", span.kind]
    if span.kind in (LAUNCH_OR_WAIT, NOT_REPORTED):
        return [span.kind, "?"]
    if span.kind in HOST or not span.tokens:
        return [f"{span.kind} {span.step:,}", span.kind]
    return [f"prefill +{span.tokens:,}", f"+{span.tokens:,}"]


def request_labels(span: Span) -> list[str]:
    """Returns the texts of a phase of a request: the tokens of a chunk."""
    return [f" +{span.tokens:,} ", f"+{span.tokens:,}"] if span.tokens else []


def request_legend(without: str = "") -> list[Run]:
    """Returns the meaning of the glyphs on the tracks of requests, except of the kind `without`."""
    kinds = (kind for kind in REQUESTS.values() if kind != without)
    return legend(*((mark(kind, request=True), STYLES[kind], kind) for kind in kinds))


def covering(spans: Sequence[Span], place: float) -> Span | None:
    """Returns the span at a place on the axis."""
    return next((span for span in spans if span.begin <= place < span.end), None)


def at_cursor(place: float, left: float, host: Sequence[Span], device: Sequence[Span], width: int) -> Runs:
    """Returns the row that says what host and device do at the cursor."""
    row = Row("cursor ", "accent").add(f"+{ms(place - left)} ms", "bold accent")
    for name, spans in (("host", host), ("device", device)):
        span = covering(spans, place)
        text = "no work" if span is None else "unknown" if span.kind == UNKNOWN else f"{span.kind} {span.step:,}, "
        row.add(f" · {name} ", "dim").add(text)
        if span is not None and span.kind != UNKNOWN:
            row.add(duration(span.ms), "bold ink")
    return row.done(width)


def figures(
    view: View, row: StepRow, width: int, seen: Collection[str] | None, room: int, within: Span | None,
) -> list[Runs]:
    """Returns the rows with the times of a step's parts. They are also the legend of the tracks. `seen`: the kinds of
    the spans in sight; parts of other kinds are left out if they took no time. None: no part is left out. `room`: rows;
    with too few, the end of the cause is left out. `within`: the device began the step at a moment of this span; None:
    its begin is known, or unknown."""
    head = Row(f"step {row.step:,}", "bold ink").extend(named(view, "  " + contents(view, row)))
    if row.took_ms is not None:
        head.add("  took ", "dim").add(duration(row.took_ms), "bold ink")
    model = view.models.of(row.step)
    why = view.texts.labelled(why_slow(row, model, always=True))
    if head.width + len(why) + 3 > width:
        why = view.texts.labelled(why_slow(row, model))
    if why and head.width + len(why) + 3 <= width:
        head.extend(named(view, f" ({why})", "dim"))
        why = ""
    rows: list[Runs] = []
    flow = Row()
    marks = None if seen is None else {mark(kind) for kind in seen}
    for glyph, style, name, value in _entries(row, view.history.steps, within):
        if marks is not None and glyph not in marks and value in ("0", glyphs().dash):
            continue
        entry = [(glyph, style), (f" {name} ", "dim"), (value, "ink")]
        if flow.width and flow.width + 2 + runs_width(entry) > width:
            rows.append(flow.done(width))
            flow = Row()
        flow.add("  " if flow.width else "").extend(entry)
    rows.append(flow.done(width))
    most = max(1, min(WHY_ROWS, room - 1 - len(rows)))
    return [head.done(width), *first_rows(why, "dim", width, most, "d: details"), *rows]


def _entries(row: StepRow, steps: Steps, within: Span | None) -> list[tuple[str, str, str, str]]:
    """Returns (glyph, style, name, value in ms) of each part, and of what is not a part of the step's duration."""
    parts = row.parts
    shown = {(part.kind, part.name(row.step)): part.ms for part in parts_of(steps, row)}
    others = {"gate": None if parts is None else parts.gate, NOT_REPORTED: 0.0}
    for kind in (*PARTS, NOT_REPORTED):  # the legend has every glyph
        if not any(known == kind for known, _ in shown):
            shown[kind, kind] = others.get(kind)
    entries = [(mark(kind), STYLES[kind], name, _value(value)) for (kind, name), value in shown.items()]
    device = "prefill" if row.chunks else "decode"
    entries.append((mark(device), STYLES[device], f"device ({row.kind})", _value(row.device_ms)))
    if within is not None:
        entries.append((mark(PERHAPS), STYLES[PERHAPS], "began within", ms(within.end - within.begin)))
    for name in ("gc", "delayed"):
        entries.append((mark(name), STYLES[name], name, _value(None if parts is None else getattr(parts, name))))
    stops = glyphs().dash if parts is None else f"{parts.stops}"
    return [*entries, (mark("stop"), STYLES["stop"], "stops", stops)]


def _value(value: float | None) -> str:
    return glyphs().dash if value is None else "0" if value == 0 else ms(value)
