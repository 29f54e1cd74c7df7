"""The lessons as one file for a class: Markdown, a page, and PDF."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from engine.errors import EngineError
from minitui.export.handout import _picture, check_file, write_handout
from minitui.export.handout_parts import Part, Picture, to_html, to_markdown
from minitui.export.png import find_browser
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.rows import Runs, plain
from minitui.viewmodel.compare.runs import recorded_view
from tests.support.app.fake_client import ByteCodec, FakeSource, sampling


async def greet(stage: Stage) -> Seen:
    session = stage.chat("short", max_tokens=20, whole=True)
    await stage.ask(session, "hello")
    await stage.step(3)
    return Seen(f"the engine stands at step {stage.state().step}:\n\n   a table\n   of lines", 1)


async def stumble(stage: Stage) -> Seen:
    raise EngineError("the experiment was not possible: \x1b[31m")


def lesson(number: int, **options: Any) -> Lesson:
    asked = Prediction("What?", ("this", "that"), ("it would be *this*.", ""))
    return Lesson(
        number, "Test", "Does it work?",
        (
            Page("First", "\nSome <|im_start|> text\nin lines.\n\n  a   b\n  c   d\n", "step",
                 "engine.core.engine:Engine", greet, asked),
            Page("Second", "\nMore text.\n", "tree", "", stumble),
        ),
        greet,
        (
            Check("How many?", "lanes", "the lanes.", lambda stage: f"{len(stage.state().requests)} request"),
            Check("Which?", "occupancy", "the pool.", lambda stage: "that"),
            Check("Why?", "lanes", "the lanes.", lambda stage: "because"),
        ),
        options,
    )


async def written(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    told: list[str] = []
    restarts: list[dict[str, Any]] = []

    async def restart(options: dict[str, Any]) -> None:
        restarts.append(options)

    await write_handout(
        path, [lesson(1), lesson(2, kv_blocks=7)], FakeSource(), "short", sampling(20), restart, told.append,
        lambda info: ByteCodec(),
    )
    return told, restarts


async def test_all_lessons_are_one_markdown_file_with_the_answers_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "class.md"
    assert await written(path) == (["L1 Test", "L2 Test"], [{"kv_blocks": 7}])
    text = path.read_text()
    pages, _, results = text.partition("# Results and answers\n")
    assert re.findall(r"^## (.*)", pages, re.M) == re.findall(r"^## (.*)", results, re.M) == ["L1 Test", "L2 Test"]
    assert "Some \\<|im\\_start|> text in lines." in pages and "~~~~text\n  a   b\n  c   d\n~~~~" in pages
    assert "Predict: What?\n\n- a) this\n- b) that" in pages and "The answer is" not in pages
    assert "Code: engine/core/engine.py, line " in pages
    assert "1\\. How many? See the lanes." in pages and pages.count("Batch lanes") == 2, "one picture for two questions"
    assert "The answer is b) that\n\n- If a were true, it would be \\*this\\*." in results
    assert "the engine stands at step" in results and "of 256 tokens" in results, "the picture of the experiment"
    assert "The experiment stopped: the experiment was not possible: ␛[31m".replace("[", "\\[") in results
    assert "1\\. 1 request" in results and "\x1b" not in text


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
async def test_the_same_as_pdf_with_an_outline(tmp_path: Path) -> None:
    path = tmp_path / "class.pdf"
    await written(path)
    pdf = path.read_bytes()
    assert pdf.startswith(b"%PDF-") and b"/Outlines" in pdf and b"/FontFile2" in pdf
    assert len(re.findall(rb"/Type /Page\b", pdf)) >= 2, "the answers begin on a page of their own"


def test_a_page_keeps_the_columns_of_a_picture_and_lets_no_text_be_markup() -> None:
    rows: list[Runs] = [(("█░", "decode"), ("漢 <b>", "bold ink on cached-chip"))]
    page = to_html([
        Part("h2", "a < b"), Part("item", "use `<think>`\x1b"), Part("picture", picture=Picture("Pool", rows, []))
    ])
    assert "<h2>a &lt; b</h2>" in page and "– use <code>&lt;think&gt;</code>␛" in page
    places = re.findall(r"<text x='(\d+)' .*? textLength='(\d+)'", page)
    assert places == [("0", "12"), ("12", "36")], "a wide character takes two cells"
    assert re.findall(r"<rect x='(\d+)'", page) == ["12"] and "font-weight='bold'>漢 &lt;b&gt;</text>" in page
    ElementTree.fromstring(re.findall("<svg.*</svg>", page)[0])


def test_markdown_keeps_what_is_quoted_and_escapes_the_rest() -> None:
    parts = [Part("text", "a <b> *c* `max_tokens` snake_case"), Part("pre", "x"), Part("text", "2. no list")]
    assert to_markdown(parts) == (
        "a \\<b> \\*c\\* `max_tokens` snake\\_case\n\n~~~~text\nx\n~~~~\n\n2\\. no list\n"
    )


def test_a_file_that_cannot_be_written_is_told_before_the_experiments(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"must end with \.md, \.html or \.pdf"):
        check_file(tmp_path / "class.docx")
    with pytest.raises(EngineError, match="there is no directory"):
        check_file(tmp_path / "none" / "class.md")


def test_the_timings_have_the_means_per_step_which_a_lesson_asks_for() -> None:
    view = recorded_view(TraceReader(find_trace("small-pool")))
    view.frame(0.0)
    rows = [plain(row) for row in _picture("timings", cast(Stage, SimpleNamespace(view=view))).rows]
    assert any(row.startswith("host") and "ms per step" in row for row in rows), rows
