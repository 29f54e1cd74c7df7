"""What the reader has read and predicted in the lessons, kept in a small file over restarts."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minitui.settings import replace_file
from minitui.teaching.lessons.page import Lesson
from minitui.text import count

FILE = "lessons.json"  # in the data directory
VERSION = 1
LARGEST = 1 << 20  # bytes; a larger file was not written here
CLOSING = "closing questions"  # the name of the last page


@dataclass
class Marks:
    """The marks of one lesson. Pages are kept by their titles, so a new page in between changes no mark."""

    read: set[str] = field(default_factory=set)
    predicted: dict[str, int] = field(default_factory=dict)  # title -> choice


class LessonProgress:
    """The marks of all lessons, by the lesson's number. `path`: the file; None: the marks are not kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._marks = _load(path) if path is not None else {}

    def _of(self, lesson: Lesson) -> Marks:
        return self._marks.setdefault(lesson.number, Marks())

    # ---- reading

    def read(self, lesson: Lesson) -> set[int]:
        """Returns the indices of the pages that have been read. The last index is that of the closing questions."""
        titles = self._of(lesson).read
        return {at for at, title in enumerate(_titles(lesson)) if title in titles}

    def predictions(self, lesson: Lesson) -> dict[int, int]:
        """Returns {index of a page: the choice} for the predictions made."""
        choices = self._of(lesson).predicted
        return {
            at: choices[page.title]
            for at, page in enumerate(lesson.pages)
            if page.predict is not None and choices.get(page.title, -1) in range(len(page.predict.choices))
        }

    def resume_at(self, lesson: Lesson) -> int:
        """Returns the index of the first page that has not been read; 0 if none or all have been read."""
        read = self.read(lesson)
        return next((at for at in range(len(lesson.pages) + 1) if at not in read), 0)

    def summary(self, lesson: Lesson) -> str:
        """Returns "3 of 7 pages read, 1 of 2 predictions made"; empty if nothing has been read."""
        read, made = len(self.read(lesson)), len(self.predictions(lesson))
        if not read and not made:
            return ""
        asked = sum(page.predict is not None for page in lesson.pages)
        pages = len(lesson.pages) + 1
        told = "all pages read" if read == pages else f"{read} of {count(pages, 'page')} read"
        return told + (f", {made} of {count(asked, 'prediction')} made" if asked else "")

    # ---- writing

    def mark_read(self, lesson: Lesson, at: int) -> None:
        """Keep that this page has been read."""
        title = _titles(lesson)[at]
        if title not in self._of(lesson).read:
            self._of(lesson).read.add(title)
            self._save()

    def mark_predicted(self, lesson: Lesson, at: int, choice: int) -> None:
        """Keep a prediction."""
        title = _titles(lesson)[at]
        if self._of(lesson).predicted.get(title) != choice:
            self._of(lesson).predicted[title] = choice
            self._save()

    def _save(self) -> None:
        """Replace the file. A directory that cannot be written loses the marks, not the lesson."""
        if self.path is None:
            return
        lessons = {
            str(number): {"read": sorted(marks.read), "predicted": marks.predicted}
            for number, marks in sorted(self._marks.items())
            if marks.read or marks.predicted
        }
        text = json.dumps({"version": VERSION, "lessons": lessons}, indent=1, ensure_ascii=False)
        with suppress(OSError):
            replace_file(self.path, text)


def _titles(lesson: Lesson) -> list[str]:
    return [*(page.title for page in lesson.pages), CLOSING]


def _load(path: Path) -> dict[int, Marks]:
    """Returns the marks in the file; none if the file is missing or damaged."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return {}
        return {int(number): _marks(kept) for number, kept in found["lessons"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _marks(kept: dict[str, Any]) -> Marks:
    return Marks(
        {title for title in kept["read"] if isinstance(title, str)},
        {title: choice for title, choice in kept["predicted"].items() if type(choice) is int},
    )
