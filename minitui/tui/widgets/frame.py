"""The frame of a panel: a border with a title and a note above, and a legend below."""

from __future__ import annotations

from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.rows import Line, Row, Run, Runs, cells, clip, plain, runs_width

EDGE = 6  # cells of the lower edge that a legend cannot have
LEGEND_GAP = 2  # cells between two entries of a legend below the picture


def in_frame(
    body: list[Runs], title: str, note: list[Run], legend: list[Run], width: int, height: int, focused: bool
) -> list[Runs]:
    """Returns the rows of `body` in a frame: exactly `height` rows of exactly `width` cells."""
    inner_width, inner_height = width - 4, max(0, height - 2)
    line = "accent" if focused else "frame"
    side = "|" if glyphs().rule == "-" else "│"
    body = body[:inner_height] + [()] * (inner_height - len(body))
    if runs_width(legend) > width - EDGE:
        body = _with_legend(body, legend, inner_width)
    heading = (title, "bold accent" if focused else "bold ink")
    rows = [_edge("╭╮", heading, note, width, line)]
    rows += [((f"{side} ", line), *exact(row, inner_width), (f" {side}", line)) for row in body]
    if height > 1:
        rows.append(_edge("╰╯", None, legend, width, line))
    return rows


def has_room(title: str, note: list[Run], width: int) -> bool:
    """Returns True if title and note fit into the upper edge."""
    return 2 + cells(title) + 2 + runs_width(note) + 4 <= width


def _edge(corners: str, heading: Run | None, side: list[Run], width: int, line: str) -> Runs:
    """Returns a horizontal edge, with `side` at its right end if there is room."""
    rule = glyphs().rule
    corners = corners if rule != "-" else "++"
    row = Row(corners[0] + rule, line)
    if heading is not None:
        row.add(clip(f" {heading[0]} ", width - 4), heading[1])
    room = width - row.width - 4
    if side and runs_width(side) <= room:
        row.to(width - 4 - runs_width(side), rule, line)
        row.add(" ", line).extend(side).add(" ", line)
    row.to(width - 1, rule, line).add(corners[1], line)
    return row.done(width)


def exact(row: Runs, width: int) -> Runs:
    """Returns a row of exactly `width` cells."""
    if type(row) is Line or runs_width(row) == width:
        return row
    return Row().extend(row).done(width)


def _with_legend(body: list[Runs], legend: list[Run], width: int) -> list[Runs]:
    """Returns the rows with the legend in the last ones, if these are empty. Used if the frame has no room for it."""
    lines = [Row()]
    for entry in _entries(legend):
        if lines[-1].width and lines[-1].width + LEGEND_GAP + runs_width(entry) > width:
            lines.append(Row())
        lines[-1].to(lines[-1].width + LEGEND_GAP if lines[-1].width else 0).extend(entry)
    kept = len(body) - len(lines)
    if kept < 1 or any(plain(row).strip() for row in body[kept:]):
        return body
    return [*body[:kept], *(line.done(width) for line in lines)]


def _entries(legend: list[Run]) -> list[list[Run]]:
    """Returns the entries of a legend, without the spaces between them."""
    entries: list[list[Run]] = [[]]
    for run in legend:
        if run[0].strip():
            entries[-1].append(run)
        else:
            entries.append([])
    return [entry for entry in entries if entry]
