"""Prints a lesson as lines of text, for pipes and screen readers. Runs every experiment and gives every answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import load_codec
from minitui.sources.base import Source
from minitui.teaching.lessons.page import Lesson, Page, find_code, fresh, paragraphs
from minitui.teaching.stage import LETTERS, Restart, Stage, plain_stage

WIDTH = 88


async def print_lesson(lesson: Lesson, stage: Stage, out: Callable[[str], None]) -> None:
    """Prints the lesson, from its first page to its last question. The engine must run with the lesson's options."""
    out(f"{lesson.name}: {lesson.question}")
    for number, page in enumerate(lesson.pages, 1):
        out(f"\n-- {number} of {len(lesson.pages) + 1}: {page.title}\n")
        await _print_page(page, stage, out)
    out(f"\n-- {len(lesson.pages) + 1} of {len(lesson.pages) + 1}: Three questions\n")
    await fresh(stage)
    await lesson.close(stage)
    stage.view.frame(time.monotonic())
    for number, check in enumerate(lesson.checks, 1):
        for line in paragraphs(
            f"{number}. {check.question}\n\nSee: {check.where}\n\nAnswer: {check.answer(stage)}", WIDTH
        ):
            if line:
                out(line)


async def _print_page(page: Page, stage: Stage, out: Callable[[str], None]) -> None:
    for line in paragraphs(page.text, WIDTH):
        out(line)
    if page.code:
        code = find_code(page.code)
        out(f"\nThe code: {code.path}, line {code.first}, {page.code.partition(':')[2] or 'the whole file'}")
    if page.predict is not None:
        out("\nPredict: " + page.predict.question)
        for letter, choice in zip(LETTERS, page.predict.choices, strict=False):
            out(f"  {letter}) {choice}")
    if page.run is not None:
        await fresh(stage)
        seen = await page.run(stage)
        if page.predict is not None and seen.answer is not None:
            out(f"\nThe answer is {LETTERS[seen.answer]}) {page.predict.choices[seen.answer]}")
            for wrong in range(len(page.predict.choices)):
                if why := page.predict.explain(wrong):
                    for line in paragraphs(why, WIDTH):
                        out(line)
        out("")
        for line in paragraphs(seen.text, WIDTH):
            out(line)


async def print_with_own_engine(
    lesson: Lesson, source: Source, system: str, sampling: Sampling, out: Callable[[str], None], load: Any = load_codec,
    restart: Restart | None = None,
) -> int:
    """Starts the engine, prints the lesson and closes the engine; returns the exit code. `restart`: see Stage."""
    async with plain_stage(
        source, sampling, load, system=system, say=lambda text: None, beat=0.0, restart=restart, home=lesson.options
    ) as stage:
        stage.view.texts.ids_to_text = stage.codec.decode
        await print_lesson(lesson, stage, out)
    return 0
