"""Requests: how fast is each request, and which one stalled? A row is a request, running or finished recently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from textual.binding import Binding

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import owner_style
from minitui.tui.widgets.base import LinePanel, Picture, Thing, neighbour, selected
from minitui.tui.widgets.inspect.timeline import TimelineOpened
from minitui.tui.widgets.rows import Row, Run, Runs, clean, first_rows, fit
from minitui.viewmodel.explain.stalls import Reason, explain_gap, gap_words
from minitui.viewmodel.requests import RequestFigures, Requests, by_longest_gap, by_longest_wait, longest
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import as_long, first_token_words, why_first

Value = float | str | None


@dataclass(frozen=True, slots=True)
class Heading:
    """A column. `rank`: columns with the lowest rank get their place first. Numbers are aligned to the right."""

    name: str
    width: int
    rank: int
    value: Callable[[RequestFigures], Value]
    text: Callable[[Value], str] = lambda value: f"{value:,}"
    words: bool = False


def _ms(value: Value) -> str:
    return ms(float(value or 0.0))


COLUMNS = (
    Heading("request", 9, 0, lambda row: row.id, lambda value: f"r{value}", words=True),
    Heading("state", 10, 0, lambda row: row.state, str, words=True),
    Heading("chat", 14, 6, lambda row: row.request.group, words=True),  # the picture shows the name of the group
    Heading("prompt", 7, 1, lambda row: row.request.prompt_tokens),
    Heading("cached", 7, 1, lambda row: row.request.cached_tokens),
    Heading("queue", 8, 3, lambda row: row.queue_ms, _ms),
    Heading("prefill", 8, 3, lambda row: row.prefill_ms, _ms),
    Heading("first", 7, 1, lambda row: row.first_so_far_ms, _ms),
    Heading("tokens", 7, 5, lambda row: row.gaps.tokens if row.gaps is not None else None),
    Heading("p50", 7, 2, lambda row: row.gaps.p50 if row.gaps is not None else None, _ms),
    Heading("p99", 7, 1, lambda row: row.gaps.p99 if row.gaps is not None else None, _ms),
    Heading("longest", 8, 0, lambda row: row.longest.ms if row.longest is not None else None, _ms),
    Heading("tok/s", 7, 2, lambda row: row.gaps.tok_s if row.gaps is not None else None, lambda value: f"{value:,.0f}"),
    Heading("blocks", 7, 2, lambda row: row.blocks),
    Heading("preempt", 8, 3, lambda row: row.request.preemptions),
    Heading("twice", 7, 4, lambda row: row.recomputed_tokens),
    Heading("reused", 7, 4, lambda row: row.reused_tokens),
    Heading("evicted", 8, 6, lambda row: row.after_evictions),
)


STATES = {"decode": "decode", "prefill": "prefill", "waits": "waiting", "preempted": "bad", "error": "bad"}
WHY_FROM = 24  # cells; a narrower column of causes is left out
FOOT = 3  # rows for the longest gap and the longest wait for a first token in words; a narrow panel has two more
FIRST = 2  # of these rows, the most for the first token
NARROW = 160  # cells


def _cause(reason: Reason, width: int) -> str:
    """Returns the cause of a gap; without what is in parentheses if the whole text does not fit."""
    whole = str(reason)
    if len(whole) <= width or not reason.causes:
        return whole
    return str(replace(reason, causes=tuple(replace(c, name=c.name.partition(" (")[0]) for c in reason.causes)))


def _so_far(figures: RequestFigures, column: str) -> bool:
    """True if the figure of this column still grows: the request waits for its first token, or for its next one."""
    if column == "longest":
        return figures.longest is not None and figures.longest.so_far
    return figures.waits_ms is not None and (column == "first" or (column == "queue" and figures.state == "waits"))


class RequestTable(LinePanel):
    """Up and down choose a request, left and right sort by another column, Enter opens the timeline."""

    TITLE = "Requests"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("up", "choose(-1)", "request above", show=False, id="requests.up"),
        Binding("down", "choose(1)", "request below", show=False, id="requests.down"),
        Binding("pageup", "choose(-10)", "ten lines up", show=False, id="requests.pageup"),
        Binding("pagedown", "choose(10)", "ten lines down", show=False, id="requests.pagedown"),
        Binding("home", "choose(-100000)", "first line", show=False, id="requests.first"),
        Binding("left", "sort(-1)", "sort by the column before", show=False, id="requests.left"),
        Binding("right", "sort(1)", "sort by the next column", show=False, id="requests.right"),
        Binding("s", "reverse", "reverse the order", show=False, id="requests.reverse"),
        Binding("l", "longest", "the longest gap", show=False, id="requests.longest"),
        Binding("enter", "open", "timeline", show=False, id="requests.open"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.sorted_by = 0  # index in COLUMNS
        self.descending = True
        self.top = 0
        self.rows: list[RequestFigures] = []  # in the order of the picture
        self._requests = Requests()
        self._shown: list[RequestFigures] = []
        self._ends: list[tuple[int, int]] = []  # (index of a column in COLUMNS, where it ends)

    def picture(self, view: View, width: int, height: int) -> Picture:
        self.rows = self._in_order(view)
        foot = FOOT + 2 * (width < NARROW) if height >= 9 else 0
        room = max(1, height - 1 - foot)
        self._scroll(view, room)
        self._shown = self.rows[self.top : self.top + room]
        columns = self._columns(width)
        used = sum(COLUMNS[index].width for index in columns)
        why = width - used - 2 if width - used - 2 >= WHY_FROM else 0
        worst, stalled = self._worst
        waited, waiting = longest((row for row in self.rows if row.first_so_far_ms is not None), by_longest_wait)
        rows = [self._head(columns, why, width)]
        rows += [self._row(view, row, columns, why, width, row.id in stalled, row.id in waiting) for row in self._shown]
        if not self.rows:
            rows.append(Row("no requests yet", "dim").done(width))
        if foot:
            rows += [Row().done(width)] * (height - foot - len(rows))
            rows += self._foot(view, worst, stalled, waited, waiting, width, foot)
        live = sum(row.live for row in self.rows)
        note: list[Run] = [(f"{live:,} live, {len(self.rows) - live:,} finished", "ink")]
        note += self.own_key("← → sort · l longest · enter timeline")
        below = len(self.rows) - self.top - len(self._shown)
        more: list[Run] = [(f"{self.top:,} above, {below:,} below · ", "dim")] if self.top or below > 0 else []
        return Picture(rows, note=note, legend=[*more, ("times in ms", "dim")])

    def _in_order(self, view: View) -> list[RequestFigures]:
        """Returns the rows in the order of the chosen column; rows without a value come last."""
        rows = self._requests.figures(view, {row.id for row in self._shown})
        column = COLUMNS[self.sorted_by]
        known = [row for row in rows if column.value(row) is not None]
        known.sort(key=lambda row: column.value(row), reverse=self.descending)  # type: ignore[arg-type,return-value]
        return known + [row for row in rows if column.value(row) is None]

    def _scroll(self, view: View, room: int) -> None:
        """Keep the selected request among the rows that are shown."""
        at = self._chosen(view)
        if at is not None:
            self.top = min(max(self.top, at - room + 1), at)
        self.top = max(0, min(self.top, len(self.rows) - room))

    def _chosen(self, view: View) -> int | None:
        chosen = selected(view, "request")
        return next((i for i, row in enumerate(self.rows) if row.id == chosen), None)

    @property
    def _worst(self) -> tuple[RequestFigures | None, list[int]]:
        """The request with the longest gap of all, and the requests with a gap as long."""
        return longest((row for row in self.rows if row.longest is not None), by_longest_gap)

    def _columns(self, width: int) -> list[int]:
        """Returns the indices of the columns that fit."""
        by_rank = sorted(range(len(COLUMNS)), key=lambda i: (i != self.sorted_by, COLUMNS[i].rank))
        shown, left = [], width
        for index in by_rank:
            if COLUMNS[index].width <= left:
                shown.append(index)
                left -= COLUMNS[index].width
        return sorted(shown)

    def _head(self, columns: list[int], why: int, width: int) -> Runs:
        row, end, self._ends = Row(), 0, []
        for index in columns:
            column = COLUMNS[index]
            end += column.width
            self._ends.append((index, end))
            sign = (glyphs().unfolded if self.descending else glyphs().peak) if index == self.sorted_by else ""
            style = "bold accent" if index == self.sorted_by else "dim"
            if column.words:
                row.add(sign + column.name, style).to(end)
            else:
                row.right(sign + column.name, end, style)
        if why:
            row.add("  cause of the longest gap", "dim")
        return row.done(width)

    def _row(
        self, view: View, figures: RequestFigures, columns: list[int], why: int, width: int, worst: bool, waited: bool
    ) -> Runs:
        row, end = Row(), 0
        for index in columns:
            column = COLUMNS[index]
            end += column.width
            value = column.value(figures)
            style = "ink" if figures.live else "dim"
            if column.name == "chat":
                row.add(fit(clean(view.texts.title(figures.request.group)), column.width - 1, glyphs().dots), style)
            elif column.words:
                text = column.text(value)
                if column.name == "state":
                    style = STATES.get(figures.state, "dim")
                elif column.name == "request":
                    label = view.texts.request(figures.id)
                    text = label if len(label) < column.width else text
                    style = ("bold " if figures.live else "") + owner_style(view.texts.colour(figures.request.group))
                row.add(fit(text, column.width - 1, glyphs().dots), style)
            else:
                text = glyphs().dash if value is None else column.text(value) + "+" * _so_far(figures, column.name)
                if value is not None and ((worst and column.name == "longest") or (waited and column.name == "first")):
                    style = "bold bad"
                row.right(text, end, style)
            row.to(end)
        if why:
            gap = figures.longest
            so_far = "so far: " if gap is not None and gap.so_far else ""
            text = so_far + _cause(explain_gap(view, figures.lane, gap), why - len(so_far)) if gap is not None else ""
            row.add("  " + fit(text, why, glyphs().dots), "dim")
        return row.done(width, "select" if figures.id in view.links.requests else "")

    def _foot(
        self, view: View, worst: RequestFigures | None, stalled: list[int], waited: RequestFigures | None,
        waiting: list[int], width: int, height: int,
    ) -> list[Runs]:
        """Returns the longest gap and the longest wait for a first token in words: of the selected request; without a
        selection, of all requests. `stalled`, `waiting`: the requests with a gap and a wait as long as the longest."""
        at = self._chosen(view)
        row = worst if at is None else self.rows[at]
        first = self._first_token(view, waited if at is None else self.rows[at], waited, waiting, width)
        gap = row.longest if row is not None else None
        if row is None or gap is None:
            none = [Row("no gap between two tokens yet", "dim").done(width), *first]
            return none + [Row().done(width)] * (height - len(none))
        whose = f"the longest gap of all{as_long(len(stalled) - 1)}"
        if row.id not in stalled and worst is not None and worst.longest is not None:
            whose = f"its longest gap (of all: r{worst.id} with {ms(worst.longest.ms)} ms)"
        text = view.texts.labelled(f"r{row.id}, {whose}: {gap_words(view, row.lane, gap)}")
        lines = [*first_rows(text, "ink", width, height - len(first), "enter: all"), *first]
        return lines + [Row().done(width)] * (height - len(lines))

    @staticmethod
    def _first_token(
        view: View, row: RequestFigures | None, waited: RequestFigures | None, waiting: list[int], width: int
    ) -> list[Runs]:
        """Returns the rows about the first token of a request. `waited`: the request that waited longest for its,
        `waiting`: those that waited as long."""
        if row is None or row.first_so_far_ms is None or waited is None:
            return []
        words = first_token_words(row, why_first(view, row))
        text = f"r{row.id}, the longest wait for a first token{as_long(len(waiting) - 1)}: {words}"
        if row.id not in waiting:
            so_far = " so far" * (waited.first_ms is None)
            longest = f" (longest: r{waited.id} with {ms(waited.first_so_far_ms or 0.0)} ms{so_far})"
            text = f"r{row.id}, its first token{longest}: {words}"
        return first_rows(view.texts.labelled(text), "ink", width, FIRST, "enter: all")

    # ---- keys and the mouse

    def pointed(self, view: View, column: int, row: int) -> Thing | None:
        return ("request", self._shown[row - 1].id) if 0 < row <= len(self._shown) else None

    def clicked(self, view: View, column: int, row: int) -> None:
        here = self.pointed(view, column, row)
        if row == 0:
            found = next((index for index, end in self._ends if column < end), None)
            if found is not None:
                self._sort_by(found)
        elif here is not None and here[1] == selected(view, "request"):
            self.action_open()
        else:
            super().clicked(view, column, row)

    def _sort_by(self, index: int) -> None:
        """Sort by a column: numbers from the largest, words from a to z; again: in reverse."""
        words = COLUMNS[index].words and index > 0
        self.descending = not self.descending if index == self.sorted_by else not words
        self.sorted_by = index
        self.top = 0

    def action_sort(self, by: int) -> None:
        self._sort_by((self.sorted_by + by) % len(COLUMNS))

    def action_reverse(self) -> None:
        self._sort_by(self.sorted_by)

    def action_choose(self, by: int) -> None:
        if self.rows:
            ids = [row.id for row in self.rows]
            self.view.select("request", neighbour(ids, selected(self.view, "request"), by, self.top))

    def action_longest(self) -> None:
        if (worst := self._worst[0]) is not None:
            self.view.select("request", worst.id)

    def action_open(self) -> None:
        """Open the timeline of the selected request; without a selection, of the one that the foot names."""
        if self._chosen(self.view) is None:
            self.action_longest()
        if self._chosen(self.view) is None and self._shown:
            self.view.select("request", self._shown[0].id)
        self.post_message(TimelineOpened())
