"""Events: each decision of the engine with its reason, the newest at the top. No two events share a row."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, ClassVar

from textual.binding import Binding

from minitui.trace.foreign import REMOVED
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import Opened, Picture, SearchPanel
from minitui.tui.widgets.rows import Row, Run, Runs, cells, clean, fit, named, whole_words
from minitui.viewmodel.history.events import EVENTS_KEPT, KINDS, PAGES, Event
from minitui.viewmodel.history.events import Events as EventLog
from minitui.viewmodel.view import View

REQUEST = re.compile(r"r(\d+)")
SCANNED = 2_000  # events whose text is searched in one picture; the next pictures search the others


class Search:
    """The events that contain every word of a query: "r12" names a request, "evict" a kind, other words a text. Reading
    all texts would take a second, so each call of `update` reads at most SCANNED of them."""

    def __init__(self, query: str, filter: Callable[[Event], bool], log: EventLog) -> None:
        self._log = log
        self._words = query.lower().split()
        self._filter = filter
        self._found: set[int] = set()  # seqs
        self._newest = -1  # seqs of the newest and the oldest event that were read
        self._oldest = sys.maxsize
        self.finished = False

    def update(self, view: View) -> None:
        """Read the new events, and some of the old ones."""
        read, newest = 0, self._newest
        for event in self._log.newest_first():
            if event.seq <= newest and (self.finished or event.seq >= self._oldest):
                if self.finished:
                    break
                continue
            if event.seq < self._oldest or newest < 0:
                read += 1
                if read > SCANNED:
                    break
                self._oldest = event.seq
            self._newest = max(self._newest, event.seq)
            if self._filter(event) and self._matches(view, event):
                self._found.add(event.seq)
        else:
            self.finished = True
        if len(self._found) > 2 * EVENTS_KEPT:
            self._found = {event.seq for event in self._log.newest_first() if event.seq in self._found}

    def _matches(self, view: View, event: Event) -> bool:
        text = ""
        for word in self._words:
            request = REQUEST.fullmatch(word)
            if request is not None:
                if event.request != int(request[1]):
                    return False
            elif word in KINDS:
                if event.kind != word:
                    return False
            else:
                lane = view.history.lanes.lanes.get(event.request)
                chat = view.texts.group_name(lane.request.group) if lane is not None else ""
                text = text or f"{event.kind} {view.texts.event(event)} {chat}"
                if word not in text.lower():
                    return False
        return True

    def __call__(self, event: Event) -> bool:
        return event.seq in self._found


STYLES = {
    "admit": "decode", "hit": "hit", "miss": "dim", "evict": "pool", "preempt": "bad", "finish": "dim",
    "wait": "waiting", "refuse": "bad", "fail": "bad", "pace": "accent", "lose": "pool", "take": "prefill",
    "borrow": "hit", "drop": "dim", "keep": "hit",
}
NARROW = 50  # cells; narrower panels show shorter texts
FILTERS = (
    ("all", ()),
    ("hits and misses", ("hit", "miss")),
    ("memory", ("evict", "lose", "preempt")),
    ("requests", ("admit", "finish", "wait", "refuse", "fail")),
    ("selected", ()),
    ("pages", PAGES),  # of side groups
)


def wrapped(words: str, width: int) -> list[str]:
    """Returns the text as lines of at most `width` cells, broken before a middle dot where possible."""
    lines: list[str] = []
    for part in words.replace(" · ", "\0· ").split("\0"):
        if lines and cells(lines[-1]) + 1 + cells(part) <= width:
            lines[-1] += " " + part
        else:
            lines += textwrap.wrap(part, width)
    return lines


class Events(SearchPanel):
    """Up and down choose an event and select its request or node, f and / filter, Enter opens the details."""

    TITLE = "Events"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "later", show=False, id="events.up"),
        Binding("down", "move(1)", "earlier", show=False, id="events.down"),
        Binding("pageup", "move(-10)", "later", show=False, id="events.pageup"),
        Binding("pagedown", "move(10)", "earlier", show=False, id="events.pagedown"),
        Binding("home", "latest", "the newest", show=False, id="events.latest"),
        Binding("f", "filter", "filter", show=False, id="events.filter", tooltip="hits, memory, requests, selected"),
        Binding("slash", "search", "search", show=False, id="events.search", tooltip="by request (r12), kind or words"),
        Binding("enter", "open", "details", show=False, id="events.open"),
    ]

    _search: Search | None = None
    _searched_for: tuple[Any, ...] = ()
    filter = 0  # index of the current filter in FILTERS
    chosen: int | None = None  # seq of the chosen event
    skip = 0  # number of newer events above the first row
    shown: Sequence[Event] = ()  # the events with a row
    _at: Sequence[Event] = ()  # the event of each row
    _whole = True  # False: the last event has more lines than there are rows

    def picture(self, view: View, width: int, height: int) -> Picture:
        name = FILTERS[self.filter][0]
        seq = view.moment.shown.state.seq
        digits = len(f"{max(1, view.history.steps.last):,}") + 1  # also of a step in flight
        self._stand(view)
        rows = self._rows(view, width, height, digits)
        near = self._log(view).tail(2 * height, seq, self._wanted(view), self.skip)
        while len(self.shown) > 1 and any(event.seq == self.chosen for event in near) and not self._in_sight:
            self.skip += 1
            rows = self._rows(view, width, height, digits)
        if not rows:
            none = "no events yet" if name == "all" else f"no events of this kind: {name}"
            if self._search is not None:
                none = f"no event contains {self.search!r}" if self._search.finished else "searching"
            rows = [Row(none, "dim").done(width)]
        note: list[Run] = [("show ", "dim"), (name, "ink"), *self.own_key("f · / search · enter details")]
        if searching := self.search_note():
            note = searching + [(f" in {name}", "dim")] * bool(self.filter)
        legend: list[Run] = [(f"step, event, reason · {self._log(view).count_to(seq):,} so far", "dim")]
        if self.skip:
            legend = [(f"{self.skip:,} newer above · Home", "accent")]
        return Picture(rows, note=note, legend=legend)

    def _stand(self, view: View) -> None:
        """Keep the first row while an event is chosen, although newer events arrive."""
        if self.chosen is None or not self.shown:
            return
        top, seq, wanted = self.shown[0].seq, view.moment.shown.state.seq, self._wanted(view)
        newer = takewhile(lambda event: event.seq > top, self._log(view).newest_first())
        self.skip = sum(event.seq <= seq and wanted(event) for event in newer)

    @property
    def _in_sight(self) -> bool:
        """True unless the chosen event is below the last row, or has more lines than are left there."""
        last, chosen = self.shown[-1].seq, self.chosen or 0
        return last < chosen or (last == chosen and self._whole)

    def _rows(self, view: View, width: int, height: int, digits: int) -> list[Runs]:
        """Returns the rows of the events that fit, and notes which these are."""
        rows: list[Runs] = []
        shown, at = [], []
        self._whole = True
        for event in self._log(view).tail(height, view.moment.shown.state.seq, self._wanted(view), self.skip):
            lines = self._lines(view, event, width, digits, height)
            room = height - len(rows)
            if not room:
                break
            if len(lines) > room:
                lines, self._whole = self._lines(view, event, width, digits, room), False
            rows += lines
            shown.append(event)
            at += [event] * len(lines)
        self.shown, self._at = shown, at
        return rows

    def _log(self, view: View) -> EventLog:
        return view.history.pages if FILTERS[self.filter][0] == "pages" else view.history.events

    def _wanted(self, view: View) -> Callable[[Event], bool]:
        """Returns the filter of the events that are shown."""
        if not self.search:
            self._search = None
            return self._by_kind(view)
        selection = view.selection if FILTERS[self.filter][0] == "selected" else None
        key = (self.search, self.filter, self._log(view), selection)
        if self._search is None or key != self._searched_for:
            self._searched_for, self._search = key, Search(self.search, self._by_kind(view), self._log(view))
        self._search.update(view)
        return self._search

    def _by_kind(self, view: View) -> Callable[[Event], bool]:
        name, kinds = FILTERS[self.filter]
        if name == "selected":
            requests, nodes = view.links.requests, view.links.nodes
            return lambda event: event.request in requests or event.node in nodes
        if kinds:
            return lambda event: event.kind in kinds
        return lambda event: True

    def _lines(self, view: View, event: Event, width: int, digits: int, most: int) -> list[Runs]:
        """Returns at most `most` rows with the event's text."""
        linked = event.request in view.links.requests or event.node in view.links.nodes
        chosen = event.seq == self.chosen
        fresh = view.moment.glow_of(event.record.t) == 2
        steps = view.history.steps
        unknown = event.raw[-1] == REMOVED or not steps.begin <= event.step <= steps.last  # of a KV event
        step = glyphs().dash if unknown else f"{event.step:,}"
        row = Row(step.rjust(digits), "dim").add("  ").add(event.kind.ljust(8), STYLES[event.kind])
        words = clean(view.texts.labelled(view.texts.event(event, short=width < NARROW)))
        quiet = event.kind in ("finish", "miss")
        style = "bold accent" if chosen else "bold ink" if fresh else "dim" if quiet else "ink"
        room = width - row.width
        # An eviction ends with a piece of the evicted text, which may be cut: a full pool evicts in every few steps.
        one_row = cells(words) <= room or (event.kind == "evict" and not chosen)
        pieces = [words] if one_row else wrapped(words, max(8, room))
        rows = []
        for number, piece in enumerate(pieces[:most]):
            cut = number == most - 1 < len(pieces) - 1  # there is no room for the next piece
            line = fit(whole_words(f"{piece} {glyphs().dots}" if cut else piece, max(0, room)), max(0, room))
            rows.append(row.extend(named(view, line, style)).done(width, "select" if linked else ""))
            row = Row().to(width - room)
        return rows

    # ---- selection and filters

    def clicked(self, view: View, column: int, row: int) -> None:
        if row < len(self._at):
            self._choose(view, self._at[row])

    def _choose(self, view: View, event: Event) -> None:
        self.chosen = event.seq
        if event.request >= 0 and event.request in view.history.lanes.lanes:
            view.select("request", event.request)
        elif event.node in view.moment.shown.state.nodes:
            view.select("node", event.node)
        elif event.step in view.history.steps:
            view.select("step", event.step)

    def action_move(self, by: int) -> None:
        view = self.view
        if not self.shown:
            return
        seqs = [event.seq for event in self.shown]
        at = seqs.index(self.chosen) + by if self.chosen in seqs else 0
        if at >= len(seqs):
            at = len(self._log(view).tail(at + 1, view.moment.shown.state.seq, self._wanted(view), self.skip)) - 1
            self.skip += max(0, at - len(seqs) + 1)
        elif at < 0:
            self.skip = max(0, self.skip + at)
        shown = self._log(view).tail(len(seqs), view.moment.shown.state.seq, self._wanted(view), self.skip)
        if shown:
            self._choose(view, shown[max(0, min(len(shown) - 1, at))])
            self.shown = shown

    def action_latest(self) -> None:
        self.skip, self.chosen = 0, None

    def action_filter(self) -> None:
        filters = len(FILTERS) - (not self.view.history.live.state.groups)  # the last is about side groups
        self.filter = (self.filter + 1) % filters
        self.skip, self.shown = 0, ()

    def searched(self) -> None:
        self.skip, self.shown = 0, ()

    def action_open(self) -> None:
        event = next((event for event in self.shown if event.seq == self.chosen), None)
        if event is None:
            return
        if event.request >= 0:
            self.post_message(Opened("request", event.request))
        elif event.node in self.view.moment.shown.state.nodes:
            self.post_message(Opened("node", event.node))
        else:
            self.post_message(Opened("step", event.step))
