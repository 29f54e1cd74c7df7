"""The application for a recording: the screens Inspect and Lecture, with keys that move the playhead."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from textual.app import ComposeResult

from engine.errors import EngineError, InvalidRequest
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.replay import MAX_SPEED, MIN_SPEED, ReplaySource
from minitui.trace.reader import TraceReader
from minitui.tui import help
from minitui.tui.actions import Action
from minitui.tui.apps.app import MinituiApp
from minitui.tui.screens.base import PlayheadScreen
from minitui.tui.screens.inspect import TALL, InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.widgets.replay_bar import ReplayBar, position
from minitui.viewmodel.moment import Playback
from minitui.viewmodel.words.narrate import narrate

NO_CHATS = "this is a recording: it has no chats; `minitui chat` starts an engine"
NEED_CHATS = dict.fromkeys(("Chats", "chat", "slash"), NO_CHATS)
NO_ENGINE = "this is a recording: no engine runs here; `minitui chat` starts one"
REST = " … (press 3 for more)"
SPEEDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
WRITTEN_S = 10.0  # seconds for which the text of a bookmark is shown while the recording plays
JUMP = 0.05  # the share of the recording that one jump covers


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


def shortened(text: str, width: int, lines: int) -> str:
    """Returns the first sentences of `text` that fit into `lines` lines of `width` cells; REST replaces the others."""
    if len(textwrap.wrap(text, width)) <= lines:
        return text
    sentences = re.split(r"(?<=\.) (?=\S)", text)
    while len(sentences) > 1 and len(textwrap.wrap(" ".join(sentences) + REST, width)) > lines:
        sentences.pop()
    return " ".join(sentences) + REST


class TraceCodec:
    """A tokenizer that can only decode. The texts of the tokens come from the recording."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, reader: TraceReader) -> None:
        self._reader = reader

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._reader.decode(ids)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> NoReturn:
        """Raises InvalidRequest: a recording has no chat template."""
        raise InvalidRequest(NO_CHATS)


class ReplayApp(MinituiApp):
    """The application for a recording. A recording has no chats, so the first screen is Inspect."""

    MODES: ClassVar[dict[str, Any]] = {"inspect": ReplayScreen, "lecture": ReplayLecture}
    DEFAULT_MODE = "inspect"
    NOT_OFFERED: ClassVar[dict[str, str]] = {
        **MinituiApp.NOT_OFFERED, **NEED_CHATS, "clear": NO_ENGINE, "restart": NO_ENGINE,
    }
    TABS = tuple(tab for tab in MinituiApp.TABS if tab[0] != "chat")
    HELP_FIRST: ClassVar[tuple[tuple[str, str], ...]] = (("A recording", help.SCREENS["replay"]),)

    def __init__(self, source: ReplaySource, *args: Any, **options: Any) -> None:
        options["load_codec"] = lambda info: TraceCodec(source.trace)
        super().__init__(source, *args, **options)
        self.view.moment.playback = Playback()
        self.replay = source
        self._passed = (-1, 0.0)  # the step of the last bookmark, and the time when the replay came to it

    @property
    def actions(self) -> list[Action]:
        """Without "freeze": in a recording its key does what the key of "gate" does."""
        return [action for action in super().actions if action.id != "freeze"]

    @property
    def idle(self) -> bool:
        """Always False: a recording may have another step even if no request is running now."""
        return False

    @property
    def gated(self) -> bool:
        return self.replay.paused

    @property
    def pace(self) -> float:
        return self.replay.pace

    @property
    def position(self) -> int:
        return position(self.view, self.replay)

    def _frame(self) -> None:
        self._note_playback()
        if self.replay.cause:
            self.say(f"the replay is paused: {self.replay.cause}")
            self.replay.cause = ""
        self.story = self._narrate()
        super()._frame()

    def group_names(self) -> dict[str, str]:
        """Returns the recorded name of each group of requests."""
        return self.replay.trace.names if self.replay.reader is not None else {}

    def _narrate(self) -> str:
        """Returns sentences about the current step if the recording is paused or at its end, else the text of `_about`.
        On the lecture screen, returns an empty text if the recording is paused."""
        written = self._written()
        if not (self.replay.stopped or self.view.moment.travel_text):  # sentences about each step would change too fast
            return "\n".join(filter(None, (written, self._about())))
        if self.current_mode == "lecture":
            return written  # the lecture screen has a panel for the other sentences
        width, height = self.size
        told = shortened(narrate(self.view, self.view.moment.horizon), width - 4, 2 if height < TALL else height // 6)
        return f"{written}\n{told}" if written else told

    def _written(self) -> str:
        """Returns the texts of the bookmarks of this step; while the recording plays, also for WRITTEN_S after it."""
        marks = self.replay.trace.bookmarks if self.replay.reader is not None else []
        last = max((step for step, _ in marks if step <= self.position), default=-1)
        now = time.monotonic()
        if last != self._passed[0]:
            self._passed = (last, now)
        shown = last == self.position or (not self.replay.stopped and now - self._passed[1] < WRITTEN_S)
        *before, end = [text for step, text in marks if step == last and shown] or [""]
        return "".join(text + (" " if text.endswith((".", "!", "?")) else ". ") for text in before) + end

    def _about(self) -> str:
        """Returns a note for a recording with random text; empty for other recordings."""
        if self.replay.reader is None or not self.replay.trace.header["random_text"]:
            return ""
        info = self.source.info
        weights = "with random weights " if info.dummy_weights else ""
        return (
            f"A recording of {info.model} {weights}on {info.device}: its steps are real, its text is random and "
            "not shown. Press p to pause; each step is then explained here."
        )

    async def start_over(self) -> None:
        """Go back to the first step."""
        await self.replay.control("resume")
        await self.seek(self.replay.trace.step_before)

    async def seek(self, step: int) -> None:
        """Show the recording at the end of `step`. A paused replay goes back in the history of the panels: the playhead
        stays, and the panels keep what they know."""
        if self.replay.paused and self._in_history(step):
            self.view.travel_to(step)
        else:
            await self._move_playhead(step)

    def _in_history(self, step: int) -> bool:
        row = self.view.history.steps.get(step)
        return step == self.view.moment.newest or (row is not None and row.end_seq > self.view.history.past.first_seq)

    async def _move_playhead(self, step: int) -> None:
        new = await self.replay.control("seek", step=step)
        self.view.moment.present()
        self.view.leave_step(step)
        if new:
            self.feed.forget()  # not restart(): the panels' history needs the records between the snapshot and the step
            await self.feed.sync()

    def travel_to(self, step: int) -> bool:
        """Pause, and show the recording at the end of `step`."""
        self.replay.set_paused(True)
        self._note_playback()
        if self._in_history(step):
            self.view.travel_to(step)
        elif self.replay.trace.step_before < step <= self.replay.trace.last_step:
            self.run_worker(self.seek(step), group="seek", exclusive=True)
        return True

    @property
    def steps_kept(self) -> tuple[int, int]:
        """All steps of the recording."""
        if self.replay.reader is None:
            return 0, -1
        return self.replay.trace.first_step, self.replay.trace.last_step

    def to_now(self) -> None:
        """Go to the end of the recording."""
        self.run_worker(self._to_end(), group="seek", exclusive=True)

    async def _to_end(self) -> None:
        if self.replay.ended:
            self.view.moment.present()
            self.view.leave_step(self.view.moment.horizon)
        else:
            await self._move_playhead(self.replay.trace.last_step)

    async def begin_here(self) -> None:
        """Move the playhead to the step that is shown."""
        if self.view.moment.travel_text:
            await self._move_playhead(self.view.moment.horizon)

    # ---- the keys of the playhead, and a click on its line

    def on_replay_bar_clicked(self, message: ReplayBar.Clicked) -> None:
        self.run_worker(self.seek(message.step), group="seek", exclusive=True)

    def action_speed(self, direction: int) -> None:
        now = self.replay.speed
        candidates = [s for s in SPEEDS if (s - now) * direction > 1e-9 and MIN_SPEED <= s <= MAX_SPEED]
        if candidates:
            self.replay.set_speed(min(candidates, key=lambda speed: abs(speed - now)))

    async def action_jump(self, direction: int) -> None:
        source = self.replay
        span = max(1, round((source.trace.last_step - source.trace.step_before) * JUMP))
        await self.seek(self.position + direction * span)

    async def action_begin(self) -> None:
        await self.seek(self.replay.trace.first_step)

    def action_end(self) -> None:
        self.to_now()

    async def action_mark(self, direction: int) -> None:
        mark = self.replay.next_bookmark(self.position, direction)
        if mark is None:
            self.say("there is no bookmark " + ("after this step" if direction > 0 else "before this step"))
            return
        await self.seek(mark[0])
        self.say(f"step {mark[0]:,}: {mark[1]}")

    @property
    def can_bookmark(self) -> bool:
        """True: bookmarks of a bundled recording last until the end."""
        return True

    def _bookmark(self, text: str) -> None:
        try:
            self.replay.bookmark(self.position, text.strip() or "bookmark")
        except EngineError as error:
            self.say(str(error), error=True)

    def _note_playback(self) -> None:
        # At its end, the picture is exact, too.
        self.view.moment.playback = Playback(self.replay.speed, self.replay.stopped)
        if self.replay.reader is not None:
            self.view.history.origin = self.replay.trace.begin_t


def replay_app(path: str, speed: float = 1.0) -> ReplayApp:
    """Returns an application that shows a trace, for tests and images without a terminal."""
    source = ReplaySource(path, speed)
    return ReplayApp(source, Chats(source), Settings(), system="")
