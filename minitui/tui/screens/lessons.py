"""A lesson on the screen: its text, beside it the panel it is about, and the engine that it experiments on."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, ClassVar

from textual import events, getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.css.scalar import Scalar

from engine.errors import EngineError
from minitui.teaching.lessons.page import LETTERS, Check, Code, Lesson, Page, Seen, find_code, fresh, paragraphs
from minitui.teaching.stage import Stage
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.screens.one_size import OneSize
from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.block_map import BlockMap
from minitui.tui.widgets.block_table import BlockTable
from minitui.tui.widgets.chrome import StatusBar, TopBar
from minitui.tui.widgets.events import Events
from minitui.tui.widgets.lanes import BatchLanes
from minitui.tui.widgets.occupancy import Occupancy
from minitui.tui.widgets.rows import Row, Runs
from minitui.tui.widgets.step_bar import StepBar
from minitui.tui.widgets.timings import StepTimings
from minitui.tui.widgets.tree import RadixTree

if TYPE_CHECKING:
    from minitui.tui.app import MinituiApp
    from minitui.viewmodel.model import View

PANELS: dict[str, type[LinePanel]] = {
    "step": StepBar, "map": BlockMap, "table": BlockTable, "lanes": BatchLanes, "tree": RadixTree,
    "timings": StepTimings, "events": Events, "occupancy": Occupancy,
}  # fmt: skip
WIDE = 120  # columns from which on the panel stands beside the text
LONGEST = 100  # columns: longer lines are hard to read
HEIGHTS = {"step": 4, "occupancy": 1}  # below the text; the others: PANEL_ROWS
PANEL_ROWS, LEAST_ROWS = 9, 5
LEAST_CODE = 16  # cells: in fewer a line of code is cut off
PARTNERS = {"step": "lanes", "occupancy": "map"}  # beside the text there is room for a second


class Reading:
    """Where a reader is in a lesson, and what came out so far. The last page holds the closing questions."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self.at = 0
        self.said: dict[int, int] = {}  # page -> the choice predicted
        self.seen: dict[int, Seen] = {}
        self.failed: dict[int, str] = {}
        self.ready = False  # the engine has been started
        self.running = False
        self.standing = False  # the engine stands where the closing questions are asked
        self.question = 0  # the closing question whose panel is shown
        self.revealed: dict[int, str] = {}

    @property
    def pages(self) -> int:
        return len(self.lesson.pages) + 1

    @property
    def page(self) -> Page | None:
        """None: the closing questions."""
        return self.lesson.pages[self.at] if self.at < len(self.lesson.pages) else None

    @property
    def shows(self) -> bool:
        """The engine has something to show on the panel: what was run here, or what is asked about."""
        return self.page is None or self.running or self.at in self.seen or self.at in self.failed

    @property
    def check(self) -> Check:
        return self.lesson.checks[self.question]

    @property
    def panel(self) -> str:
        """Which panel belongs to what is read now; empty: none."""
        return self.page.panel if self.page is not None else self.check.panel


class LessonText(LinePanel):
    """The text of a page, what was predicted, and what was seen. Scrolls when it does not fit."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll(-1)", "a line up", show=False, id="lesson.up"),
        Binding("down", "scroll(1)", "a line down", show=False, id="lesson.down"),
    ]

    TITLE = "Text"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.reading: Reading | None = None
        self.top = 0
        self._follow = False
        self._height = 0  # when it was last drawn

    def follow(self) -> None:
        """Scroll so that the end shows, where something new stands."""
        self._follow = True

    def picture(self, view: View, width: int, height: int) -> Picture:
        reading = self.reading
        if reading is None:
            return Picture([], "Lesson")
        rows = [_line(text, style, width) for text, style in page_lines(reading, min(width, LONGEST))]
        most = max(0, len(rows) - height)
        if self._follow or (height < self._height and reading.shows):
            self.top, self._follow = most, False
        self._height = height
        self.top = min(self.top, most)
        title = f"{reading.lesson.name} {glyphs().middot} {reading.at + 1} of {reading.pages}"
        below = len(rows) - height - self.top
        legend = [(f"{below} lines more: down", "accent")] if below > 0 else [(_keys(reading), "dim")]
        if self.top and below <= 0:
            legend.insert(0, (f"up: {self.top} lines more {glyphs().middot} ", "dim"))
        return Picture(rows[self.top : self.top + height], title, legend=legend)

    def action_scroll(self, lines: int) -> None:
        """Up or down by a line."""
        self.top = max(0, self.top + lines)
        self.repaint()


def _line(text: str, style: str, width: int) -> Runs:
    return Row(text, style).done(width)


def _keys(reading: Reading) -> str:
    page = reading.page
    parts = []
    if page is None:
        parts.append("enter answers, tab next question")
    elif page.run is not None:
        if reading.at in reading.seen:
            parts.append("enter runs it again")
        else:
            letters = " ".join(LETTERS[: len(page.predict.choices)]) if page.predict else ""
            parts.append(f"{letters} predicts, enter runs" if letters else "enter runs")
    if page is not None and page.code:
        parts.append("v code")
    return f" {glyphs().middot} ".join([*parts, "left right pages"])


def page_lines(reading: Reading, width: int) -> list[tuple[str, str]]:
    """(text, style) lines of the page that is read, or of the closing questions."""
    page = reading.page
    if page is None:
        return _closing(reading, width)
    lines = [(page.title, "bold hit"), ("", "ink"), *((line, "ink") for line in paragraphs(page.text, width))]
    seen = reading.seen.get(reading.at)
    if page.predict is not None:
        lines.append(("", "ink"))
        lines += [(line, "bold ink") for line in paragraphs("Predict: " + page.predict.question, width)]
        said = reading.said.get(reading.at)
        for i, choice in enumerate(page.predict.choices):
            right = seen is not None and seen.answer == i
            mark = glyphs().right if right else glyphs().arrow if said == i else " "
            style = "bold good" if right else "bold accent" if said == i else "dim" if seen else "ink"
            for n, piece in enumerate(paragraphs(choice, width - 5)):
                lines.append((f"{mark} {LETTERS[i]}) {piece}" if n == 0 else f"     {piece}", style))
    if reading.at in reading.failed:
        lines += [("", "ink"), *((line, "bad") for line in paragraphs(reading.failed[reading.at], width))]
    elif reading.running and page.run is not None:
        lines += [("", "ink"), ("The engine is at work: watch the panel.", "running")]
    elif seen is not None:
        lines.append(("", "ink"))
        if seen.answer is not None:
            lines.append((_verdict(reading.said.get(reading.at), seen.answer), "bold good"))
        lines += [(line, "hit") for line in paragraphs(seen.text, width)]
    elif page.run is not None:
        told = "Enter runs it." if reading.ready else "The engine is being started; then enter runs it."
        lines += [("", "ink"), (told, "running")]
    if page.code:
        path, _, name = page.code.partition(":")
        lines += [("", "ink"), (f"v: {path.replace('.', '/')}.py  {name}".rstrip(), "dim")]
    return lines


def _verdict(said: int | None, right: int) -> str:
    if said is None:
        return f"It is {LETTERS[right]}."
    return f"You said {LETTERS[said]}" + (", and so it is." if said == right else f"; it is {LETTERS[right]}.")


def _closing(reading: Reading, width: int) -> list[tuple[str, str]]:
    lines = [("Three questions. Their answers can be seen.", "bold hit"), ("", "ink")]
    for i, check in enumerate(reading.lesson.checks):
        chosen = i == reading.question
        mark = glyphs().arrow if chosen else " "
        for n, piece in enumerate(paragraphs(check.question, width - 5)):
            lines.append((f"{mark} {i + 1}. {piece}" if n == 0 else f"     {piece}", "bold ink" if chosen else "ink"))
        if i in reading.revealed:
            lines += [(f"     {piece}", "hit") for piece in paragraphs(reading.revealed[i], width - 5)]
        elif chosen:
            lines += [(f"     {piece}", "dim") for piece in paragraphs(f"See {check.where}", width - 5)]
        lines.append(("", "ink"))
    if reading.failed.get(reading.at):
        lines += [(line, "bad") for line in paragraphs(reading.failed[reading.at], width)]
    elif not reading.standing:
        told = "brought there" if reading.ready else "started"
        lines.append((f"The engine is being {told}.", "running"))
    return lines


class LessonStatus(StatusBar):
    """The status line with the keys of a lesson."""

    def _hints(self, app: MinituiApp, typing: bool) -> list[tuple[str, str]]:
        reading = getattr(app.screen, "reading", None)
        hints = [("right", "next page")]
        if reading is not None and reading.page is None:
            hints = [("enter", "answer"), ("tab", "next question")]
        elif reading is not None:
            if reading.page.run is not None:
                hints.append(("enter", "run again" if reading.at in reading.seen else "run"))
            if reading.page.code:
                hints.append(("v", "code"))
        return [*hints, ("L", "lessons"), ("n", "step"), ("2", "inspect"), ("?", "help"), ("q", "quit")]


class LessonScreen(OneSize[None]):
    """Pages with the arrow keys, enter runs an experiment, a to d predict, v opens the code."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012  as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,pagedown", "turn(1)", "next page", show=False, id="lesson.next"),
        Binding("left,pageup", "turn(-1)", "previous page", show=False, id="lesson.previous"),
        Binding("enter,r", "go", "run, again, or answer", show=False, id="lesson.go"),
        *(
            Binding(letter, f"say({i})", f"predict {letter}", show=False, id=f"lesson.{letter}")
            for i, letter in enumerate(LETTERS)
        ),
        Binding("tab", "question(1)", "next question", show=False, id="lesson.question"),
        Binding("shift+tab", "question(-1)", "previous question", show=False, id="lesson.question.back"),
        Binding("v", "code", "the code", show=False, id="lesson.code"),
        Binding("L", "lessons", "all lessons", show=False, id="lesson.list"),
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

    def __init__(self) -> None:
        super().__init__()
        self.reading: Reading | None = None
        self.stage: Stage | None = None

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Container(id="body"):
            yield LessonText(id="text")
            with Container(id="side"):
                for name, panel in PANELS.items():
                    made = panel(id=f"panel-{name}")
                    made.display = False
                    yield made
        yield LessonStatus()

    def on_mount(self) -> None:
        self.reading = self.text.reading = Reading(getattr(self.app, "lesson"))  # noqa: B009  (of LessonApp)
        self.text.focus()

    # ---- what the application tells

    def begin(self, lesson: Lesson, stage: Stage) -> None:
        """The engine is there, with this lesson's options. Another lesson than is read opens at its first page."""
        if self.reading is None or self.reading.ready or self.reading.lesson is not lesson:
            self.reading = self.text.reading = Reading(lesson)
        self.stage, self.reading.ready = stage, True
        if self.reading.page is None:
            self._arrive()

    def paint(self, view: View) -> None:
        """Show the text and the one panel."""
        stage = getattr(self.app, "stage", None)
        if self.stage is None and stage is not None and self.reading is not None:
            self.begin(self.reading.lesson, stage)
        for bar in self.query("Bar"):
            bar.paint(view)  # type: ignore[attr-defined]
        self._arrange()
        self.text.paint(view)
        for name in self._shown():
            self.query_one(f"#panel-{name}", LinePanel).paint(view)

    def _shown(self) -> list[str]:
        """The panels to be seen now."""
        if self.reading is None or not self.reading.panel:
            return []
        name = self.reading.panel
        if self.has_class("-narrow"):
            return [name] if self._rows_below() else []
        return [name, PARTNERS[name]] if name in PARTNERS else [name]

    def _rows_below(self) -> int:
        """How high the panel below the text is: before there is something to see it leaves the text all it needs."""
        assert self.reading is not None
        rows = HEIGHTS.get(self.reading.panel, PANEL_ROWS)
        if self.reading.shows:
            return rows
        left = self.size.height - 4 - len(page_lines(self.reading, self.size.width - 4))
        return min(rows, left) if left >= min(rows, LEAST_ROWS) else 0

    def _arrange(self) -> None:
        """Show those panels, in their heights."""
        shown = self._shown()
        side = self.query_one("#side")
        side.display = bool(shown)
        self.text.set_class(not shown, "-alone")
        for name in PANELS:
            panel = self.query_one(f"#panel-{name}")
            if panel.display != (name in shown):
                panel.display = name in shown
            if name in shown:
                rows = self._rows_below() if self.has_class("-narrow") else HEIGHTS.get(name)
                height = Scalar.parse("1fr" if rows is None else str(rows))
                if panel.styles.height != height:
                    panel.styles.height = height

    # ---- pages

    def _arrive(self) -> None:
        reading = self.reading
        assert reading is not None
        self.workers.cancel_group(self, "lesson")
        reading.running = False
        self.text.top = 0
        if reading.page is None and reading.ready and not reading.standing:
            self.run_worker(self._stand(), group="lesson", exclusive=True)

    def action_turn(self, pages: int) -> None:
        """To the next or the previous page."""
        if self.reading is not None:
            at = max(0, min(self.reading.pages - 1, self.reading.at + pages))
            if at != self.reading.at:
                self.reading.at = at
                self._arrive()

    def action_question(self, step: int) -> None:
        """To another closing question; its panel is shown."""
        if self.reading is not None and self.reading.page is None:
            self.reading.question = (self.reading.question + step) % len(self.reading.lesson.checks)

    def action_say(self, choice: int) -> None:
        """Predict, before it is run."""
        reading = self.reading
        if reading is None or reading.page is None or reading.page.predict is None or reading.at in reading.seen:
            return
        if choice < len(reading.page.predict.choices):
            reading.said[reading.at] = choice
            self.text.follow()

    def action_go(self) -> None:
        """Run the experiment, or run it again; on the last page, answer the question."""
        reading, stage = self.reading, self.stage
        if reading is None or stage is None or reading.running:
            return  # the page says so
        if reading.page is None:
            if reading.standing and reading.question not in reading.revealed:
                stage.view.frame(time.monotonic())
                reading.revealed[reading.question] = reading.check.answer(stage)
            elif reading.standing:
                self.action_question(1)
        elif reading.page.run is not None:
            self.run_worker(self._run(), group="lesson", exclusive=True)

    async def _run(self) -> None:
        reading, stage = self.reading, self.stage
        assert reading is not None and stage is not None and reading.page is not None and reading.page.run is not None
        at, run = reading.at, reading.page.run
        reading.seen.pop(at, None)
        reading.failed.pop(at, None)
        reading.running, reading.standing = True, False
        self.text.follow()
        try:
            await fresh(stage)
            reading.seen[at] = await run(stage)
        except EngineError as error:
            reading.failed[at] = f"The experiment stopped: {error}"
        finally:
            reading.running = False
        self.text.follow()

    async def _stand(self) -> None:
        reading, stage = self.reading, self.stage
        assert reading is not None and stage is not None
        try:
            await fresh(stage)
            await reading.lesson.close(stage)
            reading.standing = True
        except EngineError as error:
            reading.failed[reading.at] = f"The engine could not be brought there: {error}"

    # ---- code, lessons

    def action_code(self) -> None:
        """Open the code of this page."""
        if self.reading is None or self.reading.page is None or not self.reading.page.code:
            return
        try:
            self.app.push_screen(CodeScreen(find_code(self.reading.page.code)))
        except EngineError as error:
            self.app.notify(str(error), severity="error", markup=False)

    def action_lessons(self) -> None:
        """Choose another lesson."""
        choose = getattr(self.app, "choose_lesson", None)
        if choose is not None:
            choose()


class CodePanel(LinePanel):
    """Source with line numbers; comments and docstrings are dim."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "up", show=False, id="code.up"),
        Binding("down,j", "scroll(1)", "down", show=False, id="code.down"),
        Binding("pageup", "scroll(-20)", "page up", show=False, id="code.page_up"),
        Binding("pagedown,space", "scroll(20)", "page down", show=False, id="code.page_down"),
    ]

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.top = 0

    def picture(self, view: View, width: int, height: int) -> Picture:
        rows: list[Runs] = []
        for i, (line, style) in enumerate(zip(self.code.lines, code_styles(self.code.lines), strict=True)):
            lead = f"{self.code.first + i:>5}  "
            for piece in broken(line.expandtabs(4), width - len(lead)):
                rows.append(Row(lead, "faint").add(piece, style).done(width))
                lead = " " * len(lead)
        self.top = max(0, min(self.top, len(rows) - height))
        name = self.code.reference.partition(":")[2]
        left = len(rows) - self.top - height
        legend = [(f"{left} lines more" if left > 0 else "esc closes", "dim")]
        return Picture(rows[self.top : self.top + height], f"{self.code.path}  {name}".rstrip(), legend=legend)

    def action_scroll(self, lines: int) -> None:
        """Up or down."""
        self.top += lines
        self.repaint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_scroll(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_scroll(-3)


def broken(line: str, width: int) -> list[str]:
    """A line of code in pieces of at most `width` cells; what follows the first stands eight deeper than it."""
    hang = len(line) - len(line.lstrip()) + 8
    if len(line) <= width or width - hang < LEAST_CODE:
        return [line]
    pieces = textwrap.wrap(line, width, subsequent_indent=" " * hang, break_on_hyphens=False)
    return pieces or [line]


def code_styles(lines: list[str]) -> list[str]:
    """A style for each line of Python: what says why is dim, what names things is bold."""
    styles, inside = [], False
    for line in lines:
        text = line.strip()
        marks = text.count('"""')
        if inside or text.startswith(('"""', 'r"""')):
            styles.append("dim")
            inside = inside != (marks == 1)
        elif text.startswith("#"):
            styles.append("dim")
        else:
            styles.append("bold ink" if text.startswith(("def ", "class ", "async def ")) else "ink")
    return styles


class CodeScreen(Overlay[None]):
    """A piece of the installed source."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,v", "dismiss", "close", show=False, id="code.close")]
    DEFAULT_CSS = """
    CodeScreen {
        align: center middle;
        & CodePanel { width: 96%; max-width: 132; height: 94%; }
    }
    """

    def __init__(self, code: Code) -> None:
        super().__init__()
        self._code = code

    def compose(self) -> ComposeResult:
        yield CodePanel(self._code)

    def on_mount(self) -> None:
        self.query_one(CodePanel).focus()

    def paint(self, view: View) -> None:
        """Draw the code."""
        self.query_one(CodePanel).paint(view)
