"""The application of `minitui exercise`: runs a student's file when it is saved, and shows the recording."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType

from engine.errors import EngineError
from minitui.exercises.attempt import Attempt, Attempts, read
from minitui.sources.base import Progress
from minitui.sources.replay import ReplaySource
from minitui.trace.reader import TraceReader
from minitui.tui.apps.replay_app import ReplayApp
from minitui.tui.screens.exercise import ExerciseCompareScreen, ExerciseScreen, Now
from minitui.tui.widgets.rows import clean
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.viewmodel.places import KINDS
from minitui.viewmodel.view import View

WATCH_S = 0.3  # seconds between two looks at the file
EDITORS = ("nano", "vim", "vi")  # without $VISUAL and $EDITOR, the first that is installed


class ExerciseSource(ReplaySource):
    """Plays the recording of the last attempt. `attempt` and `text`: of the last run; `run`: " · run 2 at 14:03:59"."""

    missing = "the file runs"

    def __init__(self, attempts: Attempts, path: Path) -> None:
        super().__init__(path)
        self.attempts, self.file = attempts, path
        self.text = self.run = ""
        self._runs = 0
        self.running = self.saved = False  # the code runs; the file was saved since this run read it
        self.attempt: Attempt | None = None

    async def start(self, on_progress: Progress) -> None:
        """Run the file for the first time. Raises EngineError."""
        on_progress({"text": f"running {self.file.name}"})
        await self.run_file()
        self._ready.set()

    async def run_file(self) -> bool:
        """Run the file; returns True if there is a new recording: the caller must then take a new snapshot. Raises
        EngineError."""
        self.running = self.saved = True
        try:
            while self.saved:
                self.saved = False
                self.text = await asyncio.to_thread(read, self.file)
                attempt = await asyncio.to_thread(self.attempts.run, self.file)
        finally:
            self.running = False
        self.attempt = attempt
        self._runs += 1
        self.run = f" · run {self._runs:,} at {time.strftime('%H:%M:%S')}"
        if not attempt.runs:
            if self.reader is None:
                raise EngineError(f"{self.file}: {attempt.words}")
            return False
        self.path = attempt.runs[-1]
        self.reader = await asyncio.to_thread(TraceReader, self.path)
        self.info = self.reader.info
        self.paused = False
        self._place(0, 0)
        return True

    async def close(self) -> None:
        self.attempts.close()


class ExerciseApp(ReplayApp):
    """The application of an exercise."""

    MODES: ClassVar[dict[str, Any]] = dict(ReplayApp.MODES)
    DEFAULT_MODE = "exercise"
    TABS = (("exercise", "0 Exercise"), *ReplayApp.TABS, ("compare", "4 Compare"))
    HELP_FIRST = ()
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", "switch_mode('exercise')", "Exercise", id="exercise", tooltip="Your file", show=False),
        Binding("4", "switch_mode('compare')", "Compare", id="compare", tooltip="Both runs on one clock", show=False),
    ]

    def __init__(self, source: ExerciseSource, *args: Any, **options: Any) -> None:
        options["script"] = lambda app: self._shown()
        super().__init__(source, *args, **options)
        self.exercise_source = source
        self.compared: View | None = None
        self._changed = self._stamp()
        self._file_error = self._stopped = ""
        self._runs = False
        exercise = source.attempts.exercise
        self.add_mode("exercise", lambda: ExerciseScreen(exercise, self._now))
        self.add_mode("compare", lambda: ExerciseCompareScreen(lambda: self.compared))

    def on_mount(self) -> None:  # the handlers of the base classes run, too
        self.set_interval(WATCH_S, self._watch)

    # ---- the file

    def _stamp(self) -> tuple[int, int] | None:
        try:
            facts = self.exercise_source.file.stat()
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_size

    def _watch(self) -> None:
        """Run the file if it was saved since it was looked at; a run of the earlier text stops. If
        the file is gone, the run says so."""
        stamp = self._stamp()
        if stamp == self._changed:
            return
        if self.exercise_source.running:
            self._changed, self.exercise_source.saved = stamp, True
            self.exercise_source.attempts.stop()
        elif self.progress is None and not self._runs:  # else a result is being shown: the next look comes soon
            self._changed = stamp
            self.action_run_file()

    def action_run_file(self) -> None:
        if self.progress is None and not self._runs:
            self._runs = True
            self.run_worker(self._run(), group="attempt")

    async def _run(self) -> None:
        self._file_error = ""
        try:
            if await self.exercise_source.run_file():
                self.feed.restart()
                self.view.moment.present()
                await self.feed.sync()
            await self._shown()
        except EngineError as error:
            self._file_error = str(error)
        finally:
            self._runs = False

    async def _shown(self) -> None:
        """Show the step of the broken rule, else the end of the run."""
        attempt, replay = self.exercise_source.attempt, self.exercise_source
        if attempt is None or not attempt.runs:
            return
        if len(attempt.runs) == 2:
            first, second = [
                await asyncio.to_thread(recorded_view, TraceReader(path), name)
                for path, name in zip(attempt.runs, ("reference", "yours"), strict=True)
            ]
            second.earlier = first
            self.compared, self._stopped = second, Run(second).stopped
        else:
            self.compared, self._stopped = None, ""
        last = replay.trace.last_step
        step = last if attempt.step is None else min(attempt.step, last)
        await self._move_playhead(step)
        if step < last:
            replay.set_paused(True)  # at the end nothing is paused: what was decided last is played, too
        named = re.search(r"\b(b|n|r)(?:lock |ode )?(\d+)", attempt.broken)  # the first thing in the sentence
        self.view.select(KINDS[named[1]], int(named[2])) if named else self.view.select(None)

    def action_edit(self) -> None:
        """Open the file in the user's editor. One in the terminal takes the screen until it ends."""
        named = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
        editor = shlex.split(named) if named else [name for name in EDITORS if shutil.which(name)][:1]
        file = self.exercise_source.file
        if not editor or shutil.which(editor[0]) is None:
            why = f"the editor {editor[0]!r} is not installed" if editor else "no editor is known: set $EDITOR"
            self.say(f"{why}; or open {file} in any editor: it runs when it is saved", error=True)
            return
        try:
            with self.suspend():
                subprocess.run([*editor, str(file)], check=False)
        except SuspendNotSupported:
            self.say(f"this terminal cannot be given to {editor[0]}: open {file} in any editor", error=True)
        self.refresh(layout=True)

    # ---- frames

    def _now(self) -> Now:
        source = self.exercise_source
        running = self._runs or self.progress is not None
        return Now(source.file.name, source.text, source.attempt, running, self._file_error, source.run)

    def _narrate(self) -> str:
        """Returns nothing on the exercise screen: its result says what happened. The comparison begins with it."""
        attempt = self.exercise_source.attempt
        if self.current_mode == "compare" and attempt is not None:
            return clean(self._stopped or attempt.words)
        return "" if self.current_mode in ("exercise", "compare") else super()._narrate()
