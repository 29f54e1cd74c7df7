"""The keys of a lesson's page, as the status bar and the frame of the text name them."""

from __future__ import annotations

from minitui.teaching.lessons import neighbour
from minitui.teaching.lessons.page import Page
from minitui.teaching.prediction import LETTERS
from minitui.teaching.reading import Reading
from minitui.tui.glyphs import glyphs


def hints(reading: Reading, idle: bool) -> list[tuple[str, str]]:
    """Returns (key, effect) for the status bar: the keys of the current page, then those of all pages. `idle`: no
    request runs."""
    page = reading.page
    back = reading.at or neighbour(reading.lesson, -1) is not None
    keys = [("left/right", "pages") if back else ("right", "next page")]
    if page is None:
        answer = [("enter", "run again" if reading.disturbed else "answer")] if reading.can_answer else []
        keys = [*answer, ("tab", "question"), *keys]
    else:
        if reading.running:
            keys += [] if reading.hurried else [("enter", "next picture"), ("e", "end")]
        elif reading.asks:
            keys.append((" ".join(letters(page)), "predict"))
            keys += [("r", "run")] if reading.asked else []
        elif page.run is not None:
            keys.append(("r", "run again") if reading.at in reading.seen else ("enter", "run"))
        if page.type_in is not None:
            keys.append(("i", page.type_in.title.lower()))
        if page.code:
            keys.append(("v", "code"))
    step = [] if idle or reading.running else [("n", "step")]
    return [*keys, ("L", "lessons"), ("?", "help"), ("q", "quit"), *step, ("2", "inspect")]


def fitting_keys(reading: Reading, width: int, above: str = "") -> str:
    """Returns `above` and the page's keys in at most `width` cells; the last keys are left out first."""
    parts = [above, *_page_keys(reading)] if above else _page_keys(reading)
    gap = separator()
    while len(parts) > 1 and len(gap.join(parts)) > width:
        parts.pop()
    return gap.join(parts)


def separator() -> str:
    """Returns what is between two keys of a legend."""
    return f" {glyphs().middot} "


def _page_keys(reading: Reading) -> list[str]:
    """Returns the keys of the current page, each with its effect; the most important first."""
    page = reading.page
    if page is None:
        forward = neighbour(reading.lesson, 1) is not None
        answer = ["enter runs again" if reading.disturbed else "enter shows answer"] if reading.can_answer else []
        return [*answer, "tab next question", "right next lesson" if forward else "L lessons", "left back"]
    parts = []
    if page.run is not None:
        if reading.running:
            parts += [] if reading.hurried else ["enter next picture", "e end"]
        elif reading.at in reading.seen:
            parts.append("r again")
        elif reading.asks:
            parts += [f"{' '.join(letters(page))} predict", *(["r run"] if reading.asked else [])]
        else:
            parts.append("enter runs")
    if page.type_in is not None:
        parts.append(f"i {page.type_in.title.lower()}")
    if page.code:
        parts.append("v code")
    if reading.at:
        return [*parts, "left/right pages"]
    return [*parts, "right next page", *(["left lesson before"] if neighbour(reading.lesson, -1) is not None else [])]


def letters(page: Page) -> str:
    """Returns the letters of the choices of the page's prediction; empty without a prediction."""
    return LETTERS[: len(page.predict.choices)] if page.predict is not None else ""
