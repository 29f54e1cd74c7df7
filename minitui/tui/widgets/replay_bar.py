"""The bar of a recording: the moment that is shown, the speed, and the bookmarks."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from minitui.sources.replay import ReplaySource
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.bars import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row
from minitui.viewmodel.view import View

KEYS = (  # the keys of the bar, for wide and for narrow terminals
    " , . step  B E begin, end  < > speed  ( ) jump  { } marks  m mark ",
    " , . step  B E begin, end  < > speed ",
    " B begin  E end ",
)


def position(view: View, replay: ReplaySource) -> int:
    """Returns the step that the panels show."""
    return view.moment.horizon if view.moment.exact and view.moment.horizon >= 0 else replay.step


class ReplayBar(Bar):
    """The moment that is shown, the speed of the replay, and the bookmarks. A click on the line moves the playhead."""

    @dataclass
    class Clicked(Message):
        """Asks the application to show the recording at the end of a step."""

        step: int

    _places: range = range(0)  # the columns of the line

    @property
    def _replay(self) -> ReplaySource:
        assert isinstance(self.app.source, ReplaySource)
        return self.app.source

    def picture(self, view: View, width: int, height: int) -> Picture:
        source, step = self._replay, position(view, self._replay)
        if source.reader is None:
            return Picture([Row(" reading the recording", "dim").done(width)])
        trace = source.trace
        if step >= trace.last_step and (source.paused or source.ended):
            state = "end" if trace.complete else "cut off here"  # the end of the file is missing
        elif source.until:
            state = f"plays until the next {'slow step' if source.until == 'slow' else source.until}"
        else:
            state = "paused" if source.paused else f"plays {glyphs().times}{source.speed:g}"
        row = Row(f" REPLAY {state} ", "bold on-fill on running").add(" ")
        seconds = trace.end_t - trace.begin_t
        now = max(0.0, min(view.moment.picture_now - trace.begin_t, seconds))
        row.add(f"{now:,.1f}", "bold ink").add(f" of {seconds:,.1f} s  ", "dim")
        first, last = trace.first_step, trace.last_step
        if first <= last:  # the numbers of a recording that began late do not begin with 0
            row.add("step " if step >= first else "before step ", "dim")
            row.add(f"{max(first, min(step, last)):,}", "bold ink").add(f" of {first:,}–{last:,} ", "dim")
        room = width - row.width - 16
        keys = next((keys for keys in KEYS if len(keys) <= room), "")
        begin = row.width
        row.extend(self._line(source, step, width - row.width - len(keys) - 1))
        self._places = range(begin, row.width)
        return Picture([row.add(keys, "dim").done(width)])

    def _line(self, source: ReplaySource, shown: int, room: int) -> list[tuple[str, str]]:
        """Returns the whole recording as a line of `room` cells, with the playhead and the bookmarks."""
        if room < 8:
            return []
        marks = {_column(source, step, room) for step, _ in source.trace.bookmarks}
        head = _column(source, shown, room)
        return [
            (glyphs().active if i == head else glyphs().peak if i in marks else glyphs().rule,
             "accent" if i == head else "hit" if i in marks else "frame")
            for i in range(room)
        ]

    def clicked(self, view: View, column: int, row: int) -> None:
        if column not in self._places:
            return
        at, room = column - self._places.start, len(self._places)
        source, trace = self._replay, self._replay.trace
        begin = trace.step_before - (-at * _steps(source) // room)  # the first step of this column
        step = trace.last_step if at == room - 1 else max(trace.first_step, begin)
        step = next((step for step, _ in trace.bookmarks if _column(source, step, room) == at), step)
        self.post_message(self.Clicked(step))


def _steps(source: ReplaySource) -> int:
    """Returns the number of steps on the line; the first place is before the first step."""
    return max(1, source.trace.last_step - source.trace.step_before) + 1


def _column(source: ReplaySource, step: int, room: int) -> int:
    """Returns the column of a step on a line of `room` cells for the whole recording."""
    return max(0, min(room - 1, (step - source.trace.step_before) * room // _steps(source)))
