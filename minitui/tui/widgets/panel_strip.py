"""The strip of panels: on a small terminal, which shows one panel at a time, it says which others there are."""

from __future__ import annotations

from collections.abc import Mapping

from textual.message import Message

from minitui.tui.widgets.bars import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row
from minitui.viewmodel.view import View


class PanelChosen(Message):
    """A panel of the strip was clicked."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class PanelStrip(Bar):
    """One word for each panel, the current one in brackets, and what there is to see in it. A click on a word shows its
    panel."""

    SHOWS_ITSELF = False
    names: tuple[str, ...] = ()
    current = ""
    marks: Mapping[str, str] = {}  # of the panels that have something to see: a stall, an eviction

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._places: list[tuple[int, int, str]] = []  # (start, end, name)

    def show(self, names: tuple[str, ...], current: str) -> None:
        """Show these panels."""
        self.names, self.current = names, current
        self.repaint()

    def picture(self, view: View, width: int, height: int) -> Picture:
        words = {name: "blocks" if name == "map" else name for name in self.names}
        names, marks = list(self.names), self.marks
        while len(names) > 1 and sum(len(words[name]) + len(marks.get(name, "")) + 2 for name in names) > width:
            del names[0 if names[-1] == self.current else -1]  # the current panel is always named
        row = Row()
        self._places = []
        for name in names:
            start = row.width
            if name == self.current:
                row.add(f"[{words[name]}]", "bold accent")
            else:
                row.add(f" {words[name]} ", "dim")
            row.add(marks.get(name, ""), "bold on-fill on bad")
            self._places.append((start, row.width, name))
        return Picture([row.done(width)])

    def clicked(self, view: View, column: int, row: int) -> None:
        for start, end, name in self._places:
            if start <= column < end:
                self.post_message(PanelChosen(name))
