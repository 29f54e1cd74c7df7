"""Every demo runs to its end unattended, reaches its moment, and tells only figures that its records bear out."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.trace.records import Packet, Record
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.options import engine_config
from minitui.sources.local import LocalSource
from minitui.sources.recording import RecordingSource
from minitui.teaching.contrasts import BUSY, LENGTHS, SHORT
from minitui.teaching.scenarios import DEMOS, Demo, print_demo
from minitui.teaching.stage import Stage
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.comparison import Comparison
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View
from tests.support.app.fake_client import ByteCodec, FakeSource, sampling
from tests.support.paths import ROOT
from tests.support.waiting import started


class Heard(LocalSource):
    """A live engine whose records are kept, those of each engine in a list of their own."""

    runs: list[list[Record]]

    async def reconfigure(self, config: Any) -> None:
        await super().reconfigure(config)
        self.runs.append([])

    def drain_packets(self) -> list[Packet]:
        packets = super().drain_packets()
        self.runs[-1] += [record for packet in packets for record in packet.records()]
        return packets


@dataclass
class Timed(Stage):
    """A stage that adds up the pauses and the slow motion which a user sees, without waiting for them."""

    seconds: float = 0.0
    pace: float = 0.0  # seconds of a step in slow motion

    async def pause(self, seconds: float, *more: Any) -> None:
        self.seconds += seconds
        await super().pause(seconds, *more)

    async def watch(self, n: int, seconds: float) -> None:
        self.seconds += n * seconds

    async def slow(self, seconds: float) -> None:
        self.pace = seconds

    async def answers(self, sessions: Any) -> Any:
        first = self.state().step
        metrics = await super().answers(sessions)
        self.seconds += (self.state().step - first) * self.pace
        self.pace = 0.0
        return metrics


class Told:
    """What a demo said, the records of its engines, and how many seconds a user would have seen it."""

    def __init__(self, said: list[str], runs: list[list[Record]], seconds: float = 0.0) -> None:
        self.said, self.runs, self.seconds = said, runs, seconds
        self.text = "\n".join(said)

    def of(self, kind: str, run: int = -1) -> list[Record]:
        return [record for record in self.runs[run] if record[2] == kind]

    def computed(self, run: int = -1) -> int:
        return sum(chunk[2] for record in self.of("step", run) for chunk in record[4])


def config(**options: Any) -> Any:
    return engine_config(model=choose_model(None).name, **{"kv_blocks": None, "no_prefix_caching": False, **options})


async def play_all(log: Path) -> dict[str, Told | Exception]:
    """Every demo, one after the other, in one engine process."""
    choice = choose_model(None)
    source = Heard(config(), log, choice.label)
    source.runs = [[]]
    played: dict[str, Told | Exception] = {}
    async with started(source):
        for name, demo in DEMOS.items():
            await source.reconfigure(config(**demo.options))
            source.runs = [[]]
            try:
                played[name] = await play(demo, source)
            except Exception as error:
                played[name] = error
    return played


async def play(demo: Demo, source: Heard) -> Told:
    async def restart(changes: dict[str, Any]) -> None:
        await source.reconfigure(config(**{**demo.options, **changes}))

    chats = Chats(source, sampling=sampling(demo.max_tokens))
    chats.use(load_codec(source.info))
    feed = Updater(source, View())
    await feed.sync()
    said: list[str] = []
    stage = Timed(source, feed, chats, choose_model(None).system, said.append, restart=restart, beat=0.0)
    await demo.play(stage)
    stage.state()
    assert not feed.dropped
    return Told(said, list(source.runs), stage.seconds)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told | Exception]:
    return asyncio.run(play_all(tmp_path_factory.mktemp("engine") / "engine.log"))


@pytest.fixture
def hear(played: dict[str, Told | Exception]) -> Callable[[str], Told]:
    def told(name: str) -> Told:
        outcome = played[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return told


@pytest.mark.parametrize("name", DEMOS)
def test_it_runs_to_its_end_and_fits_a_small_screen(name: str, hear: Callable[[str], Told]) -> None:
    told = hear(name)
    assert len(told.said) >= 3
    for text in told.said:
        assert len(text) < 500 and all(len(line) < 78 for line in text.split("\n")[1:] if line.startswith("   "))


@pytest.mark.parametrize("name", DEMOS)
def test_the_readme_says_how_long_it_takes(name: str, hear: Callable[[str], Told]) -> None:
    claim = re.search(r"Each takes (\d+) to (\d+) seconds\s+once its engine runs", (ROOT / "README.md").read_text())
    assert claim, "the sentence is gone"
    least, most = map(int, claim.groups())
    assert least <= hear(name).seconds <= 0.9 * most, "the work of the engine takes time, too"


def test_shared_prefix_is_computed_once(hear: Callable[[str], Told]) -> None:
    told = hear("shared-prefix")
    prompts = sum(record[5] for record in told.of("submit"))
    cached = sum(record[4] for record in told.of("match"))
    assert told.computed() + cached == prompts
    assert f"{prompts} tokens in total: {cached} came from the cache and {told.computed()} were computed" in told.text
    assert cached / prompts > 0.6


def test_the_cache_bars_count_what_was_computed(hear: Callable[[str], Told]) -> None:
    told = hear("cache")
    assert len(told.runs) == 2
    without, with_cache = told.computed(0), told.computed(1)
    arrivals = [[record[5] for record in told.of("submit", run)] for run in (0, 1)]
    assert arrivals[0] == arrivals[1] and sum(arrivals[0]) == without
    assert f"{without:,} tokens computed" in told.text and f"{with_cache:,} computed" in told.text
    shared = sum(record[4] for record in told.of("match", 1))
    assert f"{shared:,} shared" in told.text and f"saved {shared / without:.0%} of the prefill" in told.text
    assert with_cache + shared == without and with_cache < without / 3
    off, on = (line.count("█") for line in told.said[-1].split("\n")[1:3])
    assert on / off == pytest.approx(with_cache / without, abs=0.04)
    first_step = told.of("step", 1)[0]
    assert len(first_step[4]) == 6, "all six share in the step that computes the first"


def test_a_long_paste_is_spread_over_steps_that_also_decode(hear: Callable[[str], Told]) -> None:
    told = hear("chunked-prefill")
    budget = DEMOS["chunked-prefill"].options["max_num_batched_tokens"]
    at_once, chunked = (max(record[7] for record in told.of("step", run)) for run in (0, 1))
    assert at_once > 5 * budget >= chunked * 5
    paste = max(told.of("submit", 1), key=lambda record: record[5])[3]
    mixed = [record for record in told.of("step", 1) if any(chunk[0] == paste for chunk in record[4])]
    assert len(mixed) > 5 and f"{len(mixed)} chunks" in told.text
    assert all(record[7] > sum(chunk[2] for chunk in record[4]) for record in mixed), "the writers go on in each"


def test_a_target_for_gaps_spreads_prompts_and_lets_short_ones_pass(hear: Callable[[str], Told]) -> None:
    told = hear("fairness")
    most, ends = [], []
    for run in (0, 1):
        lengths = {record[3]: record[5] for record in told.of("submit", run)}
        paste = max(lengths, key=lambda request: lengths[request])
        prompts = {record[3]: sum(chunk[2] for chunk in record[4]) for record in told.of("step", run)}
        mixed = [record for record in told.of("step", run) if 0 < prompts[record[3]] < record[7]]
        assert all(record[7] - prompts[record[3]] >= BUSY for record in mixed), "each step has a token of each writer"
        most.append(max(prompts[record[3]] for record in mixed))
        last = {chunk[0]: record[3] for record in mixed for chunk in record[4]}  # the step of each prompt's last chunk
        assert len(last) == 1 + SHORT
        ends.append((last.pop(paste), max(last.values())))
    assert most[1] < most[0] / 2
    assert ends[0][0] <= ends[0][1] and ends[1][1] < ends[1][0], "short prompts pass only with the target"
    before, _ = re.findall(r"█ +([\d.,]+ \w+),", told.said[-1])  # which is longer is not certain beside other programs
    assert f"longest gap was {before}" in told.text


def test_the_victim_is_the_least_recently_used(hear: Callable[[str], Told]) -> None:
    told = hear("eviction")
    assert "Predict" in told.text
    assert re.search(r"The answer is b\. Evicted blocks: \d+ of Bravo", told.text), told.text
    assert "the order was Bravo, Charlie, Alpha" in told.text
    question = next(text for text in told.said if text.startswith("Predict"))
    cached = {}
    for name, blocks, uses in re.findall(r"\w\) (\w+) +blocks ([\d ]+): (.*)", question):
        cached[name] = {int(block) for block in blocks.split()}
        last = [int(step) for step in re.findall(r"r\d+ until step (\d+)", uses)]
        assert len(last) == (2 if name == "Alpha" else 1), "the picture does not say when its blocks were used"
    assert list(cached) == ["Alpha", "Bravo", "Charlie"]
    assert len(set().union(*cached.values())) == sum(map(len, cached.values())), "a block has two owners"
    assert re.search(r"0 of its \d+ prompt .* the beginning was evicted at step \d+\.$", told.said[-1]), told.said[-1]
    assert f"{told.of('evict')[0][4]} of Bravo" in told.text


def test_the_youngest_gives_way_and_finishes_all_the_same(hear: Callable[[str], Told]) -> None:
    told = hear("preemption")
    victim = told.of("preempt")[0]
    youngest = max(record[3] for record in told.of("submit"))
    assert victim[3] == youngest and f"r{youngest}, the youngest" in told.text
    assert [record[5] for record in told.of("finish")] == [120] * 4
    assert any(record[3] == youngest and record[5] == "resumed" for record in told.of("admit"))
    for id, times in Counter(record[3] for record in told.of("preempt")).items():
        assert f"r{id} {'once' if times == 1 else f'{times} times'}" in told.said[-1], "all are named"


def test_forks_share_all_but_their_last_blocks(hear: Callable[[str], Told]) -> None:
    told = hear("fork")
    tables = [line.split("|") for line in next(t for t in told.said if "four block tables" in t).split("\n")[1:]]
    assert len(tables) == 4
    assert len({left.split("  ")[-1] for left, _ in tables}) == 1, "the same blocks before the bar"
    own = [block for _, right in tables for block in right.split()]
    assert len(own) == len(set(own)) >= 4, "and no shared block after it"


def test_continuous_batching_takes_fewer_steps(hear: Callable[[str], Told]) -> None:
    told = hear("batching")
    static, continuous = (len(told.of("step", run)) for run in (0, 1))
    assert static == max(LENGTHS[:4]) + max(LENGTHS[4:]) > continuous
    assert f"{static} steps" in told.text and f"{continuous} steps" in told.text
    for run in (0, 1):
        assert sum(record[5] for record in told.of("finish", run)) == sum(LENGTHS)
    size = {record[3]: record[7] for record in told.of("step", 0) if not record[4]}
    for rows in (1, 4):
        took = [record[7] for record in told.of("time", 0) if size.get(record[3]) == rows]
        said = re.search(rf"{rows} rows? took ([\d.]+) ms", told.text)
        assert said and min(took) - 0.1 <= float(said[1]) <= max(took) + 0.1  # the last time may come after the text


async def test_a_demo_is_told_as_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    demo = DEMOS["shared-prefix"]
    source = FakeSource(num_blocks=200)
    system = "You explain inference engines, in blocks of sixteen."
    assert await print_demo(demo, source, system, sampling(24), load=lambda info: ByteCodec()) == 0
    out = capsys.readouterr().out
    assert "the same memory, no copies" in out and "\x1b" not in out and re.match(r" +\d+\.\d s  ", out)
    assert source.closed


class Changeable(FakeSource):
    async def reconfigure(self, config: object) -> None:
        await self.restart(lambda progress: None)


@pytest.mark.parametrize("same_engine", [False, True])
async def test_two_runs_of_a_scenario_are_kept_to_be_compared(same_engine: bool) -> None:
    kept = []

    async def twice(stage: Stage) -> None:
        for name, questions in (("one chat", 1), ("two chats", 2)):
            if name == "two chats" and not same_engine:
                await stage.other_engine()
            await stage.begin_run(name, first=name == "one chat")
            await stage.gate()
            chats = [stage.chat(max_tokens=8, whole=True) for _ in range(questions)]
            for chat in chats:
                await stage.ask(chat, "What is a block?")
            await stage.answers(chats)
        await stage.settle()
        later = stage.chat(max_tokens=8, whole=True)  # as in a class, which asks the engine of the second run something
        await stage.ask(later, "What is a page?")
        await stage.answers([later])
        kept.append(Comparison.of(stage.view))

    source = Changeable()
    demo = Demo("two runs", twice, 8)
    await print_demo(demo, source, "Answer.", sampling(8), load=lambda info: ByteCodec(), restart=source.reconfigure)
    [comparison] = kept
    assert [run.name for run in comparison.runs] == ["one chat", "two chats"]
    first, second = (run.figures for run in comparison.runs)
    assert (first.requests, first.finished, first.replies) == (1, 1, 8)
    assert (second.requests, second.finished, second.replies) == (2, 2, 16)


async def test_a_recorded_demo_knows_its_chats_in_the_files_of_all_its_engines(tmp_path: Path) -> None:
    async def twice(stage: Stage) -> None:
        for change in (False, True):
            if change:
                await stage.other_engine()
            chat = stage.chat(title=f"engine {1 + change}")
            await stage.ask(chat, "What is a block?")
            await stage.answers([chat])

    source = RecordingSource(Changeable(), tmp_path / "demo.trace")
    await print_demo(
        Demo("two engines", twice, 8), source, "Answer.", sampling(8), load=lambda info: ByteCodec(),
        restart=source.reconfigure,
    )
    for name, chat in (("demo.trace", "#1 engine 1"), ("demo.2.trace", "#2 engine 2")):
        reader = TraceReader(tmp_path / name)
        asked = [record[4] for record in reader.records() if record[2] == "submit"]
        assert [reader.names.get(group) for group in asked] == [chat]


def test_speculation_draws_the_same_answer_in_a_fraction_of_the_steps(hear: Callable[[str], Told]) -> None:
    told = hear("speculation")
    assert not told.of("draft", 0) and len(told.runs) == 2
    lengths = [[record[5] for record in told.of("finish", run)] for run in (0, 1)]
    assert lengths[0] == lengths[1] and lengths[0][0] == lengths[0][1], "the second answer is not the first"
    steps = [
        sum(record[3] >= first for record in told.of("step", run))
        for run in (0, 1)
        for first in [next(r[3] for r in told.of("step", run) if r[4] and r[4][0][0] == 2)]
    ]
    assert steps[1] < steps[0] / 4 and steps[0] == lengths[0][1]
    drafts = [draft for record in told.of("accept") for draft in record[4] if draft[0] == 2]
    drafted, accepted = sum(draft[1] for draft in drafts), sum(draft[2] for draft in drafts)
    assert f"{steps[0]} steps, " in told.text and f"{steps[1]} steps, " in told.text
    assert f"{accepted} of {drafted} drafts were accepted" in told.text
    assert steps[1] + accepted == lengths[1][1]
