"""The rows of the timings: the kinds of steps, the slowest step, the first token, drafts, ranks, and what limits."""

from __future__ import annotations

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.inspect.host_device import LABEL
from minitui.tui.widgets.inspect.step_bar import cause_within, without_usual
from minitui.tui.widgets.rows import Row, Runs, first_rows, fitting, named, plain, wrapped
from minitui.viewmodel.explain.limits import Limit, OtherPrograms
from minitui.viewmodel.explain.timing import RECENT_FIRST_TOKENS, KindStats, Timings, why_briefly, why_slow
from minitui.viewmodel.view import View

KINDS = (("decode only", "decode", "decode"), ("mixed", "mixed", "prefill"), ("prefill only", "prefill", "prefill-2"))
FIGURE = 7  # cells
SHARE = 5  # cells: "100 %", and its heading


def kind_rows(t: Timings, width: int) -> list[Runs]:
    """Returns the heading of the table of kinds, and a row for each kind. The heading says whose times they are."""
    row = Row("device ms" if t.by_device else "took ms", "dim").to(LABEL)
    for i, name in enumerate(("steps", "p50", "p99", "max")):
        row.right(name, LABEL + FIGURE * (i + 1), "dim")
    row.to(LABEL + FIGURE * 4 + 3)
    wholes = ("share of the device's time", "of device time") if t.by_device else ("share of time",)
    heading = fitting(width - row.width, *wholes, "share", "")
    kinds = [_kind(label, getattr(t, name), style, width) for label, name, style in KINDS]
    return [row.add(heading, "dim").done(width), *kinds]


def _kind(label: str, stats: KindStats, style: str, width: int) -> Runs:
    at = LABEL + FIGURE
    row = Row(label, "ink").right(f"{stats.steps:,}", at, "ink" if stats.steps else "dim")
    for value in (stats.p50, stats.p99, stats.worst):
        at += FIGURE
        row.right(ms(value) if stats.steps else glyphs().dash, at, "ink" if stats.steps else "dim")
    row.to(at + 3)
    room = width - row.width - 6
    if room >= 4:
        filled = round(stats.share * room)
        if stats.share and not filled:
            filled = 1
        row.add(glyphs().busy * filled, style).add(glyphs().rule * (room - filled), "faint")
    if width - row.width >= SHARE or room >= 4:
        row.right(f"{100 * stats.share:.0f} %", width, "dim")
    return row.done(width)


def slowest_rows(view: View, width: int, most: int) -> list[Runs]:
    """Returns the slowest step and its cause, in at most `most` rows."""
    slowest = view.timings.slowest
    if slowest is None or slowest.took_ms is None:
        return [Row("slowest", "dim").to(LABEL).add("no step timed yet", "dim").done(width)]
    model = view.models.of(slowest.step)
    took, step = f"{ms(slowest.took_ms)} ms", f" step {slowest.step:,}"
    if view.timings.by_device:  # not the clock of the table above
        step += fitting(width - LABEL - len(took) - len(step), f", since the results of step {slowest.step - 1:,}", "")
    style = "prefill" if slowest.chunks else "ink"
    whole, brief = (view.texts.labelled(why(slowest, model)) for why in (why_slow, why_briefly))
    padded = LABEL + len(took) + len(step) + 1 + len(whole) <= width
    row = Row("slowest ", "dim").to(LABEL if padded else 0).add(took, "bold ink").add(step)
    if row.width + 1 + len(whole) <= width:
        return [row.add(" ").add(whole, style).done(width)]
    texts = (f"{plain(tuple(row.runs))} {why}" for why in (brief, without_usual(brief)))
    first, *others = min((wrapped(text, style, width) for text in texts), key=len)
    if len(others) < most:
        return [row.add(plain(first)[row.width :], style).done(width), *others]
    if most == 1:
        return [row.add(" ").extend(named(view, cause_within(view, slowest, width - row.width - 1), style)).done(width)]
    return [row.done(width), *first_rows(whole, style, width, most - 1, "d: details")]


def first_token_row(view: View, width: int) -> Runs:
    """Returns the parts of the last time to first token, and their median."""
    t = view.timings
    first, median = t.first_token, t.median_first_ms
    row = Row("first token", "dim").to(LABEL)
    if first is None or median is None:
        return row.add("none yet", "dim").done(width)
    parts = f"queue {ms(first.queue_ms)} + prefill {ms(first.prefill_ms)}"
    took, request = f"{ms(first.total_ms)} ms", f" {view.texts.request(first.request)}"
    if row.width + len(took) + 3 + len(parts) > width:
        took = ms(first.total_ms)
        row = Row("first token ", "dim")
        if row.width + len(took) + 3 + len(parts) > width:
            row = Row("first ", "dim")
    row.add(took, "bold ink")
    if row.width + len(request) + len(parts) + 3 <= width:
        row.extend(named(view, request))
    row.add(" = ", "dim")
    for i, word in enumerate(parts.split(" ")):
        row.add(" " * bool(i) + word, "ink" if word[0].isdigit() else "dim")
    tail = f"  median of {'the last ' * (t.first_tokens >= RECENT_FIRST_TOKENS)}{t.first_tokens}: {ms(median)} ms"
    if row.width + len(tail) <= width:
        row.add(tail, "dim")
    return row.done(width)


def drafts_row(t: Timings, width: int) -> Runs:
    """Returns how many draft tokens were accepted."""
    row = Row("drafts", "dim").to(LABEL).add(f"{100 * t.accepted / t.drafted:.0f} %", "bold ink")
    row.add(f" of {t.drafted:,} accepted: ", "dim").add(f"{t.per_row:.1f}", "bold ink")
    tail = fitting(width - row.width, " tokens per row and step", " tokens per row", " per row", "")
    return row.add(tail, "dim").done(width)


def exchange_row(t: Timings, width: int) -> Runs:
    """Returns how long the ranks exchanged their parts."""
    row = Row("ranks", "dim").to(LABEL).add(f"{t.ranks}", "bold ink").add(", exchange ", "dim")
    row.add(f"{100 * t.comm_share:.0f} %", "bold ink").add(" of the time", "dim")
    for tail in (f": {ms(t.comm_ms)} ms per step", ", waiting included"):
        if row.width + len(tail) <= width:
            row.add(tail, "dim")
    return row.done(width)


def limit_rows(limits: tuple[OtherPrograms | Limit, ...], width: int, reasons: bool = False) -> list[Runs]:
    """Returns a row for each text about what limits the speed. `reasons`: a reason that has no room in its row has a
    row of its own."""
    rows = []
    for limit in limits:
        what, why = limit.told(width)
        rows.append(Row(what, "bold ink").add(why, "dim").done(width))
        if reasons and isinstance(limit, Limit) and limit.reason not in why and 2 + len(limit.reason) <= width:
            rows.append(Row(f"  {limit.reason}", "dim").done(width))
    return rows
