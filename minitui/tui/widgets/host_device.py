"""The tracks of host and device over the last few steps, without an axis, for the panel of timings."""

from __future__ import annotations

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.rows import Row, Run, Runs
from minitui.viewmodel.step_row import StepRow
from minitui.viewmodel.timing import Timings

LABEL = 13  # cells
LEAST_TRACK = 12  # cells


def host_and_device(t: Timings, width: int) -> list[Runs]:
    """Returns the tracks of host and device over the last few steps, on one scale."""
    host, device = Row("host", "dim").to(LABEL), Row("device", "dim").to(LABEL)
    host_text = f" {ms(t.host_ms)} ms per step"
    if not t.steps:
        return [host.add(glyphs().dash, "dim").done(width), device.add(glyphs().dash, "dim").done(width)]
    if t.device_ms is None:
        parts = "plan, launch and commit" if t.launch_known else "plan and commit; the launch is unknown"
        host.add(f"{ms(t.host_ms)} ms per step: {parts}", "ink")
        device.add(
            "not measured: this device computes during the launch" if t.launch_known
            else f"{glyphs().dash} (this engine does not report its device)", "dim",
        )  # fmt: skip
        return [host.done(width), device.done(width)]
    device_text = f" {ms(t.device_ms)} ms, busy at most {100 * t.device_busy:.0f} %"
    room = width - LABEL - max(len(host_text), len(device_text)) - 1
    steps = [row for row in t.recent if row.wall_ms is not None and row.ended is not None]
    if room < LEAST_TRACK:  # the tracks need the place of the device's share
        device_text = f" {ms(t.device_ms)} ms per step"
        room = width - LABEL - max(len(host_text), len(device_text)) - 1
    if room < LEAST_TRACK or not steps:
        return [host.add(host_text.strip()).done(width), device.add(device_text.strip()).done(width)]
    steps = steps[-max(2, room // 9) :]
    above, below = _draw(steps, room)
    host.extend(above).to(LABEL + room).add(host_text, "dim")
    device.extend(below).to(LABEL + room).add(device_text, "dim")
    return [host.done(width), device.done(width)]


def _draw(steps: list[StepRow], room: int) -> tuple[list[Run], list[Run]]:
    """Returns the tracks (of the host, of the device), `room` cells wide.

    A step begins with its plan. Steps may overlap.
    """
    spans = []
    for row in steps:
        end = (row.ended or 0.0) * 1e3
        begin = end - (row.wall_ms or 0.0)
        spans.append((begin, end, row))
    origin, finish = spans[0][0], spans[-1][1]
    # A pause between steps (idle, slow motion) is drawn as at most a fifth of a mean step, to leave room for the steps.
    usual = sum(end - begin for begin, end, _ in spans) / len(spans)
    shift, before, placed = 0.0, None, []
    for begin, end, row in spans:
        if before is not None and begin - before > usual / 5:
            shift += begin - before - usual / 5
        before = end
        placed.append((begin - shift - origin, end - shift - origin, row))
    total = max(finish - shift - origin, 1e-9)
    scale = room / total
    g = glyphs()
    host, device = [(g.rule, "faint")] * room, [(g.rule, "faint")] * room

    def fill(track: list[Run], begin: float, end: float, cell: Run) -> None:
        left = int(begin * scale)
        right = max(left + 1, int(end * scale))
        for x in range(max(0, left), min(room, right)):
            track[x] = cell

    for begin, end, row in placed:
        planned = (row.plan_ms or 0.0) + (row.launch_ms or 0.0)
        cell = (g.prefill, "prefill") if row.chunks else (g.busy, "decode")
        if row.device_ms is not None:
            started = max(begin + planned - (row.launch_ms or 0.0) / 2, end - (row.commit_ms or 0.0) - row.device_ms)
            fill(device, started, min(end, started + row.device_ms), cell)
            x = int(started * scale)
            if 0 < x < room and device[x - 1] == cell:
                device[x - 1] = (g.edge, cell[1])
        fill(host, begin, begin + planned, (g.commit, "hit"))
        fill(host, end - (row.commit_ms or 0.0), end, (g.commit, "hit"))
    return host, device
