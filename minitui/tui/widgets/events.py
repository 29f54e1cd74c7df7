"""Events: each decision of the engine with its reason, the newest at the top. No two events share a row."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding

from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Opened, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Run, Runs, cells, clean, fit
from minitui.viewmodel.model import Event, View

STYLES = {
    "admit": "decode", "hit": "hit", "miss": "dim", "evict": "pool", "preempt": "bad", "finish": "dim",
    "wait": "waiting", "refuse": "bad", "fail": "bad", "pace": "accent",
}  # fmt: skip
NARROW = 50  # cells; narrower panels show shorter texts
FILTERS = (
    ("all", ()),
    ("hits and misses", ("hit", "miss")),
    ("memory", ("evict", "preempt")),
    ("requests", ("admit", "finish", "wait", "refuse", "fail")),
    ("selected", ()),
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


class Events(LinePanel):
    """Up and down choose an event and select its request or node, f filters, Enter opens the details."""

    TITLE = "Events"
    help_text = paragraphs("""\
Every decision of the engine with its reason, the newest at the top: which request was admitted and how long it had
waited; how many tokens a prompt took from the tree, and why not all of them; which blocks were evicted and for which
request; which request was preempted; how each request finished. Choosing an event selects its request or node.""")
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "later", show=False, id="events.up"),
        Binding("down", "move(1)", "earlier", show=False, id="events.down"),
        Binding("pageup", "move(-10)", "later", show=False, id="events.pageup"),
        Binding("pagedown", "move(10)", "earlier", show=False, id="events.pagedown"),
        Binding("home", "latest", "the newest", show=False, id="events.latest"),
        Binding("f", "filter", "filter", show=False, id="events.filter", tooltip="hits, memory, requests, selected"),
        Binding("enter", "open", "details", show=False, id="events.open"),
    ]

    filter = 0  # index of the current filter in FILTERS
    chosen: int | None = None  # seq of the chosen event
    skip = 0  # number of newer events above the first row
    shown: Sequence[Event] = ()  # the events with a row
    _at: Sequence[Event] = ()  # the event of each row

    def picture(self, view: View, width: int, height: int) -> Picture:
        name = FILTERS[self.filter][0]
        seq = view.shown.state.seq
        digits = len(f"{max(1, view.horizon):,}") + 1
        rows: list[Runs] = []
        shown, at = [], []
        for event in view.events.tail(height, seq, self._wanted(view), self.skip):
            lines = self._lines(view, event, width, digits, height - len(rows))
            if not lines:
                break
            rows += lines
            shown.append(event)
            at += [event] * len(lines)
        self.shown, self._at = shown, at
        if not rows:
            rows = [Row("no events yet" if name == "all" else f"no events of this kind: {name}", "dim").done(width)]
        note = [("show ", "dim"), (name, "ink"), *self.own_key("f")]
        legend: list[Run] = [(f"step, event, reason · {view.events.count:,} so far", "dim")]
        if self.skip:
            legend = [(f"{self.skip:,} newer above · Home", "accent")]
        return Picture(rows, note=note, legend=legend)

    def _wanted(self, view: View) -> Callable[[Event], bool]:
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
        ground = " on select" if linked else ""
        fresh = view.glow_of(event.record[1]) == 2
        row = Row(f"{max(event.step, 0):,}".rjust(digits), "dim" + ground)
        row.add("  ", "ink" + ground).add(event.kind.ljust(8), STYLES[event.kind] + ground)
        words = clean(view.event_text(event, short=width < NARROW))
        quiet = event.kind in ("finish", "miss")
        style = "bold accent" if chosen else "bold ink" if fresh else "dim" if quiet else "ink"
        room = width - row.width
        pieces = [words] if cells(words) <= room else wrapped(words, max(8, room))
        rows = []
        for number, piece in enumerate(pieces[:most]):
            cut = number == most - 1 < len(pieces) - 1  # there is no room for the next piece
            line = fit(f"{piece} {glyphs().dots}" if cut else piece, max(0, room), glyphs().dots)
            rows.append(row.add(line, style + ground).done(width))
            row = Row().to(width - room, " ", "ink" + ground)
        return rows

    # ---- selection and filters

    def clicked(self, view: View, column: int, row: int) -> None:
        if row < len(self._at):
            self._choose(view, self._at[row])

    def _choose(self, view: View, event: Event) -> None:
        self.chosen = event.seq
        if event.request >= 0 and event.request in view.lanes.lanes:
            view.select("request", event.request)
        elif event.node in view.shown.state.nodes:
            view.select("node", event.node)
        elif event.step in view.steps:
            view.select("step", event.step)

    def action_move(self, by: int) -> None:
        view = self.view
        if not self.shown:
            return
        seqs = [event.seq for event in self.shown]
        at = seqs.index(self.chosen) + by if self.chosen in seqs else 0
        if at >= len(seqs):
            self.skip += at - len(seqs) + 1
        elif at < 0:
            self.skip = max(0, self.skip + at)
        shown = view.events.tail(len(seqs), view.shown.state.seq, self._wanted(view), self.skip)
        if shown:
            self._choose(view, shown[max(0, min(len(shown) - 1, at))])
        self.repaint()

    def action_latest(self) -> None:
        self.skip, self.chosen = 0, None
        self.repaint()

    def action_filter(self) -> None:
        self.filter = (self.filter + 1) % len(FILTERS)
        self.skip = 0
        self.repaint()

    def action_open(self) -> None:
        event = next((event for event in self.shown if event.seq == self.chosen), None)
        if event is None:
            return
        if event.request >= 0:
            self.post_message(Opened("request", event.request))
        elif event.node in self.view.shown.state.nodes:
            self.post_message(Opened("node", event.node))
        else:
            self.post_message(Opened("step", event.step))
