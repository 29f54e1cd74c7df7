"""The lesson screen: a page of text, beside panels that show the engine during the experiments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.css.scalar import Scalar

from engine.errors import EngineError
from minitui.teaching.lesson_progress import LessonProgress
from minitui.teaching.lessons import neighbour
from minitui.teaching.lessons.page import Lesson, Seen, find_code
from minitui.teaching.prediction import LETTERS, Poll
from minitui.teaching.reading import Reading
from minitui.teaching.stage import Stage
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.screens.code import CodeScreen
from minitui.tui.widgets.bars import Bar, StatusBar, TopBar
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.lesson.panels import (
    BOTH_ROWS,
    HEIGHTS,
    LIVE,
    MIN_PANEL_ROWS,
    PANEL_ROWS,
    PANELS,
    RESULT_ROWS,
    arrangement,
)
from minitui.tui.widgets.lesson.text import LessonText, hints, page_lines
from minitui.tui.widgets.lesson.wire import WireLines
from minitui.viewmodel.view import View

NOTHING = "no picture yet: the experiment has not run"
WIDE = 120  # columns; if the screen is at least this wide, panels are beside the text, otherwise below it


class LessonScreen(BaseScreen[None]):
    """The arrow keys turn pages, the keys a to d choose a prediction, enter runs an experiment, v opens the code."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 (as in Textual)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "turn(1)", "next page", show=False, id="lesson.next"),
        Binding("left", "turn(-1)", "previous page", show=False, id="lesson.previous"),
        Binding("pagedown", "read_on(1)", "further down, or next page", show=False, id="lesson.down.page"),
        Binding("pageup", "read_on(-1)", "further up, or previous page", show=False, id="lesson.up.page"),
        Binding("enter", "go", "run, next picture, or answer", show=False, id="lesson.go"),
        Binding("e", "hurry", "run the experiment to its end", show=False, id="lesson.hurry"),
        Binding("r", "run", "run again, or without a prediction", show=False, id="lesson.run"),
        *(
            Binding(letter, f"predict({i})", f"predict {letter}", show=False, id=f"lesson.{letter}")
            for i, letter in enumerate(LETTERS)
        ),
        Binding("tab", "question(1)", "next question", show=False, id="lesson.question"),
        Binding("shift+tab", "question(-1)", "previous question", show=False, id="lesson.question.back"),
        Binding("i", "type", "type a text for the experiment", show=False, id="lesson.type"),
        Binding("v", "code", "the code", show=False, id="lesson.code"),
    ]
    DEFAULT_CSS = """
    LessonScreen {
        layout: vertical; background: $ground;
        & #body { height: 1fr; }
        & #text { height: 1fr; width: 1fr; }
        &.-wide #body { layout: horizontal; }
        &.-wide #text { width: 64; }
        &.-wide #text.-alone { width: 1fr; }
        & #side { width: 1fr; height: auto; display: none; }
        &.-wide #side { height: 1fr; }
    }
    """
    text = getters.query_one("#text", LessonText)

    def __init__(
        self, lesson: Lesson, progress: LessonProgress, engine: Callable[[], Stage | None],
        open_lesson: Callable[[Lesson, bool], None],
    ) -> None:
        """`progress`: what the reader has read and predicted. `engine`: returns None until the engine has started.
        `open_lesson`: opens another lesson, at its last page if the second argument is True."""
        super().__init__()
        self._first, self._progress, self._engine, self._open_lesson = lesson, progress, engine, open_lesson
        self.stage: Stage | None = None
        self._nothing = View()  # before a page's experiment has run, its panels show no earlier experiment
        self._nothing.history.missing = NOTHING

    @property
    def reading(self) -> Reading:
        """The state of the lesson: the current page, and the results so far."""
        return self.text.reading

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Container(id="body"):
            yield LessonText(self._new_reading(self._first), id="text")
            with Container(id="side"):
                for name, panel in PANELS.items():
                    widget = panel(id=f"panel-{name}")
                    widget.display = False
                    yield widget
        yield StatusBar()

    def _new_reading(self, lesson: Lesson, at: int | None = None) -> Reading:
        reading = Reading(lesson, self._progress)
        if at is not None:
            reading.at = at % reading.pages
        elif reading.at:
            self.app.say(f"{lesson.name} continues on page {reading.at + 1}; the left arrow key shows earlier pages")
        return reading

    def on_mount(self) -> None:
        self.text.focus()

    def hints(self) -> list[Hint]:
        return hints(self.reading, idle=self.app.idle)

    # ---- painting

    def begin(self, lesson: Lesson, stage: Stage, at: int | None = None) -> None:
        """Start a lesson whose engine is ready. If the lesson was open before, its current page stays. `at`: show this
        page instead; -1 is the last one."""
        if self.reading.ready or self.reading.lesson is not lesson or at is not None:
            self.text.reading = self._new_reading(lesson, at)
        self.stage, self.reading.ready = stage, True
        if self.reading.page is None:
            self._open_page()
        elif self.reading.waits:
            self.reading.waits = False
            self._start()

    def paint(self, view: View) -> None:
        if self.stage is None and (stage := self._engine()) is not None:
            self.begin(self.reading.lesson, stage)
        for bar in self.query(Bar):
            bar.paint(view)
        shown = self._arrange()
        self.reading.look(view)
        self.text.paint(view)
        page = self.reading.page
        waits = page is not None and page.run is not None and not self.reading.panel_has_content
        for name in shown:
            panel = self.query_one(f"#panel-{name}", LinePanel)
            panel.paint(self._nothing if waits and name not in LIVE else self.reading.views.get(self.reading.at, view))

    def _rows_below(self) -> int:
        """Returns the height of the panel below the text. A panel with nothing to show gets only rows that the text
        does not need."""
        sizes = HEIGHTS | BOTH_ROWS | (RESULT_ROWS if self.reading.page is not None else {})
        rows = sizes.get(self.reading.panel, PANEL_ROWS)
        if self.reading.panel_has_content:
            return rows
        left = self.size.height - 4 - len(page_lines(self.reading, self.size.width - 4))
        return min(rows, left) if left >= min(rows, MIN_PANEL_ROWS) else 0

    def _arrange(self) -> list[str]:
        """Show the panels of the page, and set their heights. Returns their names. Beside the closing questions, no
        panel shows the steps that prepare the engine."""
        prepares = self.reading.page is None and not self.reading.prepared
        name = "" if prepares else self.reading.panel
        shown = arrangement(name, self._rows_below() if self.has_class("-narrow") else None)
        self.query_one("#side").display = bool(shown)
        self.text.set_class(not shown, "-alone")
        for name in PANELS:
            panel = self.query_one(f"#panel-{name}")
            if panel.display != (name in shown):
                panel.display = name in shown
        for name, rows in shown.items():
            panel = self.query_one(f"#panel-{name}")
            height = Scalar.parse("1fr" if rows is None else str(rows))
            if panel.styles.height != height:
                panel.styles.height = height
        return list(shown)

    # ---- a class

    @property
    def _made(self) -> bool:
        """False while the screen is being made."""
        return bool(self.query("#text"))

    @property
    def runs(self) -> bool:
        """An experiment runs."""
        return self._made and self.reading.running

    @property
    def poll(self) -> Poll | None:
        """The prediction that this page waits for."""
        if not self._made:
            return None
        reading, page = self.reading, self.reading.page
        over = reading.at in reading.seen or reading.at in reading.failed
        if page is None or page.predict is None or not reading.can_predict or over:
            return None
        return Poll(page.predict.question, page.predict.choices)

    @property
    def answered(self) -> tuple[Poll, int] | None:
        """The prediction of this page and its right choice, once the experiment has shown it; else None."""
        if not self._made:
            return None
        page, seen = self.reading.page, self.reading.seen.get(self.reading.at)
        if page is None or page.predict is None or seen is None or seen.answer is None:
            return None
        return Poll(page.predict.question, page.predict.choices), seen.answer

    @property
    def told_answer(self) -> str:
        """The question of this page with its answer, once the experiment has shown it; else empty."""
        if (answered := self.answered) is None:
            return ""
        poll, right = answered
        return f"{poll.question} The answer is {LETTERS[right]}: {poll.choices[right]}"

    def reveal(self) -> None:
        self._start()

    # ---- pages

    def _open_page(self) -> None:
        """Stop a running experiment, and show the top of the page. For the closing questions, prepare the engine."""
        reading = self.reading
        self.workers.cancel_group(self, "lesson")
        reading.running = False
        self.text.top = 0
        self.text.focus()
        if reading.page is None and reading.ready and not reading.prepared and self.stage is not None:
            self._prepare(self.stage)

    def _prepare(self, stage: Stage) -> None:
        self.reading.prepared = False
        self.run_worker(self._prepare_and_answer(self.reading, stage), group="lesson", exclusive=True)

    async def _prepare_and_answer(self, reading: Reading, stage: Stage) -> None:
        """Prepare the engine. Then show the answer that the reader has asked for meanwhile."""
        await reading.prepare(stage)
        if reading.prepared and reading.asked:
            reading.asked = False
            self._start()

    def action_turn(self, pages: int) -> None:
        """Turn `pages` pages: forward, or back if negative. The next lesson follows the last page, and the last page of
        the lesson before precedes the first."""
        reading = self.reading
        stopped = reading.lesson.pages[reading.at].title if reading.running else ""
        if reading.turn(pages):
            self._open_page()
            if stopped:
                self.app.say(f"the experiment of “{stopped}” was stopped: it has no result")
        elif reading.ready and (other := neighbour(reading.lesson, 1 if pages > 0 else -1)) is not None:
            self._open_lesson(other, pages < 0)

    def action_read_on(self, pages: int) -> None:
        """Show the lines below if `pages` is positive, or above; if there are none, turn the page."""
        if not self.text.scroll_page(pages):
            self.action_turn(pages)

    def action_question(self, step: int) -> None:
        """Go to another closing question, and show that question's panel. On another page, choose the panel if it
        scrolls, or the text again."""
        if self.reading.page is not None:
            panel = self.query_one(f"#panel-{self.reading.panel}", LinePanel) if self.reading.panel else self.text
            scrolls = isinstance(panel, WireLines) and not panel.has_focus
            (panel if scrolls else self.text).focus()
        else:
            self.reading.question = (self.reading.question + step) % len(self.reading.lesson.checks)
            self._show_question()

    def _show_question(self) -> None:
        """Scroll to the top for the first closing question, and to the end for the others."""
        self.text.top = 0
        if self.reading.question:
            self.text.follow()

    def action_predict(self, choice: int) -> None:
        """Store the prediction. Has no effect after the experiment has shown the answer."""
        reading = self.reading
        predict = reading.page.predict if reading.page is not None else None
        if predict is not None and reading.can_predict and choice < len(predict.choices):
            reading.predict(choice)
            self.text.to_experiment()

    def action_go(self) -> None:
        """Run the experiment; while it runs, show its next picture; on the last page, answer the question. Without a
        prediction, ask for one first. A key that was meant to end a pause must not run a finished experiment again:
        beside a result, enter has no effect."""
        reading = self.reading
        if self.stage is not None and reading.running:
            reading.next_picture(self.stage)
        elif reading.page is not None and reading.at in reading.seen:
            return
        elif reading.asks:
            reading.asked = True
            self.text.to_experiment()
        else:
            self._start()

    def action_hurry(self) -> None:
        """Run a running experiment to its end, without pauses. Without one, say what the key needs."""
        if self.stage is not None and self.reading.running:
            self.reading.hurry(self.stage)
            return
        page = self.reading.page
        if page is None or page.run is None:
            first = "this page has none"
        elif self.reading.asks and page.predict is not None:
            last = len(page.predict.choices) - 1
            first = f"first choose {', '.join(LETTERS[:last])} or {LETTERS[last]}, then press enter"
        else:
            first = f"first start it with {'r' if self.reading.at in self.reading.seen else 'enter'}"
        self.app.say(f"key e runs a running experiment to its end: {first}")

    def action_run(self) -> None:
        """Run the experiment without a prediction; an earlier prediction does not count."""
        if self.stage is not None and not self.reading.running:
            self.reading.withdraw()
        self._start()

    def _start(self) -> None:
        """Run the experiment; on the last page, answer the question."""
        reading, stage = self.reading, self.stage
        if reading.running:
            return  # the page says that an experiment is running
        if stage is None:  # the page says that the experiment or the answer comes when the engine is ready
            reading.asked = reading.page is None
            reading.waits = reading.page is not None and reading.page.run is not None
        elif reading.page is None:
            stage.state()
            reading.look(stage.view)
            if reading.disturbed:
                self._prepare(stage)
            elif reading.prepared and reading.question not in reading.revealed:
                reading.revealed.add(reading.question)
                self._show_question()
            elif reading.prepared:
                self.action_question(1)
            else:
                reading.asked = True
        elif reading.page.run is not None:
            self.run_worker(self._run(reading, stage, reading.page.run), group="lesson", exclusive=True)

    def action_type(self) -> None:
        """Let the reader type a text for the experiment, and run the experiment with this text."""
        reading, page = self.reading, self.reading.page
        type_in = page.type_in if page is not None else None
        if type_in is None or reading.running:
            return

        def then(text: str) -> None:
            if len(text) > type_in.longest:
                self.app.say(f"the text has {len(text)} characters: type at most {type_in.longest}", error=True)
            elif self.reading is reading and reading.page is page:
                reading.typed[reading.at] = text
                self._start()

        self.app.ask_text(type_in.title, reading.typed.get(reading.at, type_in.default), then, selected=True)

    async def _run(self, reading: Reading, stage: Stage, run: Callable[[Stage], Awaitable[Seen]]) -> None:
        await reading.keep_picture(stage)
        self.text.to_experiment()
        await reading.run(stage, run)
        self.text.to_experiment()

    # ---- code

    def action_code(self) -> None:
        page = self.reading.page
        if page is None or not page.code:
            return
        try:
            self.app.push_screen(CodeScreen(find_code(page.code)))
        except EngineError as error:
            self.app.say(str(error), error=True)
