"""Events: each decision and the engine's reason for it, the newest on top; never merged."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding

from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Opened, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Run, Runs, cells, clean, fit
from minitui.viewmodel.model import Event, View

STYLES = {
    "admit": "decode", "hit": "hit", "miss": "dim", "evict": "pool", "preempt": "bad", "finish": "dim",
    "wait": "waiting", "refuse": "bad", "fail": "bad", "pace": "accent",
}  # fmt: skip
NARROW = 50  # below, events are told in few words
FILTERS = (
    ("all", ()),
    ("hits and misses", ("hit", "miss")),
    ("memory", ("evict", "preempt")),
    ("requests", ("admit", "finish", "wait", "refuse", "fail")),
    ("selected", ()),
)


def broken(words: str, width: int) -> list[str]:
    """In lines of at most `width` cells, rather between the parts that dots set off than within one."""
    lines: list[str] = []
    for part in words.replace(" · ", "\0· ").split("\0"):
        if lines and cells(lines[-1]) + 1 + cells(part) <= width:
            lines[-1] += " " + part
        else:
            lines += textwrap.wrap(part, width)
    return lines


class Events(LinePanel):
    """Up and down choose an event (and with it its request or node), f filters, Enter tells the story."""

    TITLE = "Events"
    help_text = paragraphs("""\
Every decision of the engine with its reason, the newest on top, never summed up: who was admitted and how long it had
waited; what a prompt took from the tree and why not more; what was evicted and for whom; who was preempted; how each
request ended. The event under the cursor selects what it is about.""")
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "later", show=False, id="events.up"),
        Binding("down", "move(1)", "earlier", show=False, id="events.down"),
        Binding("pageup", "move(-10)", "later", show=False, id="events.pageup"),
        Binding("pagedown", "move(10)", "earlier", show=False, id="events.pagedown"),
        Binding("home", "latest", "the newest", show=False, id="events.latest"),
        Binding("f", "filter", "filter", show=False, id="events.filter", tooltip="all, hits, memory, requests, one"),
        Binding("enter", "open", "tell its story", show=False, id="events.open"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None, compact: bool = False) -> None:
        super().__init__(id=id, frame=frame)
        self.filter = 0
        self.chosen: int | None = None  # seq of the event under the cursor
        self.skip = 0
        self.shown: list[Event] = []
        self._at: list[Event] = []  # whose row each is
        self.compact = compact

    def picture(self, view: View, width: int, height: int) -> Picture:
        name = FILTERS[self.filter][0]
        seq = view.board.state.seq
        digits = len(f"{max(1, view.horizon):,}") + 1
        rows: list[Runs] = []
        self.shown, self._at = [], []
        for event in view.events.tail(height, seq, self._wanted(view), self.skip):
            lines = self._lines(view, event, width, digits, height - len(rows))
            if not lines:
                break
            rows += lines
            self.shown.append(event)
            self._at += [event] * len(lines)
        if not rows:
            rows = [Row("nothing has happened yet" if name == "all" else f"no event among: {name}", "dim").done(width)]
        note: list[Run] = []
        if not self.compact:
            note = [("show ", "dim"), (name, "ink"), *self.own_key("f")]
        legend: list[Run] = [(f"step, what, why · {view.events.count:,} so far", "dim")]
        if self.skip:
            legend = [(f"{self.skip:,} newer above · Home", "accent")]
        return Picture(rows, title="Lately" if self.compact else "Events", note=note, legend=legend)

    def _wanted(self, view: View) -> Callable[[Event], bool]:
        name, kinds = FILTERS[self.filter]
        if name == "selected":
            requests, nodes = view.links.requests, view.links.nodes
            return lambda event: event.request in requests or event.node in nodes
        if kinds:
            return lambda event: event.kind in kinds
        return lambda event: True

    def _lines(self, view: View, event: Event, width: int, digits: int, most: int) -> list[Runs]:
        """One row, or as many as its words need, but no more than `most`."""
        lit = event.request in view.links.requests or event.node in view.links.nodes
        here = event.seq == self.chosen
        ground = " on select" if lit else ""
        fresh = view.glow_of(event.record[1]) == 2
        row = Row(f"{max(event.step, 0):,}".rjust(digits), "dim" + ground)
        row.add("  ", "ink" + ground).add(event.kind.ljust(8), STYLES[event.kind] + ground)
        words = clean(view.event_text(event, short=width < NARROW))
        quiet = event.kind in ("finish", "miss")
        style = "bold accent" if here else "bold ink" if fresh else "dim" if quiet else "ink"
        room = width - row.width
        pieces = [words] if cells(words) <= room else broken(words, max(8, room))
        rows = []
        for number, piece in enumerate(pieces[:most]):
            cut = number == most - 1 < len(pieces) - 1  # the panel ends here
            told = fit(f"{piece} {glyphs().dots}" if cut else piece, max(0, room), glyphs().dots)
            rows.append(row.add(told, style + ground).done(width))
            row = Row().to(width - room, " ", "ink" + ground)
        return rows

    # ---- moving about

    def clicked(self, view: View, column: int, row: int) -> None:
        if row < len(self._at):
            self._choose(view, self._at[row])

    def _choose(self, view: View, event: Event) -> None:
        self.chosen = event.seq
        if event.request >= 0 and event.request in view.lanes.lanes:
            view.select("request", event.request)
        elif event.node in view.board.state.nodes:
            view.select("node", event.node)
        elif event.step in view.steps:
            view.select("step", event.step)

    def action_move(self, by: int) -> None:
        view = self.view
        if view is None or not self.shown:
            return
        seqs = [event.seq for event in self.shown]
        at = seqs.index(self.chosen) + by if self.chosen in seqs else 0
        if at >= len(seqs):
            self.skip += at - len(seqs) + 1
        elif at < 0:
            self.skip = max(0, self.skip + at)
        shown = view.events.tail(len(seqs), view.board.state.seq, self._wanted(view), self.skip)
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
        view = self.view
        event = next((event for event in self.shown if event.seq == self.chosen), None)
        if view is None or event is None:
            return
        if event.request >= 0:
            self.post_message(Opened("request", event.request))
        elif event.node in view.board.state.nodes:
            self.post_message(Opened("node", event.node))
        else:
            self.post_message(Opened("step", event.step))
