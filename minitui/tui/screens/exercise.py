"""The exercise screen: a student's file, what its run shows, and the panels at the step of a broken rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from minitui.exercises.attempt import Attempt
from minitui.exercises.table import Exercise
from minitui.tui.screens.base import Hint, PlayheadScreen
from minitui.tui.screens.code import CodePanel
from minitui.tui.screens.compare import CompareScreen
from minitui.tui.widgets.bars import StatusBar, TopBar
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.replay_bar import ReplayBar
from minitui.tui.widgets.rows import Row, clean, wrapped
from minitui.viewmodel.view import View

WIDE = 116  # columns: the panels are beside the file, whose comments then have whole lines, else below the result


class Now(NamedTuple):
    """The name and the text of the file, and the result of its last run. `error`: why it could not be run. `run`: its
    number and time."""

    name: str
    text: str
    attempt: Attempt | None
    running: bool
    error: str
    run: str


class ResultPanel(LinePanel):
    """The sentence of the last attempt, its score, and the end of what the code printed."""

    TITLE = "Result"

    def __init__(self, exercise: Exercise, *, id: str) -> None:
        super().__init__(id=id)
        self.exercise, self.running, self.error, self.run = exercise, False, "", ""
        self.attempt: Attempt | None = None

    def picture(self, view: View, width: int, height: int) -> Picture:
        attempt, rows = self.attempt, []
        if self.error:
            rows += wrapped(self.error, "bad", width)
        elif attempt is not None:
            rows += wrapped(clean(attempt.words), "good" if attempt.passed else "bad", width)
            rows += wrapped(self._next(attempt), "ink", width)
            step, printed = attempt.latest
            lines = [row for line in printed.rstrip().splitlines() for row in wrapped(line, "ink", width)]
            if lines:
                where = "printed before the first step:" if step is None else f"printed in step {step:,}:"
                rows += [Row(where, "dim").done(width), *lines[-max(1, height - len(rows) - 1) :]]
        if self.running:
            rows = wrapped("Running … The result before:" if rows else "Running …", "hit", width) + rows
        return Picture(rows, f"{self.TITLE} · {self.exercise.name}{self.run}")

    def _next(self, attempt: Attempt) -> str:
        if attempt.passed:
            more = attempt.figure is None or attempt.figure > self.exercise.least
            idea = "Save the file again to try another idea." if more else "100 is the most here."
            return f"4 shows both runs on one clock. {idea}"
        if attempt.step is not None and self.screen.has_class("-narrow"):
            return f"Press 2 to see the engine at step {attempt.step:,}, then , and . to step back and forward."
        if attempt.step is not None:
            return "The panels show the engine at this step: , and . step back and forward, 2 and 3 show more."
        shown = " The panels show the run of the reference." if len(attempt.runs) == 1 else ""
        return f"Change the file and save it: it runs again at once.{shown}"


class ExerciseScreen(PlayheadScreen):
    """The file at the left, the result and the panels at the right."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 (as in Textual)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e,enter", "app.edit", "open the file in your editor", show=False, id="exercise.edit"),
        Binding("r", "app.run_file", "run the file again", show=False, id="exercise.run"),
    ]
    DEFAULT_CSS = """
    ExerciseScreen {
        layout: vertical; background: $ground;
        & #body { height: 1fr; }
        & #file { width: 1fr; min-width: 75; height: 1fr; }
        & #side { width: 1fr; height: 1fr; }
        & #result { height: 40%; min-height: 9; max-height: 12; }
        & #lanes, & #map, & #tree { height: 1fr; }
        &.-narrow #body { layout: vertical; }
        &.-narrow #file { min-width: 0; }
        &.-narrow #side { height: 9; }
        &.-narrow #lanes, &.-narrow #map, &.-narrow #tree { display: none; }
    }
    """
    file = getters.query_one("#file", CodePanel)
    result = getters.query_one("#result", ResultPanel)

    def __init__(self, exercise: Exercise, now: Callable[[], Now]) -> None:
        """`now`: returns what the application knows."""
        super().__init__()
        self.exercise, self._now = exercise, now
        self._file_shown = ("", 0)

    def paint(self, view: View) -> None:
        now, result = self._now(), self.result
        result.running, result.error, result.run = now.running, now.error, now.run
        marked = now.attempt.line or 0 if now.attempt is not None and not now.running else 0
        if (now.text, marked) != self._file_shown or now.attempt is not result.attempt:
            lines, begin = now.text.splitlines() or [""], f"def {self.exercise.name}("
            top = 0 if self._file_shown[0] else next((i for i, text in enumerate(lines) if text.startswith(begin)), 0)
            self._file_shown, result.attempt = (now.text, marked), now.attempt
            self.file.show(now.name, lines, 1, marked, top)
        super().paint(view)

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Horizontal(id="body"):
            yield CodePanel(id="file")
            with Vertical(id="side"):
                yield ResultPanel(self.exercise, id="result")
                yield BlockMap(id="map")
                yield RadixTree(id="tree") if self.exercise.name == "evict" else BatchLanes(id="lanes")
        yield StatusBar()
        yield ReplayBar()

    def on_mount(self) -> None:
        self.file.focus()

    def hints(self) -> list[Hint]:
        others = {hint[1]: hint for hint in super().hints()}
        keep = [others[name] for name in ("inspect", "lecture", "commands") if name in others]
        keys = [("e", "edit"), ("r", "run again"), (", .", "step"), ("4", "compare"), others["help"], ("q", "quit")]
        return [*keys, *keep]  # 80 columns have room for those of `keys`


class ExerciseCompareScreen(CompareScreen):
    """The reference and the student's run on one clock."""

    ABOUT = "compare"

    def __init__(self, compared: Callable[[], View | None]) -> None:
        """`compared`: returns the view of the student's run, with that of the reference as its `earlier`."""
        super().__init__()
        self._compared = compared

    def paint(self, view: View) -> None:
        super().paint(self._compared() or view)
