"""Writes the lessons for a class as one file: texts and questions, then results with pictures, and answers. All
experiments run once, so the pictures and the numbers are those of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui import __version__
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import load_codec
from minitui.export.handout_parts import COLUMNS, Part, Picture, to_html, to_markdown
from minitui.export.png import NEEDED, find_browser, write_pdf
from minitui.sources.base import Source
from minitui.teaching.lessons.page import Lesson, Page, find_code, fresh, paragraphs
from minitui.teaching.prediction import LETTERS
from minitui.teaching.stage import Restart, Stage, plain_stage
from minitui.tui.widgets.lesson.panels import HEIGHTS, PANELS, PARTNERS
from minitui.tui.widgets.rows import plain
from minitui.visible import visible

ROWS = 16  # of a picture; HEIGHTS has smaller ones
OTHER = {"gpu": 22, "attention": 20, "timings": 10}  # higher, Timings has a list in place of the means per step
WHOLE_LINE = 1 << 20  # a paragraph is one line: the reader's program wraps it
SUFFIXES = (".md", ".html", ".pdf")


@dataclass
class Handout:
    """The parts of the lessons, and after them the parts of the results."""

    lessons: list[Part] = field(default_factory=list)
    results: list[Part] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        return [*self.lessons, Part("h1", "Results and answers"), *self.results]


def check_file(path: Path) -> None:
    """Raises EngineError if a handout cannot be written to this file."""
    if path.suffix.lower() not in SUFFIXES:
        raise EngineError(f"--handout {path}: the name of the file must end with {', '.join(SUFFIXES[:2])} or .pdf")
    if not path.parent.is_dir():
        raise EngineError(f"--handout {path}: there is no directory {path.parent}")
    if path.suffix.lower() == ".pdf" and find_browser() is None:
        raise EngineError(f"--handout {path}: PDF {NEEDED} name a file that ends with .html")


async def write_handout(
    path: Path, lessons: Sequence[Lesson], source: Source, system: str, sampling: Sampling, restart: Restart,
    tell: Callable[[str], None] = lambda text: None, load: Any = load_codec,
) -> None:
    """Runs all experiments and writes the file. The engine of `source`, which is not started yet, must have the options
    of the first lesson; `restart` replaces it. `tell` gets the name of each lesson when it begins."""
    check_file(path)
    async with plain_stage(
        source, sampling, load, system=system, say=lambda text: None, restart=restart, beat=0.0
    ) as stage:
        stage.show = lambda session: stage.view.select("group", session.id)  # as in the app
        info = stage.source.info
        handout = Handout()
        handout.lessons += [
            Part("h1", "How LLM inference works"),
            Part(
                "text",
                f"The lessons of minitui {__version__}. Read a page, predict, discuss; then compare with the results. "
                f"The experiments ran with {info.model} on {info.device}. Run them yourself: minitui lesson.",
            ),
        ]
        for number, lesson in enumerate(lessons):
            tell(lesson.name)
            stage.home = lesson.options
            if number:
                await stage.other_engine(**lesson.options)
            stage.view.texts.ids_to_text = stage.codec.decode
            await _add_lesson(handout, lesson, stage)
    if path.suffix.lower() == ".pdf":
        write_pdf(to_html(handout.parts), path)
        return
    try:
        path.write_text((to_html if path.suffix.lower() == ".html" else to_markdown)(handout.parts), encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}; name another file") from None


async def _add_lesson(handout: Handout, lesson: Lesson, stage: Stage) -> None:
    handout.lessons += [Part("h2", lesson.name), Part("text", lesson.question)]
    handout.results.append(Part("h2", lesson.name))
    for page in lesson.pages:
        handout.lessons += _page(page)
        if page.run is not None:
            handout.results += [Part("h3", page.title), *await _experiment(page, stage)]
    await fresh(stage)
    await lesson.close(stage)
    stage.view.frame(time.monotonic())
    handout.lessons.append(Part("h3", "Three questions"))
    handout.results.append(Part("h3", "Three questions"))
    for number, check in enumerate(lesson.checks, 1):
        handout.lessons.append(Part("text", f"{number}. {check.question} See {check.where}"))
        handout.results.append(Part("text", f"{number}. {visible(check.answer(stage))}"))
    for panel in dict.fromkeys(check.panel for check in lesson.checks):
        handout.lessons += _pictures(panel, stage)


def _page(page: Page) -> list[Part]:
    parts = [Part("h3", page.title), *_text(page.text)]
    if page.code:
        code = find_code(page.code)
        parts.append(Part("text", f"Code: {code.path}, line {code.first}"))
    if page.predict is not None:
        parts.append(Part("text", f"Predict: {page.predict.question}"))
        parts += [Part("item", f"{LETTERS[i]}) {choice}") for i, choice in enumerate(page.predict.choices)]
    return parts


async def _experiment(page: Page, stage: Stage) -> list[Part]:
    """Runs the experiment of a page; returns its result."""
    assert page.run is not None
    try:
        await fresh(stage)
        seen = await page.run(stage)
    except EngineError as error:
        return [Part("text", f"The experiment stopped: {visible(str(error))}")]
    stage.view.frame(time.monotonic())
    parts: list[Part] = []
    if page.predict is not None and seen.answer is not None:
        parts.append(Part("text", f"The answer is {LETTERS[seen.answer]}) {page.predict.choices[seen.answer]}"))
        whys = [page.predict.explain(i) for i in range(len(page.predict.choices)) if i != seen.answer]
        parts += [Part("item", why) for why in whys if why]
    return [*parts, *_text(visible(seen.text)), *_pictures(page.panel, stage)]


def _pictures(panel: str, stage: Stage) -> list[Part]:
    """Returns the panel, and the panel that a wide screen shows under it."""
    names = [name for name in (panel, PARTNERS.get(panel, "")) if name]
    return [Part("picture", picture=_picture(name, stage)) for name in names]


def _picture(name: str, stage: Stage) -> Picture:
    small = HEIGHTS.get(name, ROWS)
    height = OTHER.get(name, small if small < 5 else max(small, ROWS))
    picture = PANELS[name]().picture(stage.view, COLUMNS, height)
    rows = picture.rows[:height]
    while rows and not plain(rows[-1]).strip():
        rows = rows[:-1]
    return Picture(picture.title or PANELS[name].TITLE or name, rows, picture.legend)


def _text(text: str) -> list[Part]:
    """Returns the paragraphs of a page; consecutive lines that begin with a space stay lines."""
    parts: list[Part] = []
    for line in paragraphs(text, WHOLE_LINE):
        if line.startswith(" "):
            lines = "\n".join(paragraphs(line, COLUMNS))
            if parts and parts[-1].kind == "pre":
                lines = parts.pop().text + "\n" + lines
            parts.append(Part("pre", lines))
        elif line:
            parts.append(Part("text", line))
    return parts
