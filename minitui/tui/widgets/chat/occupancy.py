"""Small panels for the chat: how full is the pool, and where did the tokens of a prompt come from?"""

from __future__ import annotations

from engine.trace.state import State
from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from engine.trace.waste import WasteFigures
from minitui.text import count, duration, short
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, fitting, runs_width, wrapped
from minitui.viewmodel.explain.cut_hits import again_ms, served, why_ended
from minitui.viewmodel.state.annotated_state import STATE_NAMES, AnnotatedState
from minitui.viewmodel.state.side_groups import Strip, strips
from minitui.viewmodel.view import View


class PromptOrigin(LinePanel, can_focus=False):
    """Shows the prompt of the selected request, else of the newest running request, else of the last finished one."""

    TITLE = "Prompt: cached or computed"
    NEEDS_STATE = True

    def picture(self, view: View, width: int, height: int) -> Picture:
        id = view.subject()
        if id is None and view.selection is not None:
            known = [request for request in view.links.requests if request in view.history.lanes.lanes]
            id = max(known, default=None)
        lane = view.history.lanes.lanes.get(id) if id is not None else None
        if lane is None:
            return Picture([Row("no request yet", "dim").done(width)])
        prompt, (stop, at, detail) = max(1, lane.request.prompt_tokens), lane.request.match
        # A preempted request computes its prompt again: without `min`, the bar would be longer than the prompt.
        cached = lane.request.cached_tokens
        computed = min(lane.computed_tokens, prompt - cached)
        waiting = prompt - cached - computed
        g = glyphs()
        cells = [round(n * width / prompt) for n in (cached, computed)]
        row = Row(g.busy * cells[0], "hit").add(g.prefill * cells[1], "prefill")
        row.to(width, g.unused, "faint")
        rest = f" · {computed:,} computed", f" · {waiting:,} left" if waiting > 0 else ""
        found = fitting(width - sum(map(len, rest)), f"{cached:,} from the tree", f"{cached:,} cached")
        words = Row(found, "hit").add(rest[0][:3], "dim").add(rest[0][3:], "prefill").add(rest[1], "dim")
        rows = [row.done(width), words.done(width)]
        if stop:
            why = why_ended(view.history, lane, stop, at, cached, detail)
            rows += wrapped(why, "dim", width)
            names = [pool.group.name for pool in view.moment.shown.state.groups]
            if groups := _served_rows(served(names, lane.request), prompt, width):
                if len(rows) + len(groups) <= height:
                    rows[2:2] = groups
                elif len(groups) + 2 <= height:  # the bars have the numbers of the sentence
                    again = again_ms(view.history, lane, at, cached)
                    took = "" if again is None else f", {duration(again)}"
                    last = f"{count(at - cached, 'token')} computed again{took}"
                    rows = [*groups, words.done(width), Row(last, "dim").done(width)]
        return Picture(rows[:height])


def _served_rows(found: list[tuple[str, int, bool]], prompt: int, width: int) -> list[Runs]:
    """Returns a bar for each group of a hit that a side group cut: the tokens of the prompt that it has."""
    names, digits = max((len(name) for name, *_ in found), default=0), len(f"{prompt:,}") + 2
    room, g = max(4, width - names - digits - 2), glyphs()
    rows = []
    for name, tokens, exact in found:
        row = Row(name.ljust(names + 1), "dim").add(g.busy * round(tokens * room / prompt), "hit")
        row.to(names + 1 + room, g.unused, "faint")
        rows.append(row.right(f"{'' if exact else '>='}{tokens:,}", width, "ink").done(width))
    return rows


ORDER = (ACTIVE, SHARED, CACHED, FREE)
MIN_BAR = 8  # cells


def look(code: int) -> Run:
    """Returns the sign of a block state and its style: cached and shared blocks have a sign on a solid fill."""
    name = STATE_NAMES[code]
    return getattr(glyphs(), name), f"on-fill on {name}" if code in (SHARED, CACHED) else name


def shares(counts: tuple[int, int, int, int], width: int) -> dict[int, int]:
    """Returns {state: its number of cells in the bar}, `width` cells in total. The cells are in proportion to the
    blocks, but a state with any blocks has at least one cell."""
    total = sum(counts)
    if total == 0 or width < 4:
        return {FREE: width, ACTIVE: 0, SHARED: 0, CACHED: 0}
    exact = {code: counts[code] * width / total for code in ORDER}
    out = {code: max(int(exact[code]), 1 if counts[code] else 0) for code in ORDER}
    by_remainder = sorted(ORDER, key=lambda code: exact[code] - out[code], reverse=True)
    i = 0
    while sum(out.values()) < width:
        out[by_remainder[i % 4]] += 1
        i += 1
    while sum(out.values()) > width:
        out[max(out, key=lambda code: out[code])] -= 1
    return out


def bar(shown: AnnotatedState | Strip, width: int) -> list[Run]:
    """Returns a bar of `width` cells with four parts: active, shared, cached, free."""
    cells = shares(shown.counts, width)
    looks = {code: look(code) for code in ORDER if cells[code]}
    return [(sign * cells[code], style) for code, (sign, style) in looks.items()]


def entries(shown: AnnotatedState | Strip) -> list[list[Run]]:
    """Returns an entry for each state: its glyph, its name and its number of blocks."""
    return [[look(code), (f" {STATE_NAMES[code]} ", "dim"), (f"{shown.counts[code]:,}", "ink")] for code in ORDER]


def legend(shown: AnnotatedState | Strip) -> list[Run]:
    """Returns the entries as the runs of one line."""
    return [run for entry in entries(shown) for run in (*entry, ("  ", "ink"))]


def lead(shown: AnnotatedState | Strip, name: str = "KV pool") -> Row:
    """Returns the label before the bar: the share of the pool that is not free."""
    share = 1 - shown.counts[FREE] / max(1, shown.total)
    percent = f"{100 * share:.0f}" if not 0 < share < 0.01 else "<1"
    return Row(f"{name} ", "dim").add(f"{percent} % ", "bold ink")


def strip_rows(state: State, width: int) -> list[Runs]:
    """Returns a row for each group of a model with several kinds of memory, with a bar and the numbers of its pages;
    empty for other models."""
    found = strips(state)
    names = max((len(strip.name) for strip in found), default=0)
    heads = [lead(strip, strip.name.ljust(names)).to(names + 7) for strip in found]
    ways = [  # from the longest to the shortest, each for all groups
        [[*legend(strip), (f"of {count(strip.total, strip.unit)}", "dim")] for strip in found],
        [[*_figures(strip), (f"of {strip.total:,}", "dim")] for strip in found],
        [[(f"{strip.total - strip.counts[FREE]:,}/{strip.total:,}", "ink")] for strip in found],
    ]
    room = width - names - 8 - MIN_BAR
    words = next((way for way in ways if max(map(runs_width, way), default=0) <= room), ways[-1])
    return [_pool_row(strip, head, width, text) for strip, head, text in zip(found, heads, words, strict=True)]


def _figures(shown: AnnotatedState | Strip) -> list[Run]:
    """Returns the number of blocks of each state, without its name."""
    return [run for code in ORDER for run in (look(code), (f" {shown.counts[code]:,} ", "ink"))]


def _pool_row(shown: AnnotatedState | Strip, head: Row, width: int, *words: list[Run]) -> Runs:
    """Returns a row with `head`, a bar, and the first of `words` that leaves room for the bar, else the last."""
    room = width - head.width - 1
    chosen = next((runs for runs in words if room - runs_width(runs) >= MIN_BAR), words[-1])
    return head.extend(bar(shown, max(4, room - runs_width(chosen)))).add(" ").extend(chosen).done(width)


def side_strips(state: State, width: int) -> Runs:
    """Returns one row with a small bar for each side group of a model with several kinds of memory."""
    found = strips(state)[1:]
    texts = [f" {strip.total - strip.counts[FREE]:,}/{strip.total:,} " for strip in found]
    room = width - sum(len(strip.name) + 1 + len(text) for strip, text in zip(found, texts, strict=True))
    row = Row()
    for strip, text in zip(found, texts, strict=True):
        row.add(f"{strip.name} ", "dim")
        if (cells := min(2 * MIN_BAR, room // len(found))) >= 4:
            row.extend(bar(strip, cells))
        row.add(text)
    return row.done(width)


def waste_words(waste: WasteFigures, room: int, recomputed: int = 0) -> str:
    """Returns the figures in the longest wording that has at most `room` characters, else in the shortest. If tokens
    computed twice are not recorded, only the tokens `recomputed` by the known preempted requests are known."""
    again = waste.again
    if again is None:
        total, why = recomputed, " after preemptions, others unknown"
    else:
        figures = (again.evicted, "evicted"), (again.preempted, "preempted"), (again.duplicate, "duplicate")
        total = sum(tokens for tokens, _ in figures)
        why = ": " * bool(total) + ", ".join(f"{tokens:,} {name}" for tokens, name in figures if tokens)
    twice = f"{count(total, 'token')} computed twice"
    slots = count(waste.unused_slots, "empty slot")
    share = f" ({100 * waste.unused_slots / waste.slots:.0f} %)" if waste.unused_slots else ""
    copies = "copies unknown" if waste.copies is None else f"{waste.copies:,} cop{'y' if waste.copies == 1 else 'ies'}"
    few = "– copies" if waste.copies is None else copies
    wordings = (
        f"{slots}{share} in blocks of requests, {copies}; since the start, {twice}{why}",
        f"{slots}{share}, {copies}; {twice}{why}",
        f"{slots}, {copies}; {twice}{why}",
        f"{slots}, {copies}; {twice}",
        f"{short(waste.unused_slots)} empty slots, {copies}; {short(total)} computed twice",
        f"{short(waste.unused_slots)} empty, {few}, {short(total)} twice",
    )
    return next((words for words in wordings if len(words) <= room), wordings[-1])


def waste(view: View, width: int) -> Row:
    """Returns the row about the waste."""
    lead = "waste: "
    return Row(lead, "dim").add(waste_words(view.waste, width - len(lead), view.recomputed), "dim")


class Occupancy(LinePanel, can_focus=False):
    """The bar and the numbers of blocks in one line, and the waste, or the pools of side groups, in a second line, for
    small screens."""

    FRAME = "none"
    NEEDS_STATE = True
    DEFAULT_CSS = "Occupancy { height: 2; }"

    def picture(self, view: View, width: int, height: int) -> Picture:
        shown = view.moment.shown
        of = (f"of {shown.total:,}", "dim")
        pool = _pool_row(shown, lead(shown), width, [*legend(shown), of], legend(shown), _figures(shown))
        below = side_strips(shown.state, width) if shown.state.groups else waste(view, width).done(width)
        return Picture([pool, below])
