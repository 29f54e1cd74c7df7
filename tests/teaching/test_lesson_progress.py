"""What was read and predicted in the lessons is kept over restarts; a damaged file is a fresh start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minitui.teaching.lesson_progress import LessonProgress
from minitui.teaching.lessons import LESSONS, lesson

PAGED = lesson(3)
ASKED = next(at for at, page in enumerate(PAGED.pages) if page.predict is not None)


def test_marks_are_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "lessons.json"
    progress = LessonProgress(path)
    assert progress.summary(PAGED) == "" and progress.resume_at(PAGED) == 0
    progress.mark_read(PAGED, 0)
    progress.mark_predicted(PAGED, ASKED, 1)
    again = LessonProgress(path)
    assert again.read(PAGED) == {0} and again.predictions(PAGED) == {ASKED: 1} and again.resume_at(PAGED) == 1
    asked = sum(page.predict is not None for page in PAGED.pages)
    assert again.summary(PAGED) == f"1 of {len(PAGED.pages) + 1} pages read, 1 of {asked} predictions made"
    assert all(again.summary(one) == "" for one in LESSONS if one is not PAGED)
    for at in range(len(PAGED.pages) + 1):
        again.mark_read(PAGED, at)
    assert again.summary(PAGED).startswith("all pages read") and again.resume_at(PAGED) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["lessons.json"], "no temporary file is left"


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"version": 2, "lessons": {}}', '{"version": 1}', '{"version": 1, "lessons": []}',
        '{"version": 1, "lessons": {"x": {}}}', '{"version": 1, "lessons": {"3": {"read": 1, "predicted": {}}}}',
        '{"version": 1, "lessons": {"3": []}}', "[" * 100_000, " " * (1 << 21), b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_a_fresh_start(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "lessons.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    progress = LessonProgress(path)
    assert all(progress.summary(one) == "" for one in LESSONS)
    progress.mark_read(PAGED, 2)
    assert LessonProgress(path).read(PAGED) == {2}, "the damaged file is replaced"


def test_marks_that_fit_no_page_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "lessons.json"
    title = PAGED.pages[ASKED].title
    marks = {"read": ["no such page", 5, PAGED.pages[1].title], "predicted": {title: 17, "no such page": 1}}
    path.write_text(json.dumps({"version": 1, "lessons": {"3": marks, "99": marks}}))
    progress = LessonProgress(path)
    assert progress.read(PAGED) == {1} and progress.predictions(PAGED) == {}


def test_a_directory_that_cannot_be_written_does_not_stop_the_lesson(tmp_path: Path) -> None:
    progress = LessonProgress(tmp_path / "missing" / "lessons.json")
    progress.mark_read(PAGED, 0)
    assert progress.read(PAGED) == {0}
