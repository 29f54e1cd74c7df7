"""The screens for a recording: Inspect and Lecture, with keys that move the playhead and a bar that shows it."""

from __future__ import annotations

from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from engine.errors import EngineError
from minitui.sources.replay import MAX_SPEED, MIN_SPEED
from minitui.tui.screens.base import BaseScreen
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.widgets.replay_bar import HasReplay, ReplayBar

SPEEDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
JUMP = 0.05  # the share of the recording that one jump covers


class PlayheadScreen(BaseScreen[None]):
    """A screen with keys that move the playhead.

    A subclass lists this class as its last base class, because the CSS of the first base class has priority.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("less_than_sign", "speed(-1)", "slower", show=False, id="replay.slower"),
        Binding("greater_than_sign", "speed(1)", "faster", show=False, id="replay.faster"),
        Binding("left_parenthesis", "jump(-1)", "back", show=False, id="replay.back"),
        Binding("right_parenthesis", "jump(1)", "forward", show=False, id="replay.forward"),
        Binding("left_curly_bracket", "mark(-1)", "previous bookmark", show=False, id="replay.previous"),
        Binding("right_curly_bracket", "mark(1)", "next bookmark", show=False, id="replay.next"),
        Binding("B,home", "begin", "begin of the recording", show=False, id="replay.begin"),
        Binding("E", "end", "end of the recording", show=False, id="replay.end"),
        Binding("m", "bookmark", "bookmark this step", show=False, id="replay.bookmark"),
    ]

    @property
    def _replay(self) -> HasReplay:
        return cast(HasReplay, self.app)

    def action_speed(self, direction: int) -> None:
        """Set the next lower or higher speed of SPEEDS."""
        now = self._replay.replay.speed
        candidates = [s for s in SPEEDS if (s - now) * direction > 1e-9 and MIN_SPEED <= s <= MAX_SPEED]
        if candidates:
            self._replay.replay.set_speed(min(candidates, key=lambda speed: abs(speed - now)))

    async def action_jump(self, direction: int) -> None:
        """Jump a twentieth of the recording back or forward."""
        source = self._replay.replay
        span = max(1, round((source.trace.last_step - source.trace.step_before) * JUMP))
        await self._replay.seek(self._replay.position + direction * span)

    async def action_begin(self) -> None:
        """Go to the first step."""
        await self._replay.seek(self._replay.replay.trace.first_step)

    def action_end(self) -> None:
        """Go to the last step."""
        self.app.to_now()

    async def action_mark(self, direction: int) -> None:
        """Go to the next or the previous bookmark."""
        mark = self._replay.replay.next_bookmark(self._replay.position, direction)
        if mark is None:
            self.app.say("there is no bookmark " + ("after this step" if direction > 0 else "before this step"))
            return
        await self._replay.seek(mark[0])
        self.app.say(f"step {mark[0]:,}: {mark[1]}")

    def action_bookmark(self) -> None:
        """Ask for a text and save it in the file as a bookmark of this step."""
        self.app.ask_text("Bookmark this step as", "", self._bookmark)

    def _bookmark(self, text: str) -> None:
        try:
            self._replay.replay.bookmark(self._replay.position, text.strip() or "bookmark")
        except EngineError as error:
            self.app.say(str(error), error=True)


class ReplayScreen(InspectScreen, PlayheadScreen):
    """The inspect screen for a recording, with a bar for the playhead."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield ReplayBar()


class ReplayLecture(LectureScreen, PlayheadScreen):
    """The lecture screen for a recording, with a bar for the playhead."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield ReplayBar()
