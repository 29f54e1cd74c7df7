"""The text of a lesson: its pages, the reader's predictions, the results of the experiments, and the keys of a page."""

from __future__ import annotations

from minitui.teaching.lessons import neighbour
from minitui.teaching.lessons.page import Lesson, Page, Prediction, Seen, paragraphs
from minitui.teaching.prediction import LETTERS, verdict
from minitui.teaching.reading import Reading
from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import Picture, ScrollPanel
from minitui.tui.widgets.rows import Row
from minitui.viewmodel.view import View


def hints(reading: Reading, idle: bool) -> list[tuple[str, str]]:
    """Returns (key, effect) for the status bar: the keys of the current page, then those of all pages. `idle`: no
    request runs."""
    step = [] if idle or reading.running else [("n", "step")]
    keys = [*own_keys(reading), *turn_keys(reading, short=True)]
    return [*keys, ("L", "lessons"), ("?", "help"), ("q", "quit"), *step, ("2", "inspect")]


def own_keys(reading: Reading) -> list[tuple[str, str]]:
    """Returns (key, effect) of the keys that act on the current page, the most important first."""
    page = reading.page
    if page is None:
        answer = [("enter", "run again" if reading.disturbed else "answer")] if reading.can_answer else []
        return [*answer, ("tab", "question")]
    keys: list[tuple[str, str]] = []
    if reading.running:
        keys += [] if reading.hurried else [("enter", "next picture"), ("e", "end")]
    elif reading.asks:
        keys += [(" ".join(letters(page)), "predict"), *[("r", "run")] * reading.asked]
    elif page.run is not None:
        keys.append(("r", "again") if reading.at in reading.seen else ("enter", "run"))
    if page.type_in is not None:
        keys.append(("i", page.type_in.title.lower()))
    if page.code:
        keys.append(("v", "code"))
    return keys


def turn_keys(reading: Reading, short: bool = False) -> list[tuple[str, str]]:
    """Returns (key, effect) of the keys that turn pages. `short`: one entry for both."""
    before = neighbour(reading.lesson, -1) is not None
    if short or (reading.at and reading.page is not None):
        return [("left/right", "pages") if reading.at or before else ("right", "next page")]
    if reading.page is None:
        return [*[("right", "next lesson")] * (neighbour(reading.lesson, 1) is not None), ("left", "back")]
    return [("right", "next page"), *[("left", "lesson before")] * before]


def fitting_keys(reading: Reading, width: int, above: str = "") -> str:
    """Returns `above` and the page's keys in at most `width` cells; the last keys are left out first."""
    keys = own_keys(reading) + turn_keys(reading)
    parts = [above] * bool(above) + [f"{key} {effect}" for key, effect in keys]
    gap = separator()
    while len(parts) > 1 and len(gap.join(parts)) > width:
        parts.pop()
    return gap.join(parts)


def separator() -> str:
    """Returns what is between two keys of a legend."""
    return f" {glyphs().middot} "


def letters(page: Page) -> str:
    """Returns the letters of the choices of the page's prediction; empty without a prediction."""
    return LETTERS[: len(page.predict.choices)] if page.predict is not None else ""


MAX_TEXT_WIDTH = 100  # columns; longer lines are hard to read
PREDICT = "Predict: "
LEGEND_ENDS = 2  # cells of the text's width that its legend cannot have
DISTURBED = "The panels have changed. Enter runs the end of the lesson again."
EARLIER = "The panel shows this run. Since then another page has used the engine; key r runs this page again."
CLOSED = "The panels show the run of these questions. Since then another page has used the engine."


class LessonText(ScrollPanel):
    """The text of a page, the prediction and the result. Scrolls if it does not fit."""

    TITLE = "Text"
    _aim = ""  # what the next paint scrolls to: "end" or "experiment"
    _height = 0  # at the last paint
    _below = 0  # lines that did not fit at the last paint

    def __init__(self, reading: Reading, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.reading = reading

    def follow(self) -> None:
        """Scroll to the end at the next paint, to show new lines."""
        self._aim = "end"

    def to_experiment(self) -> None:
        """Scroll at the next paint until the prediction, or the result if there is none, is the first line shown. Lines
        above stay in sight if there is room. A result that needs more room takes the lines of the question, too."""
        self._aim = "experiment"

    def scroll_page(self, pages: int) -> bool:
        """Scroll down by the height of the panel, or up if `pages` is negative. Returns False if no line is there."""
        if not (self._below if pages > 0 else self.top):
            return False
        self.action_scroll(pages * max(1, self._height - 1))
        return True

    def picture(self, view: View, width: int, height: int) -> Picture:
        reading = self.reading
        columns = min(width, MAX_TEXT_WIDTH)
        lines = page_lines(reading, columns)
        rows = [Row(text, style).done(width) for text, style in lines]
        if height < self._height and reading.panel_has_content and not self._aim:  # a panel has appeared
            self._aim = "experiment" if reading.page is not None else "end" if reading.question else ""
        if self._aim:
            self.top = len(rows)
            if self._aim == "experiment" and reading.page is not None:
                first = len(_text_lines(reading.page, columns)) + 1
                self.top = min(first + _question_lines(reading, columns), max(first, len(rows) - height))
            self._aim = ""
        self._height = height
        shown, below = self.window(rows, height)
        self._below = below
        title = f"{reading.lesson.name} {glyphs().middot} {reading.at + 1} of {reading.pages}"
        above = f"up: {count(self.top, 'more line')}" if self.top else ""
        legend = [(fitting_keys(reading, width - LEGEND_ENDS, above), "dim")]
        if below:
            above = f"up: {count(self.top, 'line')}; " if self.top else ""
            down = f"down, page down: {count(below, 'more line')}"
            gap = separator()
            room = width - LEGEND_ENDS - len(above + down + gap)
            keys = fitting_keys(reading, room)
            legend = [(above, "dim"), (down, "accent"), (gap + keys if len(keys) <= room else "", "dim")]
        return Picture(shown, title, legend=legend)


def _running(reading: Reading) -> str:
    """Returns what a running experiment does at its pauses, and the keys for them."""
    if reading.hurried:
        return "The experiment runs without pauses."
    if reading.by_hand:
        return "The experiment waits. Enter: the next picture. Key e: run to the end."
    return "The experiment runs. Enter: the next picture. Key e: run to the end."


def _hint(reading: Reading, page: Page) -> tuple[str, str]:
    """Returns the line, with its style, that says what the reader does next on a page with an experiment."""
    if not reading.asks:
        if reading.waits:
            return "The engine is starting. Then the experiment runs.", "running"
        chosen = reading.predicted.get(reading.at) if page.predict is not None else None
        said = f"You chose {LETTERS[chosen]}. " if chosen is not None else ""
        return f"{said}Press enter to run the experiment.", "running"
    choices = " or ".join(", ".join(letters(page)).rsplit(", ", 1))
    if reading.asked:
        return f"First choose {choices}. Key r runs it without a choice.", "bold accent"
    return f"Choose {choices}. Then enter runs the experiment.", "running"


def page_lines(reading: Reading, width: int) -> list[tuple[str, str]]:
    """Returns the lines of the current page as (text, style)."""
    page = reading.page
    if page is None:
        return _closing(reading, width)
    lines = _text_lines(page, width)
    seen = reading.seen.get(reading.at)
    if page.predict is not None:
        lines.append(("", "ink"))
        lines += [(line, "bold ink") for line in paragraphs(f"{PREDICT}{page.predict.question}", width)]
        lines += _choices(reading, page.predict, width)
    if reading.at in reading.failed:
        lines += [("", "ink"), *((line, "bad") for line in paragraphs(reading.failed[reading.at], width))]
    elif reading.running and page.run is not None:
        lines += [("", "ink"), *((line, "running") for line in paragraphs(_running(reading), width))]
    elif seen is not None:
        lines += _result(reading, page, seen, width)
        if reading.at in reading.views:
            lines += [("", "ink"), *((line, "dim") for line in paragraphs(EARLIER, width))]
    elif page.run is not None:
        hint, style = _hint(reading, page)
        lines += [("", "ink"), *((line, style) for line in paragraphs(hint, width))]
    if page.code and seen is None:  # the result needs the room
        path, _, name = page.code.partition(":")
        lines += [("", "ink"), (f"v: {path.replace('.', '/')}.py  {name}".rstrip(), "dim")]
    return lines


def _question_lines(reading: Reading, width: int) -> int:
    """Returns the number of lines of the page's question that a long result may push out of sight."""
    predict = reading.page.predict if reading.page is not None else None
    if predict is None or reading.at not in reading.seen:
        return 0
    return len(paragraphs(f"{PREDICT}{predict.question}", width))


def _choices(reading: Reading, predict: Prediction, width: int) -> list[tuple[str, str]]:
    """Returns the choices of a prediction; beside a result only the chosen one and then the right one."""
    seen, predicted = reading.seen.get(reading.at), reading.predicted.get(reading.at)
    right = seen.answer if seen is not None else None
    shown = list(range(len(predict.choices)))
    if right is not None:  # the result needs the room
        shown = [right] if predicted in (None, right) else [predicted, right]
    lines = []
    for i in shown:
        mark = glyphs().right if i == right else glyphs().arrow if predicted == i else " "
        style = "bold good" if i == right else "bold accent" if predicted == i else "dim" if seen else "ink"
        for n, piece in enumerate(paragraphs(predict.choices[i], width - 5)):
            lines.append((f"{mark} {LETTERS[i]}) {piece}" if n == 0 else f"     {piece}", style))
    return lines


def _result(reading: Reading, page: Page, seen: Seen, width: int) -> list[tuple[str, str]]:
    """Returns the sentence about the prediction, and the result. No empty line is beside a line of a table: a small
    screen has few lines."""
    lines = [] if page.predict is not None and seen.answer is not None else [("", "ink")]
    if seen.answer is not None:
        predicted = reading.predicted.get(reading.at)
        said = verdict(predicted, seen.answer)
        why = page.predict.explain(predicted) if page.predict is not None and predicted is not None else ""
        lines += [(line, "ink" if why else "bold good") for line in paragraphs(f"{said} {why}".strip(), width)]
    text = ["", *paragraphs(seen.text, width), ""]
    for before, line, after in zip(text, text[1:], text[2:], strict=False):
        if line or not (before.startswith(" ") or after.startswith(" ")):
            lines.append((line, "hit"))
    return lines


def _text_lines(page: Page, width: int) -> list[tuple[str, str]]:
    """Returns the title and the text of a page. A blank line follows, then the prediction or the result."""
    return [(page.title, "bold hit"), ("", "ink"), *((line, "ink") for line in paragraphs(page.text, width))]


def _closing(reading: Reading, width: int) -> list[tuple[str, str]]:
    lines = [("Three questions. The panels show the answers.", "bold hit"), ("", "ink")]
    for i, check in enumerate(reading.lesson.checks):
        chosen = i == reading.question
        mark = glyphs().arrow if chosen else " "
        for n, piece in enumerate(paragraphs(check.question, width - 5)):
            lines.append((f"{mark} {i + 1}. {piece}" if n == 0 else f"     {piece}", "bold ink" if chosen else "ink"))
        if i in reading.revealed:
            lines += [(f"     {piece}", "hit") for piece in paragraphs(reading.answers[i], width - 5)]
        elif chosen and reading.disturbed:
            lines += [(f"     {piece}", "bold accent") for piece in paragraphs(DISTURBED, width - 5)]
        elif chosen:
            lines += [(f"     {piece}", "dim") for piece in paragraphs(f"See {check.where}", width - 5)]
        lines.append(("", "ink"))
    if reading.all_revealed:
        lines += [(line, "bold accent") for line in paragraphs(_end(reading.lesson), width)]
    elif reading.failed.get(reading.at):
        lines += [(line, "bad") for line in paragraphs(reading.failed[reading.at], width)]
    elif not reading.prepared:
        then = " Then the answer is shown." if reading.asked else ""
        lines.append(("The engine is " + ("being prepared." if reading.ready else "starting.") + then, "running"))
    if reading.at in reading.views:
        lines += [(line, "dim") for line in paragraphs(CLOSED, width)]
    return lines


def _end(lesson: Lesson) -> str:
    forward = neighbour(lesson, 1)
    if forward is None:
        return "This was the last lesson. Key L shows all lessons."
    return f"This lesson ends here. The right arrow key opens {forward.name}."
