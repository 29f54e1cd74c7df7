"""Lessons run to their end unattended, tell what happened, fit a small screen, and point at code that exists."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.scheduler import SchedulerConfig
from engine.errors import EngineError
from engine.text.tokenizer import Tokenizer
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.options import engine_config
from minitui.settings import Settings
from minitui.sources.local import LocalSource
from minitui.teaching import contrasts, hybrid
from minitui.teaching.lesson_progress import LessonProgress
from minitui.teaching.lessons import (
    LESSONS,
    l3_paged_kv,
    l4_paged_attention,
    l6_scheduler,
    l9_radix,
    lesson,
    step_costs,
)
from minitui.teaching.lessons.l5_sampler import parse_settings
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen, TypeIn, find_code, fresh, paragraphs
from minitui.teaching.lessons.plain import print_with_own_engine
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.merges import merges, shown_piece
from minitui.teaching.prediction import LETTERS
from minitui.teaching.reading import Reading
from minitui.teaching.stage import TITLES, Restart, Stage
from minitui.tui.apps.lesson_app import LessonApp
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.code import CodePanel, CodeScreen
from minitui.tui.screens.lesson import LessonScreen
from minitui.tui.widgets.bars import StatusBar
from minitui.tui.widgets.lesson.panels import BOTH_ROWS, HEIGHTS, PANEL_ROWS, PANELS, PARTNERS, RESULT_ROWS, TALL
from minitui.tui.widgets.lesson.text import LessonText, page_lines
from minitui.tui.widgets.rows import cells
from minitui.viewmodel.board import Pieces, Wire
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View
from tests.support.app.driving import press, text_of, until
from tests.support.app.fake_client import ByteCodec, FakeSource, sampling
from tests.support.waiting import started

RIGHT = {  # what each experiment must prove, by lesson and page title
    (0, "Text becomes tokens"): "prefill is one token, Anna has several",
    (0, "A forward pass"): "one number for each token of the vocabulary",
    (0, "Again and again"): "each token once, except the last token of the reply",
    (1, "Two questions, step by step"): "7",
    (2, "The cost of reading weights"): "about 4 ms",
    (2, "A decode step of many rows"): "less than twice as long",
    (3, "One piece or blocks"): "4 with one piece for each, 8 with blocks",
    (3, "What a token costs"): "4,096 bytes",
    (3, "Two chats, one pool"): "step 4",
    (3, "Four states"): "active",
    (4, "From position to slot"): "80",
    (4, "Causal attention after a cache hit"): "a rectangle with a slanted end",
    (5, "Temperature"): "9 times",
    (5, "Cuts"): "all three grow by the same factor",
    (5, "Three penalties"): "it grows with each penalty",
    (5, "Repeating a reply"): "with token 4 of the first reply",
    (6, "Joining and leaving"): "50",
    (6, "A long prompt"): "4",
    (6, "A pool that is too small"): "the youngest",
    (6, "Waiting, with a reason"): "first budget, then rows",
    (7, "Byte by byte"): "6",
    (7, "Stop strings"): "with the next token",
    (8, "A request with curl"): "12 minus one for each token “\N{NO-BREAK SPACE}the”",
    (8, "A client disconnects"): "those after the last full block of the prompt",
    (9, "The same beginning, another question"): "24",
    (9, "All at the same time"): "192",
    (9, "What is evicted, and when"): "B's, then the last of A's",
    (9, "Three kinds of memory"): "256",
    (10, "Eager and graphs"): "5.4 ms",
    (10, "A larger model"): "about 1.5 times",
    (10, "Overlap"): "0.8 ms",
    (10, "A ladder of sizes"): "the graph for 8 requests",
}


SCREENS = ("80x24", "120x40")
AGAIN = (3, 4, 9)  # run twice: what they show depends on what the pool and the tree held before
DEFAULTS = {"kv_blocks": None, "no_prefix_caching": False}


class Taught:
    """What came out of a lesson's experiments and questions."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.again: dict[str, Seen] = {}  # of a second run, after the pages behind it and the closing questions
        self.answers: list[str] = []
        self.beside: dict[str, dict[str, str]] = {}  # page -> size of the screen -> the panels beside the result


async def teach(one: Lesson, source: LocalSource, restart: Restart) -> Taught:
    chats = Chats(source, sampling=sampling(40))
    chats.use(load_codec(source.info))
    feed = Updater(source, View())
    await feed.sync()
    assert chats.codec is not None
    feed.view.texts.ids_to_text = chats.codec.decode
    stage = Stage(
        source, feed, chats, choose_model(None).system, lambda text: None, restart=restart, beat=0.0, home=one.options
    )
    taught = Taught()
    for page in one.pages:
        # Two runs side by side take several engines, and tests/tui/screens/test_compare_app.py runs them.
        two_runs = "side_by_side" in getattr(page.run, "__qualname__", "")
        if page.run is not None and (not two_runs or page.predict is not None):
            await fresh(stage)
            taught.seen[page.title] = await page.run(stage)
            stage.view.frame(time.monotonic())
            taught.beside[page.title] = {size: beside(page.panel, stage.view, size) for size in SCREENS}
    await fresh(stage)
    await one.close(stage)
    stage.view.frame(time.monotonic())
    taught.answers = [check.answer(stage) for check in one.checks]
    for page in reversed(one.pages):
        again = one.number in AGAIN and "side_by_side" not in getattr(page.run, "__qualname__", "")  # new engines
        if page.run is not None and page.predict is not None and again:
            await fresh(stage)
            taught.again[page.title] = await page.run(stage)
    assert not feed.dropped
    return taught


def panel_text(name: str, view: View, width: int = 76, height: int = 0) -> str:
    """The panel with its frame; by default as it is below the text on a screen of 80 by 24."""
    inner = (height or HEIGHTS.get(name, PANEL_ROWS)) - 2
    picture = PANELS[name]().picture(view, width, inner if name != "occupancy" else 1)
    rows = ["".join(text for text, _ in row) for row in picture.rows]
    frame = "".join(text for text, *_ in (*picture.note, *picture.legend))
    return "\n".join([picture.title, *rows, frame])


def beside(panel: str, view: View, size: str) -> str:
    """The panels that a screen of this size shows beside a result, as text."""
    if not panel:
        return ""
    second = PARTNERS.get(panel, "")
    if size == "80x24":
        rows = BOTH_ROWS.get(panel, HEIGHTS.get(panel, PANEL_ROWS))
        first = HEIGHTS[panel] if panel in BOTH_ROWS else rows
        shown = [(panel, first), (second, rows - first)] if panel in BOTH_ROWS else [(panel, rows)]
        return "\n".join(panel_text(name, view, 76, height) for name, height in shown)
    height = 38 if panel in TALL or panel not in HEIGHTS else HEIGHTS[panel]
    shown = [(panel, height), (second, 38 - height)] if second else [(panel, height)]
    return "\n".join(panel_text(name, view, 52, height) for name, height in shown)


async def teach_all(log: Path) -> dict[int, Taught | Exception]:
    """Every lesson in one process, each in an engine with its own options."""

    def config(one: Lesson) -> Any:
        return engine_config(model=choose_model(None).name, **DEFAULTS | one.options)

    async def restart(options: dict[str, Any]) -> None:
        await source.reconfigure(engine_config(choose_model(None).name, **DEFAULTS | options))

    source = LocalSource(config(LESSONS[0]), log, "tutor")
    taught: dict[int, Taught | Exception] = {}
    async with started(source):
        for one in LESSONS:
            await source.reconfigure(config(one))
            try:
                taught[one.number] = await teach(one, source, restart)
            except Exception as error:
                taught[one.number] = error
    return taught


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Taught | Exception]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "REPEATS", 1)
        patch.setattr(step_costs, "TOKENS", 3)
        yield asyncio.run(teach_all(tmp_path_factory.mktemp("engine") / "engine.log"))


@pytest.fixture
def outcome(taught: dict[int, Taught | Exception]) -> Callable[[int], Taught]:
    def of(number: int) -> Taught:
        found = taught[number]
        if isinstance(found, Exception):
            raise found
        return found

    return of


@pytest.mark.parametrize("number", [one.number for one in LESSONS])
def test_it_runs_to_its_end_and_proves_what_it_teaches(number: int, outcome: Callable[[int], Taught]) -> None:
    result = outcome(number)
    for page in lesson(number).pages:
        if page.predict is None:
            continue
        seen = result.seen[page.title]
        assert seen.answer is not None, f"{page.title}: the experiment decided nothing: {seen.text}"
        assert page.predict.choices[seen.answer] == RIGHT.get((number, page.title), "MLP"), seen.text
        if page.title in result.again:
            assert result.again[page.title].answer == seen.answer, f"a second run: {result.again[page.title].text}"
    assert bool(result.again) == (number in AGAIN)
    assert len(result.answers) == 3 and all(len(answer) > 0 for answer in result.answers)


def test_the_numbers_of_two_runs_end_below_their_names(outcome: Callable[[int], Taught]) -> None:
    _, table = outcome(3).seen["One piece or blocks"].text.split("\n\n")
    lines = table.split("\n")
    assert len(lines) > 3 and {len(line) for line in lines} == {59}
    assert all(line[38] != " " and line[39] == " " for line in lines)


def test_the_bars_of_the_sampler_lesson_are_those_of_its_rules(outcome: Callable[[int], Taught]) -> None:
    """The tables have a line for each setting, with the probabilities that the engine's sampler has drawn from."""
    seen = outcome(5).seen
    text = seen["Temperature"].text + "\n" + seen["Cuts"].text
    table: dict[str, list[float | None]] = {}
    for line in text.split("\n"):
        if found := re.match(r"   (\S.*?)((?: +(?:[\d.]+%|cut|-)){5})$", line):
            words = found[2].split()  # "-": not among the most likely tokens that the engine lists
            table[found[1].strip()] = [None if w == "cut" else float(w.rstrip("-%") or 0) / 100 for w in words]
    before = table["temperature 1"]
    assert all(share is not None for share in before) and before == table["no setting"] and len(table) == 8, text
    known = [share or 0.0 for share in before]
    for name, power in (("temperature 0.5", 2.0), ("temperature 2", 0.5)):
        ratios = [(share or 0.0) / base**power for share, base in zip(table[name][:3], known[:3], strict=True)]
        assert max(ratios) / min(ratios) < 1.15, f"{name}: the shares are the powers of the others, rounded"
    kept = table["top_k 3"]
    assert sum(share or 0.0 for share in kept) == pytest.approx(1.0, abs=0.002) and kept[3:] == [None, None]
    nucleus = next(n for n in range(1, 6) if sum(known[:n]) >= 0.6)
    assert table["top_p 0.6"][:nucleus] == pytest.approx([p / sum(known[:nucleus]) for p in known[:nucleus]], abs=0.002)
    assert table["top_p 0.6"][nucleus:] == [None] * (5 - nucleus)
    assert [share is None for share in table["min_p 0.1"]] == [base < 0.1 * known[0] for base in known]
    (biased,) = (shares for name, shares in table.items() if name.startswith("logit_bias"))
    assert (biased[4] or 0.0) > 3 * known[4]
    one, sharp = (float(ratio) for ratio in re.findall(r"is about ([\d.]+) times as likely", text)[:2])
    assert (one - 0.06) ** 2 - 0.06 < sharp < (one + 0.06) ** 2 + 0.06, "both are rounded to a tenth"


def test_the_length_of_the_pasted_prompt_is_told() -> None:
    text = contrasts.paste(contrasts.PASTED_LINES)
    prompt = [{"role": "user", "content": text}]
    ids = Tokenizer(Path(choose_model(None).name)).apply_chat_template(prompt, add_generation_prompt=True)
    page = next(page for page in lesson(6).pages if page.title == "In one step and in chunks")
    told = " ".join(page.text.split())
    assert f"Its prompt has {len(ids)} tokens" in told


def test_the_prompts_of_the_two_allocations_have_the_length_that_is_told() -> None:
    prompt = [{"role": "user", "content": "What is decode?"}]
    ids = Tokenizer(Path(choose_model(None).name)).apply_chat_template(prompt, add_generation_prompt=True)
    page = next(page for page in lesson(3).pages if page.title == "One piece or blocks")
    assert f"Each prompt has {len(ids)} tokens." in " ".join(page.text.split())


def test_typed_settings_are_read_or_refused_with_a_sentence() -> None:
    assert parse_settings("temperature 0.7, top_k=5 seed 3") == {"temperature": 0.7, "top_k": 5, "seed": 3}
    assert parse_settings(" ") == {}
    for wrong, sentence in (
        ("heat 2", "no setting 'heat'"),
        ("top_k many", "top_k is 'many': it must be a whole number"),
        ("top_p", "a finite number"),
    ):
        with pytest.raises(EngineError, match=sentence):
            parse_settings(wrong)


def bars(text: str) -> dict[str, int]:
    """The lines "name  bar  1,024 tokens" of a text."""
    found = re.findall(r"^   (\S.*?) +[█#]+ +([\d,]+) tokens$", text, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in found}


def test_no_graph_is_said_to_be_replayed_on_a_cpu(outcome: Callable[[int], Taught]) -> None:
    assert outcome(10).seen["A ladder of sizes"].text.startswith("On a GPU, these steps would replay:")


def test_the_radix_lesson_counts_what_was_shared(outcome: Callable[[int], Taught]) -> None:
    counted = bars(outcome(9).seen["All at the same time"].text)
    total, options = counted["all prompts"], lesson(9).options
    assert counted["computed"] + counted["shared"] == total < options["max_num_batched_tokens"]
    assert (total, counted["shared"]) == (l9_radix.PROMPTS, 5 * l9_radix.SYSTEM), "the numbers of the question"
    assert counted["shared"] > counted["computed"]
    most = (total + 6 * 7) / 16 + 6  # blocks: of six prompts, 7 tokens of each reply, and a rest in six last blocks
    assert most <= options["kv_blocks"], "the requests would fit even if they shared nothing"


def test_the_radix_lesson_tells_what_a_checkpoint_costs(outcome: Callable[[int], Taught]) -> None:
    text = outcome(9).seen["Three kinds of memory"].text
    cached, again, new = bars(text).values()
    assert (cached, cached + again) == (l9_radix.PAGE, hybrid.FOUND) and cached + again + new == hybrid.PROMPT
    assert f"the nearest checkpoint is at {cached}: {again} tokens again" in text
    assert f"the third chat took {cached + again}:" in text


def test_the_radix_lesson_tells_why_a_hit_ended_and_what_an_eviction_was_for(outcome: Callable[[int], Taught]) -> None:
    result = outcome(9)
    title = "The same beginning, another question"
    text, panel = result.seen[title].text, " ".join(result.beside[title]["80x24"].split())
    cached, prompt, at = (
        int(re.search(pattern, text)[1])  # type: ignore[index]
        for pattern in (r"took (\d+)", r"its (\d+) prompt", r"differs at token (\d+)")
    )
    assert f"{cached // 16} blocks of 16 were equal: {cached} of {prompt} tokens" in panel
    assert f"other {prompt - cached} tokens were computed" in panel
    assert cached == at // 16 * 16 < at < prompt
    panel = result.beside["What is evicted, and when"]["80x24"]
    needed, free = (int(number) for number in re.findall(r"C needs (\d+) blocks; (\d+) of", panel)[0])
    rows = ((re.search(r"(Alpha|Bravo|Charlie) is", line), line.count("×")) for line in panel.split("\n"))
    lost = {name[1]: blocks for name, blocks in rows if name is not None}
    assert lost["Bravo"] >= 3 and lost["Alpha"] >= 1 and sum(lost.values()) == needed - free, panel


def test_the_scheduler_lesson_compares_each_step_with_vllms(outcome: Callable[[int], Taught]) -> None:
    text = outcome(6).seen["The same requests on vLLM"].text
    table = {line[:31].strip(): line[31:].split() for line in text.split("\n") if line.startswith("   ")}
    assert table.pop("")[-1] == "minitui" and len(table) == 4
    assert all(theirs == ours for theirs, ours in table.values()), text
    alike, of = re.findall(r"In (\d+) of (\d+) steps, both schedulers planned the same", text)[0]
    for size, panel in outcome(6).beside["The same requests on vLLM"].items():
        rows = [row for row in panel.split("\n") if re.match(r"r\d", row)]
        assert len(rows) == 6 and all("■" in row for row in rows), f"{size}: each request ends in the picture\n{panel}"
        computed = re.findall(r"([\d,]+) prompt tokens computed", panel)
        assert computed[0] == computed[1] and re.findall(r"· (\d+) steps ·", panel) == [of, of]
    assert "Both preempted the youngest request." in text and alike == of


def test_a_reference_to_another_lesson_has_its_number_and_its_title() -> None:
    names = [one.name for one in LESSONS]
    for one in LESSONS:
        for page in one.pages:
            text = " ".join(page.text.split())
            for found in re.finditer(r"\bL\d+\b", text):
                assert any(text.startswith(name, found.start()) for name in names), (
                    f"{one.name}: {text[found.start() :][:40]}"
                )


def test_the_numbers_in_the_questions_are_those_of_the_engine(outcome: Callable[[int], Taught]) -> None:
    steps = outcome(3).seen["Two chats, one pool"].text
    assert re.search(rf"its tokens +{l3_paged_kv.PROMPT} ", steps), steps
    slots = outcome(4).seen["From position to slot"].text
    first, second = l4_paged_attention.TABLE
    for text in (slots, outcome(4).again["From position to slot"].text):
        assert f"table[0] = {first:>2}" in text and f"table[1] = {second:>2}" in text, text
    long = outcome(6).seen["A long prompt"].text
    chunks = [int(line.split()[2]) for line in long.split("\n") if re.match(r"   \d", line)]
    assert sum(chunks) == l6_scheduler.PASTED and max(chunks) * l6_scheduler.PASTE_STEPS[1] < l6_scheduler.PASTED, long
    assert re.search(r"\n   \d+-\d+ +3 +0 +3 +[\d.]+\n", long), "a decode step to compare with"
    waiting = outcome(6).seen["Waiting, with a reason"].text
    assert sum(map(int, re.findall(r"\+ (\d+) tokens of", waiting))) == l6_scheduler.WAITING, waiting
    lookup = outcome(9).seen["The same beginning, another question"].text
    assert f"its {l9_radix.LONG} prompt tokens" in lookup and f"differs at token {l9_radix.SAME}." in lookup, lookup
    room = "".join(outcome(9).beside["What is evicted, and when"].values())
    assert f"C needs {l9_radix.NEEDED} blocks; {l9_radix.ROOM} of {l9_radix.BLOCKS} are free." in room, room
    assert l9_radix.CACHED_A + l9_radix.CACHED_B + l9_radix.ROOM == l9_radix.BLOCKS
    assert f"all {l9_radix.CACHED_B} blocks of B" in outcome(9).seen["What is evicted, and when"].text


def test_the_figures_in_the_text_are_those_of_the_pool_on_screen(outcome: Callable[[int], Taught]) -> None:
    blocks = lesson(3).options["kv_blocks"]
    assert lesson(3).options["device"] == "cpu", "its question says 4 bytes; on a GPU, the cache has numbers of 2 bytes"
    text = " ".join(" ".join(page.text.split()) for page in lesson(3).pages)
    assert f"here {blocks}." in text and "In this pool, a request may start" in text, "a large pool has a watermark"
    assert f"pool of {16 * blocks} tokens." in text and f"two blocks each: 8 blocks of {blocks}" in text
    assert int(SchedulerConfig().watermark * blocks) == 0 and 16 * blocks == 4 * 192
    assert f"pool of {blocks} blocks" in outcome(3).seen["What a token costs"].text
    for panel in outcome(8).beside["A client disconnects"].values():  # page 3 had computed equal replies
        assert re.search(r"\b0 (tokens )?(computed )?twice", panel), panel


@pytest.mark.parametrize("number", [one.number for one in LESSONS])
def test_no_line_beside_a_panel_is_cut(number: int, outcome: Callable[[int], Taught]) -> None:
    """On a screen of 120 columns, the text has 60 cells."""
    texts = [page.text for page in lesson(number).pages] + [seen.text for seen in outcome(number).seen.values()]
    texts += [check.question for check in lesson(number).checks] + outcome(number).answers
    long = [line for text in texts for line in paragraphs(text, 60) if cells(line) > 60]
    assert not long


def test_each_wrong_choice_is_explained_and_the_right_one_is_not() -> None:
    for one in LESSONS:
        for page in one.pages:
            if page.predict is not None:
                explained = [page.predict.explain(i) != "" for i in range(len(page.predict.choices))]
                right = RIGHT.get((one.number, page.title), "MLP")
                assert explained == [choice != right for choice in page.predict.choices], page.title


def numbers(text: str) -> set[str]:
    return {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}


def untraced(seen: Seen, page: Page, panels: str) -> set[str]:
    """The numbers of a result that are neither in the panels nor on the page, nor a sum that the result writes out, nor
    a share or a quotient of two numbers that are there. A line that begins with a space is a table: it was measured."""
    lines = paragraphs(seen.text, 1 << 20)
    sentences = " ".join(line for line in lines if not line.startswith(" "))
    known = numbers(panels) | numbers(page.text) | numbers("\n".join(line for line in lines if line.startswith(" ")))
    if page.predict is not None:
        known |= numbers(" ".join((page.predict.question, *page.predict.choices)))
    missing = numbers(sentences) - known
    for found in re.finditer(r"\d+(?: \+ \d+)+", sentences):
        missing.discard(str(sum(map(int, found[0].split(" + ")))))
    for now, before, change in re.findall(r"([\d.,]+) ?\w* instead of ([\d.,]+) ?\w* \([-+−](\d+)%\)", sentences):
        first, second = (float(number.replace(",", "")) for number in (before, now))
        if round(100 * abs(second - first) / first) == pytest.approx(int(change), abs=8):  # of rounded numbers
            missing.discard(change)
    for now, before, times in re.findall(r"([\d.,]+) ?\w* instead of ([\d.,]+) ?\w* \(([\d.,]+) times\)", sentences):
        second, first, factor = (float(number.replace(",", "")) for number in (now, before, times))
        if second / first == pytest.approx(factor, rel=0.1):  # of rounded numbers
            missing.discard(times)
    return missing


@pytest.mark.parametrize("number", [one.number for one in LESSONS])
def test_every_number_of_a_result_is_on_the_same_screen(number: int, outcome: Callable[[int], Taught]) -> None:
    result, one = outcome(number), lesson(number)
    missing = [
        f"{page.title}, {size}: {', '.join(sorted(untraced(result.seen[page.title], page, panels)))}"
        for page in one.pages
        for size, panels in result.beside.get(page.title, {}).items()
        if untraced(result.seen[page.title], page, panels)
    ]
    assert not missing, "\n".join([*missing, *(seen.text for seen in result.seen.values())])


WRITTEN = """# Sums

What is {N} + {N}?

## Two numbers
panel: step
run: add

The first line
and the second.

    a  table

? How many?
- {N + N} tokens | they would
  be four.
- three

## Questions

? Which number
is it?
panel: lanes
see: the lanes.
answer: {stage} of {N}

? And now?
panel: lanes
see: the lanes.
answer: none

? And then?
panel: lanes
see: the lanes.
answer: none
"""


def test_a_lesson_is_read_from_its_text_and_a_mistake_names_its_page(tmp_path: Path) -> None:
    async def add(stage: Stage) -> Seen:
        return Seen("4")

    module = {"__file__": str(tmp_path / "l7_sums.py"), "N": 2, "add": add, "close": add}
    file = tmp_path / "l7_sums.md"
    file.write_text(WRITTEN)
    one = read_lesson(module, kv_blocks=8)
    assert (one.number, one.title, one.question, one.options) == (7, "Sums", "What is 2 + 2?", {"kv_blocks": 8})
    asked = Prediction("How many?", ("4 tokens", "three"), ("they would be four.", ""))
    assert one.pages == (
        Page("Two numbers", "The first line\nand the second.\n\n  a  table", "step", run=add, predict=asked),
    )
    assert (one.checks[0].question, one.checks[0].answer("3")) == ("Which number is it?", "3 of 2")  # type: ignore
    for right, wrong in (("run: add", "run: sub"), ("panel: step", "pannel: step"), ("{N + N}", "{M}")):
        file.write_text(WRITTEN.replace(right, wrong))
        with pytest.raises((KeyError, TypeError, NameError)) as caught:
            read_lesson(module)
        assert caught.value.__notes__ == ["l7_sums.md, page 'Two numbers'"]


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.name)
def test_every_page_fits_a_screen_of_80_by_24_before_it_is_run(one: Lesson) -> None:
    reading = Reading(one)
    for at in range(len(one.pages)):
        reading.at = at
        lines = page_lines(reading, 76)
        page = "\n".join(text for text, _ in lines)
        assert len(lines) <= 20, f"{one.name}, {one.pages[at].title}: {len(lines)} lines, more than 20:\n{page}"
        assert all(len(text) <= 76 for text, _ in lines)
    reading.at, reading.prepared = len(one.pages), True
    for question, check in enumerate(one.checks):
        reading.question = question
        room = 20 - HEIGHTS.get(check.panel, PANEL_ROWS)
        assert len(page_lines(reading, 76)) - 1 <= room, f"{one.name}: the questions beside {check.panel}"


def lines_below(one: Lesson, at: int, seen: Seen, choice: int | None) -> int:
    """How many lines of a result are out of sight when it appears on a screen of 80 by 24: its hint says so."""
    page, reading = one.pages[at], Reading(one)
    reading.at, reading.seen = at, {at: seen}
    reading.predicted = {} if choice is None else {at: choice}
    sizes = HEIGHTS | BOTH_ROWS | RESULT_ROWS
    text = LessonText(reading)
    text.to_experiment()
    picture = text.picture(View(), 76, 20 - (sizes.get(page.panel, PANEL_ROWS) if page.panel else 0))
    found = re.search(r"down, page down: (\d+) more lines?", "".join(text for text, *_ in picture.legend))
    shown = "\n".join("".join(text for text, _ in row) for row in picture.rows)
    assert seen.answer is None or f"{glyphs().right} {LETTERS[seen.answer]})" in shown, "the right choice is in sight"
    return int(found[1]) if found is not None else 0


@pytest.mark.parametrize("number", [one.number for one in LESSONS])
def test_a_result_has_at_most_three_lines_out_of_sight_whatever_was_predicted(
    number: int, outcome: Callable[[int], Taught]
) -> None:
    one, hidden = lesson(number), []
    for at, page in enumerate(one.pages):
        if (seen := outcome(number).seen.get(page.title)) is not None:
            for choice in [None, *range(len(page.predict.choices) if page.predict is not None else 0)]:
                if (below := lines_below(one, at, seen, choice)) > 3:
                    hidden.append(f"page {at + 1}, choice {choice}: {below} lines\n{seen.text}")
    assert not hidden, "\n".join(hidden)


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.name)
def test_every_reference_to_code_is_there(one: Lesson) -> None:
    references = [page.code for page in one.pages if page.code]
    assert len(references) >= 3, "each lesson shows the code where it happens"
    for reference in references:
        code = find_code(reference)
        name = reference.partition(":")[2].rpartition(".")[2]
        assert code.lines and (not name or name in " ".join(code.lines[:3])), reference


def test_lessons_and_their_code_load_neither_torch_nor_textual() -> None:
    program = (
        "import sys; from minitui.teaching.lessons import LESSONS; import minitui.teaching.lessons.plain;"
        "from minitui.teaching.lessons.page import find_code;"
        "[find_code(page.code) for one in LESSONS for page in one.pages if page.code];"
        "assert 'torch' not in sys.modules and 'textual' not in sys.modules, 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_code_that_is_not_there_is_told() -> None:
    with pytest.raises(EngineError, match="no Nobody"):
        find_code("engine.core.engine:Nobody")
    with pytest.raises(EngineError, match="has no module"):
        find_code("engine.nowhere:Nobody")
    with pytest.raises(EngineError, match="no lesson 12"):
        lesson(12)


def test_paragraphs_keep_tables_and_wrap_the_rest() -> None:
    lines = paragraphs("\nOne two three four.\nFive.\n\n  a   first column of a table that is long\n", 24)
    assert lines == ["One two three four.", "Five.", "", "  a   first column of a", "      table that is long"]


# ---- on the screen


async def test_two_runs_side_by_side_and_then_the_lessons_own_engine_again() -> None:
    async with Classroom((120, 40), lesson=SIDE_BY_SIDE) as room:
        await room.press("enter")
        await room.until(lambda: 0 in room.reading.seen or 0 in room.reading.failed)
        assert 0 in room.reading.seen, room.reading.failed
        text = room.text()
        assert "24 blocks · " in text and "64 blocks · " in text, "both runs are in the panel"
        assert "steps" in room.reading.seen[0].text and "replies" in room.reading.seen[0].text
        pools = [options["kv_blocks"] for options in room.restarts]
        assert pools == [24, 64, 24, 64], "each setting once to warm up, and once to measure"
        await room.result(1, "right", "enter")
        assert room.restarts[4:] == [{"kv_blocks": 77}] and room.app.view.earlier is None


async def greet(stage: Stage) -> Seen:
    """An experiment for a scripted engine."""
    session = stage.chat("short", max_tokens=20, whole=True)
    stage.show(session)
    await stage.ask(session, "hello")
    await stage.step(3, seconds=1.0)
    return Seen(f"the engine stands at step {stage.state().step}", 1)


async def stumble(stage: Stage) -> Seen:
    raise EngineError("the experiment was not possible")


async def echo(stage: Stage) -> Seen:
    stage.view.put(Pieces("Typed", tuple(stage.typed or "own"), "one piece a letter"))
    return Seen(f"typed: {stage.typed!r}")


SMALL = Lesson(
    3, "Test", "Does it work?",
    (
        Page("First", "\nSome text.\n"),
        Page(
            "Second", "\nMore text.\n", "step", "engine.core.engine:Engine", greet,
            Prediction("What?", ("this", "that")),
        ),
        Page("Third", "\nThis fails.\n", "tree", "", stumble),
        Page("Fourth", "\nType.\n", "pieces", "", echo, type_in=TypeIn("Your text", "own", 12)),
    ),
    greet,
    (
        Check("How many?", "lanes", "the lanes.", lambda stage: f"{len(stage.state().requests)} request"),
        Check("Which?", "tree", "the tree.", lambda stage: "that"),
        Check("Why?", "events", "the events.", lambda stage: "because"),
    ),
)


SIDE_BY_SIDE = Lesson(
    3, "Two", "Which?", (Page("Both", "", "runs", "", side_by_side("pool")), Page("Then", "", "step", "", greet)),
    greet, SMALL.checks, {"kv_blocks": 77},
)


class Classroom:
    def __init__(
        self, size: tuple[int, int], loaded: bool = True, progress: LessonProgress | None = None,
        lesson: Lesson | None = None, notifications: bool = False, beat: float = 0.0,
    ) -> None:
        self.beat = beat  # seconds between the pictures of an experiment
        self.source = FakeSource(loads_at_once=loaded)
        self.restarts: list[dict[str, Any]] = []
        chats = Chats(self.source, sampling=sampling(20))
        self.app = LessonApp(
            self.source, chats, Settings(), system="short", load_codec=lambda info: ByteCodec(), lesson=lesson or SMALL,
            restart=self.restart, progress=progress,
        )
        self.running = self.app.run_test(size=size, notifications=notifications)

    async def restart(self, options: dict[str, Any]) -> None:
        self.restarts.append(options)

    async def __aenter__(self) -> Classroom:
        self.pilot = await self.running.__aenter__()
        if self.source.loaded.is_set():
            await self.up()
        return self

    async def up(self) -> None:
        """Wait for the engine."""
        self.source.loaded.set()
        await self.until(lambda: self.screen.stage is not None)
        assert self.app.stage is not None
        self.app.stage.beat = self.beat

    async def __aexit__(self, *error: Any) -> None:
        await self.running.__aexit__(*error)

    @property
    def screen(self) -> LessonScreen:
        screen = self.app.screen
        assert isinstance(screen, LessonScreen)
        return screen

    @property
    def reading(self) -> Reading:
        assert self.screen.reading is not None
        return self.screen.reading

    async def until(self, true: Callable[[], Any]) -> None:
        await until(self.pilot, true)

    async def press(self, *keys: str) -> None:
        await press(self.pilot, *keys)

    async def result(self, at: int, *keys: str) -> None:
        """Press keys, and wait for the result of page `at`."""
        await self.press(*keys)
        await self.until(lambda: at in self.reading.seen and not self.reading.running)

    async def questions(self, *keys: str) -> None:
        """Press keys, and wait until the questions at the end of the lesson can be answered."""
        await self.press(*keys)
        await self.until(lambda: self.reading.prepared)

    def text(self) -> str:
        return text_of(self.app)


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_a_lesson_is_read_predicted_run_and_answered(size: tuple[int, int]) -> None:
    async with Classroom(size) as room:
        assert "L3 Test · 1 of 5" in room.text() and "Some text." in room.text()
        await room.press("right")
        assert "Predict: What?" in room.text() and "Choose a or b. Then enter runs" in room.text()
        await room.press("enter")
        assert "First choose a or b. Key r runs it without a choice." in room.text() and not room.reading.running
        await room.press("b")
        assert room.reading.predicted == {1: 1} and "→ b) that" in room.text()
        assert "Press enter to run" in room.text()
        await room.result(1, "enter")
        assert "the engine stands at step" in room.text() and "of 256 tokens" in room.text(), "text and panel"
        assert "You said b" in room.text(), "whether it was right"
        await room.press("a")
        assert room.reading.predicted == {1: 1}, "the earlier prediction is kept"
        await room.result(1, "r")
        await room.press("right", "enter")
        await room.until(lambda: 2 in room.reading.failed)
        assert "was not possible" in room.text()
        await room.questions("right", "right")
        assert "See the lanes." in room.text() and "Batch lanes" in room.text()
        await room.press("enter")
        assert "1 request" in room.text()
        await room.press("tab", "enter", "tab", "enter")
        assert "because" in room.text() and len(room.reading.revealed) == 3
        await room.press(*["left"] * 4)
        assert room.reading.at == 0


async def test_closing_answers_and_their_panel_stay_while_other_pages_run() -> None:
    def newest(stage: Stage) -> str:
        return f"It is r{stage.youngest().id}."

    checks = (replace(SMALL.checks[0], answer=newest), *SMALL.checks[1:])
    async with Classroom((80, 24), lesson=replace(SMALL, checks=checks)) as room:
        await room.questions(*["right"] * 4)
        await room.press("enter")
        [named] = re.findall(r"It is (r\d+)\.", room.text())

        def lanes() -> list[str]:
            """The requests in the panel."""
            return re.findall(r"│ (?:#\d+·)?(r\d+) ", room.text())

        assert lanes() == [named]
        await room.result(1, *["left"] * 3, "r")
        assert room.app.stage is not None and f"r{room.app.stage.youngest().id}" != named, "another request has run"
        await room.press(*["right"] * 3)
        assert f"It is {named}." in room.text() and lanes() == [named]
        await room.press("tab", "tab", "enter", "tab")
        assert f"It is {named}." in room.text() and lanes() == [named]
        await room.press("1", *"/resume", "enter", *"/new", "enter", *"why", "enter", "ctrl+g", "0")
        await room.until(lambda: not room.app.session.busy)
        assert f"It is {named}." in room.text() and lanes() == [named], "a chat does not change a kept picture"


async def test_the_right_arrow_leads_from_the_last_page_to_the_next_lesson() -> None:
    async with Classroom((80, 24)) as room:
        await room.questions(*["right"] * 4)
        assert "right next lesson" in room.text() and "This lesson ends here" not in room.text()
        assert "enter answer" in room.text()
        await room.press("enter", "tab", "enter", "tab", "enter")
        assert "This lesson ends here. The right arrow key opens L4 Paged attention." in room.text()
        assert "enter" not in room.text(), "there is no other answer to show"
        await room.press("right", "right")
        await room.until(lambda: room.reading.lesson is LESSONS[4])
        assert room.restarts == [LESSONS[4].options], "a second key changes nothing until the lesson is open"
    last = replace(SMALL, number=LESSONS[-1].number)
    async with Classroom((80, 24), lesson=last) as room:
        await room.questions(*["right"] * 5)
        assert "next lesson" not in room.text() and not room.restarts
        await room.press("enter", "tab", "enter", "tab", "enter")
        assert "This was the last lesson. Key L shows all lessons." in room.text()


async def test_the_left_arrow_leads_from_the_first_page_to_the_end_of_the_lesson_before() -> None:
    before = LESSONS[SMALL.number - 1]
    async with Classroom((80, 24)) as room:
        assert "right next page · left lesson before" in room.text()
        await room.press("left")
        await room.until(lambda: room.reading.lesson is before)
        assert room.restarts == [before.options] and room.reading.page is None and "Three questions." in room.text()
        assert room.reading.progress.summary(before) == "", "it has not been read"
    async with Classroom((80, 24), lesson=replace(SMALL, number=LESSONS[0].number)) as room:
        assert "right next page" in room.text() and "left" not in room.text()
        await room.press("left")
        assert room.reading.at == 0 and not room.restarts, "there is no lesson before"
        await room.press("right")
        assert "left/right pages" in room.text()


async def test_each_key_of_a_page_is_in_sight_on_a_small_screen() -> None:
    many: Any = tuple(replace(check, question=check.question + " word" * 60) for check in SMALL.checks)
    page = replace(SMALL.pages[1], text="Some words. " * 120, predict=None, type_in=TypeIn("Your settings", "own", 12))

    def last_line() -> str:
        return room.text().split("\n")[-1]

    async with Classroom((80, 24), lesson=replace(SMALL, pages=(page,), checks=many)) as room:
        for keys in ("left/right pages", "enter run", "i your settings", "v code", "L lessons", "? help"):
            assert keys in last_line()
        await room.questions("right")
        for _ in many:
            for keys in ("enter answer", "tab question", "left/right pages", "L lessons", "? help", "q quit"):
                assert keys in last_line()
            assert re.search(r"(up: |down, page down: )\d+ (more )?line", room.text()), "there is more to read"
            await room.press("tab")
        await room.press("enter", "tab")
        for keys in ("enter answer", "tab question", "left/right pages", "L lessons", "? help", "q quit"):
            assert keys in last_line(), "also after an answer"


async def test_a_notice_covers_the_keys_and_nothing_of_the_page() -> None:
    async with Classroom((80, 24), notifications=True) as room:
        await room.result(1, "right", "r")
        await room.press("e")
        await room.until(lambda: any(toast.region.area for toast in room.screen.query("Toast")))
        [toast] = room.screen.query("Toast")
        assert toast.region.y == room.screen.query_one(StatusBar).region.y and toast.region.height == 1


async def test_enter_gives_the_answer_as_soon_as_the_engine_is_prepared() -> None:
    gate = asyncio.Event()

    async def late(stage: Stage) -> Seen:
        await gate.wait()
        stage.beat = 1000.0  # seconds: nobody waits for a pause here
        return await greet(stage)

    async with Classroom((80, 24), lesson=replace(SMALL, close=late)) as room:
        await room.press(*["right"] * 4)
        await room.until(lambda: "The engine is being prepared." in room.text())
        assert "enter" not in room.text(), "the key has no effect yet"
        assert "Batch lanes" not in room.text(), "no panel shows the steps before those of the questions"
        await room.press("enter")
        assert not room.reading.revealed
        await room.until(lambda: "The engine is being prepared. Then the answer is shown." in room.text())
        gate.set()
        await room.until(lambda: room.reading.revealed)
        assert room.reading.revealed == {0}, "enter was for the first question"


async def test_a_question_to_a_paused_engine_is_told_what_it_waits_for() -> None:
    async with Classroom((80, 24)) as room:
        await room.result(1, "right", "r")
        await room.press("1", *"why", "enter")
        said = [notice.message for notice in room.app._notifications]
        assert "ctrl+g, then 0: back to the lesson; L: all lessons" in said
        assert any("is paused: /resume" in text for text in said)
        await room.press("ctrl+u", *"/new", "enter", *"why", "enter")
        await room.until(lambda: "The engine is paused: /resume lets it run." in room.text())
        await room.press(*"/resume", "enter")
        await room.until(lambda: "The engine is paused: /resume lets it run." not in room.text())
        await room.until(lambda: room.app.session.messages[-1].state == "done")


async def test_an_experiment_keeps_the_readers_chats_and_removes_its_own() -> None:
    async with Classroom((80, 24)) as room:
        chats = room.app.chats

        async def run() -> list[str]:
            await room.result(1, "right", "r")
            await room.press("left")
            return [session.title for session in chats.sessions]

        await room.press("1", *"why", "enter", "ctrl+g", "0")
        await room.until(lambda: [session.title for session in chats.sessions] == ["why"])
        for _ in range(2):
            assert await run() == ["why", "lesson", TITLES[2]], "mine, and those of the last run"
        await room.press("1", *"/resume", "enter")
        await room.until(lambda: not room.app.session.busy)
        await room.press(*"how", "enter", "ctrl+g", "0")
        await room.until(lambda: len(room.app.session.questions) == 2)
        assert await run() == ["why", TITLES[2], "lesson", TITLES[3]], "I have asked in a chat of the run"
        assert [message.text for message in chats.sessions[1].questions] == ["hello", "how"]


async def test_a_lesson_goes_on_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "lessons.json"
    async with Classroom((80, 24), loaded=False, progress=LessonProgress(path)) as room:
        await room.press("right", "b", "right", "left")
    async with Classroom((80, 24), progress=LessonProgress(path)) as room:
        assert room.reading.at == 2 and "L3 Test · 3 of 5" in room.text()
        assert "L3 Test continues on page 3" in next(notice.message for notice in room.app._notifications)
        await room.press("left")
        assert "→ b) that" in room.text() and room.reading.at not in room.reading.seen
        await room.result(1, "enter")
        assert "You said b: correct" in room.text(), "the prediction of the last time counts"
        await room.press("right", "right", "right")
        assert LessonProgress(path).summary(SMALL) == "all pages read, 1 of 1 prediction made"
    async with Classroom((80, 24), progress=LessonProgress(path)) as room:
        assert room.reading.at == 0 and not room.app._notifications, "all pages were read: the lesson begins again"
        await room.press("right")
        assert "You chose b. Press enter to run" in room.text()
        await room.result(1, "r")
        assert "The answer is b." in room.text(), "r does not count the prediction of the last time"


async def test_a_lesson_is_read_while_its_engine_starts() -> None:
    async with Classroom((80, 24), loaded=False) as room:
        await room.until(lambda: "Some text." in room.text())
        await room.press("right", "enter")
        assert "First choose a" in room.text(), "also before the engine is there"
        await room.press("b")
        assert "You chose b. Press enter to run the experiment." in room.text()
        await room.press("enter")
        assert "The engine is starting. Then the experiment runs." in room.text()
        assert not room.reading.running and room.reading.predicted == {1: 1}
        await room.press("v")
        await room.until(lambda: isinstance(room.app.screen, CodeScreen))
        room.source.loaded.set()
        await room.until(lambda: room.app.stage is not None)
        assert isinstance(room.app.screen, CodeScreen), "nothing is taken from the reader"
        await room.press("escape")
        await room.up()
        await room.until(lambda: 1 in room.reading.seen)
        assert room.reading.at == 1 and "You said b" in room.text(), "enter is not pressed again"
    async with Classroom((80, 24), loaded=False) as room:
        await room.press(*["right"] * 4)
        assert "The engine is starting." in room.text()
        await room.press("enter")
        assert "The engine is starting. Then the answer is shown." in room.text()
        await room.up()
        await room.until(lambda: room.reading.revealed)


async def test_the_reader_types_a_text_for_an_experiment() -> None:
    async with Classroom((80, 24)) as room:
        await room.result(3, "i", *["right"] * 3, "enter")
        assert room.reading.seen[3].text == "typed: ''" and "o│w│n" in room.text()
        await room.press("i", *"a b", "enter")
        await room.until(lambda: room.reading.seen.get(3, Seen("")).text == "typed: 'a b'")
        await room.until(lambda: "a│ │b│" in room.text())
        await room.press("i", "end", *"0123456789", "enter")
        said = [notice.message for notice in room.app._notifications]
        assert said == ["the text has 13 characters: type at most 12"]
        assert room.reading.typed == {3: "a b"}
        await room.press("left", "left", "i")
        assert isinstance(room.app.screen, LessonScreen), "this page takes no text"


def test_merges_end_with_the_tokenizers_own_tokens() -> None:
    tokenizer = Tokenizer(Path(choose_model(None).name))
    for text in ("What is prefill? My name is Anna.", "aaaa héllo 漢字  b\n\n!!", "", "  ", "\x1b[31m"):
        begin, done = merges(tokenizer, text)
        assert begin == tuple(bytes([byte]) for byte in text.encode())
        before, rules = begin, []
        for merge in done:
            assert len(merge.pieces) < len(before) and all(merge.pieces[i] == b"".join(merge.pair) for i in merge.new)
            assert b"".join(merge.pieces) == text.encode()
            before = merge.pieces
            rules.append(merge.rule)
        assert before == tuple(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert rules == sorted(rules), "the earliest rule that fits comes first"
    assert shown_piece("é".encode()) == "é" and shown_piece(b"\xf0\x9f") == "<f0 9f>"


async def test_the_code_opens_and_closes_and_the_lesson_can_be_changed() -> None:
    async with Classroom((80, 24)) as room:
        await room.press("right", "v")
        assert isinstance(room.app.screen, CodeScreen)
        await room.until(lambda: "engine/core/engine.py" in room.text())
        assert "class Engine:" in room.text()
        panel = room.app.screen.query_one(CodePanel)
        await room.press("down", "down")
        assert panel.top == 2
        await room.press("escape")
        assert isinstance(room.app.screen, LessonScreen)
        await room.press("2")
        assert not isinstance(room.app.screen, LessonScreen)
        await room.press("0")
        room.app.open_lesson(LESSONS[9])
        await room.until(lambda: room.restarts and room.reading.lesson is LESSONS[9])
        assert room.restarts == [LESSONS[9].options] and "L9 Radix cache · 1 of" in room.text()
        assert not room.app._notifications, "nothing covers the first page"


async def test_escape_does_not_change_the_result_of_an_experiment() -> None:
    async with Classroom((80, 24), beat=1000.0) as room:  # without keys, the test gives up
        await room.press("right", "r")
        await room.until(lambda: "enter next picture" in room.text() and room.app.session.busy)
        await room.press("escape", "2", "escape", "0", "escape")
        assert room.app.session.busy, "no answer is cancelled"
        await room.result(1, "e")
        assert room.app.session.messages[-1].state != "cancelled"


async def test_a_cancelled_answer_takes_the_closing_answers_with_it() -> None:
    async with Classroom((80, 24)) as room:
        await room.questions(*["right"] * 4)
        await room.press("enter")
        assert "1 request" in room.text()
        room.app.chats.cancel(room.app.session)
        await room.until(lambda: "Enter runs the end of the lesson again" in room.text())
        assert "1 request" not in room.text()


async def test_leaving_a_page_stops_its_experiment_and_says_so() -> None:
    async with Classroom((80, 24), beat=1000.0) as room:
        await room.press("right", "b", "enter")
        await room.until(lambda: "The experiment runs. Enter: the next" in room.text())
        await room.press("left")
        assert not room.reading.running and room.reading.at == 0
        [notice] = room.app._notifications
        assert notice.message == "the experiment of “Second” was stopped: it has no result"
        await room.press("right")
        assert 1 not in room.reading.seen and "You chose b. Press enter" in room.text()


async def test_enter_shows_the_next_picture_of_an_experiment_and_then_waits_for_the_key() -> None:
    pictures: list[int] = []

    async def three(stage: Stage) -> Seen:
        for n in range(3):
            pictures.append(n)
            await stage.pause(0.01)
        return Seen("done", 1)

    page = replace(SMALL.pages[1], run=three)
    async with Classroom((80, 24), lesson=replace(SMALL, pages=(page,))) as room:
        stage = room.app.stage
        assert stage is not None
        stage.beat = 1e6  # seconds: without the key, the test gives up
        await room.press("r")
        await room.until(lambda: "enter next picture  e end" in room.text())
        assert "The experiment runs. Enter: the next picture. Key e: run to the end." in room.text() and pictures == [0]
        assert all(len(line) <= 60 for line, _ in page_lines(room.reading, 60)), "wrapped beside a panel"
        await room.press("enter")
        stage.beat = 0.01  # a pause would end at once, but the experiment now waits for the key
        await room.until(lambda: pictures == [0, 1])
        await room.until(lambda: "The experiment waits." in room.text())
        await asyncio.sleep(0.1)
        assert pictures == [0, 1] and room.reading.running
        await room.press("enter")
        await room.until(lambda: pictures == [0, 1, 2])
        await room.result(0, "enter")
        assert not stage.by_hand and not room.reading.by_hand, "the next experiment goes on by itself"


async def test_the_lessons_are_listed_from_the_chats_and_the_inspector_too() -> None:
    async with Classroom((80, 24)) as room:
        for keys in (["L"], ["1", "ctrl+g", "L"], ["2", "L"]):
            await room.press(*keys)
            await room.until(lambda: "L0 Tokens" in room.text())
            await room.press("escape")
            await room.until(lambda: "L0 Tokens" not in room.text())


async def test_the_filter_of_the_list_finds_a_lesson_by_its_number_also_beside_counts_of_pages_read() -> None:
    progress = LessonProgress()
    for one in LESSONS[:4]:
        for at in range(3):
            progress.mark_read(one, at)
    async with Classroom((80, 24), progress=progress) as room:
        await room.press("L", "3")
        await room.until(lambda: "L0 Tokens" not in room.text())
        assert [one.name for one in LESSONS if one.name in room.text()] == [lesson(3).name]
        assert " 3 of " in room.text(), "the counts are shown"
        await room.press("backspace", *"earlier prompts")
        await room.until(lambda: [one.number for one in LESSONS if one.name in room.text()] == [9])


async def test_an_exchange_that_is_longer_than_its_panel_scrolls() -> None:
    async def talk(stage: Stage) -> Seen:
        stage.view.put(Wire("HTTP", tuple(("got", f"line {n}.") for n in range(30))))
        return Seen("done", 1)

    page = replace(SMALL.pages[1], run=talk, panel="wire")
    async with Classroom((80, 24), lesson=replace(SMALL, pages=(page, SMALL.pages[0]))) as room:
        await room.press("r")
        await room.until(lambda: "tab: scroll" in room.text())
        assert "line 29." in room.text() and "line 0." not in room.text() and "above, 0 below" in room.text()
        await room.press("up")
        assert "above, 0 below" in room.text(), "the text has the focus"
        await room.press("tab", *["up"] * 40)
        assert "line 0." in room.text() and "line 29." not in room.text()
        await room.press("down")
        assert "line 0." not in room.text() and "line 1." in room.text()
        await room.press("pagedown", "tab", "down")
        assert "line 6." in room.text() and "tab: scroll" in room.text()
        await room.press("tab", "right", "left", "up")
        assert "line 6." in room.text() and room.screen.text.has_focus, "another page has chosen its text"


async def test_key_e_runs_an_experiment_to_its_end() -> None:
    async with Classroom((80, 24), beat=1000.0) as room:  # without the key, the test gives up
        assert room.app.stage is not None
        assert ("n", "step") not in room.screen.hints() and "? help  q quit" in room.text(), "no request runs"

        def said() -> str:
            [notice] = room.app._notifications
            return notice.message

        await room.press("e")
        assert said() == "key e runs a running experiment to its end: this page has none"
        await room.press("right", "e")
        assert said().endswith(": first choose a or b, then press enter")
        await room.press("b", "e")
        assert said().endswith(": first start it with enter")
        await room.press("enter")
        await room.until(lambda: "enter next picture" in room.text())
        await room.result(1, "e")
        assert not room.app.stage.hurried and ("n", "step") in room.screen.hints()
        result = room.reading.seen[1]
        await room.press("enter")  # meant for a pause: the experiment has ended meanwhile
        assert room.reading.seen[1] is result and not room.reading.running and "r again" in room.text()


async def test_page_down_shows_all_lines_of_a_page_before_the_next_page() -> None:
    long = replace(SMALL.pages[0], text="\n\n".join(f"Line {n}." for n in range(20)))
    async with Classroom((80, 24), lesson=replace(SMALL, pages=(long, *SMALL.pages[1:]))) as room:
        seen = set()
        while room.reading.at == 0:
            seen |= set(re.findall(r"Line (\d+)\.", room.text()))
            await room.press("pagedown")
        assert seen == set(map(str, range(20)))
        await room.press("pageup")
        assert room.reading.at == 0 and "Line 0." in room.text()
        await room.press("pagedown", "pageup")
        assert room.reading.at == 0 and "Line 0." in room.text()


async def test_a_lesson_is_told_as_lines() -> None:
    lines: list[str] = []
    assert (
        await print_with_own_engine(
            SMALL_WITHOUT_FAILURE, FakeSource(), "short", sampling(20), lines.append, lambda i: ByteCodec()
        )
        == 0
    )
    text = "\n".join(lines)
    assert "Predict: What?" in text and "The answer is b) that" in text and "Answer: 1 request" in text
    assert "engine/core/engine.py" in text and "\x1b" not in text


SMALL_WITHOUT_FAILURE = Lesson(SMALL.number, SMALL.title, SMALL.question, SMALL.pages[:2], greet, SMALL.checks)
