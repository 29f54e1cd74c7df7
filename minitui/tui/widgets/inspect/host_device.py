"""The tracks of host and device over the last few steps, without an axis, for the panel of timings."""

from __future__ import annotations

from itertools import pairwise

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.rows import Row, Run, Runs, fitting
from minitui.tui.widgets.tracks import Scale, track
from minitui.viewmodel.explain.limits import OtherPrograms
from minitui.viewmodel.explain.timing import Timings
from minitui.viewmodel.history.spans import Span, Timeline
from minitui.viewmodel.view import View

LABEL = 13  # cells
LEAST_TRACK = 12  # cells
STEP = 9  # cells, about, for a step
MOST_STEPS = 8
WORK = ("plan", "launch", "commit")


def host_and_device(view: View, width: int) -> list[Runs]:
    """Returns two rows: the tracks of host and device over the last few steps, on one scale, with their mean times."""
    t = view.timings
    host, device = Row("host", "dim").to(LABEL), Row("device", "dim").to(LABEL)
    if not t.steps:
        return [host.add(glyphs().dash, "dim").done(width), device.add(glyphs().dash, "dim").done(width)]
    host_text, others = f" {ms(t.host_ms)} ms per step", _others(t)
    if t.device_ms is None:
        parts = (": plan, launch and commit", "") if t.launch_known else (
            ": plan and commit; the launch is unknown", " without launch"
        )
        whole, brief = (
            ("not measured: this device computes during the launch", "not measured") if t.launch_known
            else (f"{glyphs().dash} (this engine does not report its device)", "not reported")
        )
        room = width - LABEL
        told = (*(part + others for part in parts if others), *parts)
        host.add(host_text.strip() + fitting(room - len(host_text) + 1, *told), "ink")
        device.add(fitting(room, whole, brief), "dim")
        return [host.done(width), device.done(width)]
    mean, busy = f" {ms(t.device_ms)} ms", f"at most {100 * t.device_busy:.0f} %"
    host_text = f" {ms(t.host_ms)} ms{others}" if others else host_text
    texts = ((f"{mean}, busy for {busy} of the time", MOST_STEPS * STEP), (f"{mean}, busy {busy}", LEAST_TRACK))
    for device_text, least in (*texts, (f"{mean} per step", LEAST_TRACK)):
        room = width - LABEL - max(len(host_text), len(device_text)) - 1
        if room >= least:  # the steps matter more than long words
            break
    else:
        return [host.add(host_text.strip()).done(width), device.add(device_text.strip()).done(width)]
    above, below = _tracks(Timeline(view.history.steps, view.moment.horizon), room)
    host.extend(above).to(LABEL + room).add(host_text, "dim")
    device.extend(below).to(LABEL + room).add(device_text, "dim")
    return [host.done(width), device.done(width)]


def means_row(t: Timings, width: int) -> Runs:
    """Returns the mean times of host and device in one row."""
    row = Row("per step", "dim").to(LABEL)
    if not t.steps:
        return row.add(glyphs().dash, "dim").done(width)
    row.add("host ", "dim").add(f"{ms(t.host_ms)} ms").add(", device ", "dim")
    if t.device_ms is None:
        row.add("not measured" if t.launch_known else "not reported")
        return row.add(fitting(width - row.width, _others(t), ""), "dim").done(width)
    row.add(f"{ms(t.device_ms)} ms")
    busy = f", busy for at most {100 * t.device_busy:.0f} % of the time"
    others = _others(t)
    return row.add(fitting(width - row.width, busy + others, others, busy, ""), "dim").done(width)


def _others(t: Timings) -> str:
    """Returns ", with other programs" if the times include a part in which other programs had the core."""
    return ", with other programs" if any(isinstance(limit, OtherPrograms) for limit in t.limits) else ""


def _tracks(line: Timeline, room: int) -> tuple[list[Run], list[Run]]:
    """Returns the tracks (of the host, of the device), `room` cells wide, with the last steps. The time between two
    steps (idle, slow motion) is drawn as at most a fifth of a mean step."""
    wanted = max(2, min(MOST_STEPS, room // STEP))
    steps = line.arrivals(max(line.first, line.last - wanted + 1), line.last)
    longest = sum(step.end - step.begin for step in steps) / len(steps) / 5
    cuts = [(after.begin, gap - longest) for before, after in pairwise(steps)
            if (gap := after.begin - before.end) > longest]

    def moved(span: Span) -> Span:
        by = sum(cut for place, cut in cuts if span.end > place)
        return span._replace(begin=span.begin - by, end=span.end - by)

    first, left = steps[0].step, steps[0].begin
    right = line.end - sum(cut for _, cut in cuts)
    scale = Scale(left, max(right - left, 1e-6) / room, room)
    host = [moved(span)._replace(kind="commit") for span in line.host(first, line.last) if span.kind in WORK]
    device = [moved(span) for span in line.device(first, line.last)]
    return _ruled(track(host, scale, None, _no_labels)), _ruled(track(device, scale, None, _no_labels))


def _no_labels(_span: object) -> list[str]:
    return []


def _ruled(cells: list[Run]) -> list[Run]:
    """Returns the cells of a track with a thin line where nothing happened."""
    return [(glyphs().rule * len(text), "faint") if text.isspace() else (text, style) for text, style in cells]
