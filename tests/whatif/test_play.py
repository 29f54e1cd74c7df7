"""What another setting would have done: the counts are those of a real run under that setting, exactly, if arrivals do
not depend on time. The real runs drive the real engine over the simulated device of tests/support/simulation.py."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.gap_target import LEAST
from engine.core.request import Request
from engine.errors import EngineError
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.side_pool import SideGroup
from minitui.exercises import work
from minitui.server.telemetry.broadcast import MASKED
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.whatif.answer import Question
from minitui.whatif.cost import FEATURES
from minitui.whatif.play import Player
from minitui.whatif.settings import Setting, changes, points
from tests.support.simulation import SimulatedRunner, simulated

BASE = Setting(budget=64, seqs=8, blocks=160, block_size=4, context=2048)
VOCABULARY = 50


def chats(seed: int, turns: int = 3, salts: bool = True) -> list[list[tuple[list[int], int, str]]]:
    """Returns chats as lists of (new tokens of a question, longest reply, salt); many begin with the same tokens."""
    r = random.Random(seed)
    systems = [[r.randrange(6) for _ in range(r.randrange(8, 40))] for _ in range(3)]
    found = []
    for _ in range(14):
        salt = r.choice(["", "", "", "a"]) if salts else ""
        first = r.choice(systems) + [r.randrange(6) for _ in range(r.randrange(1, 30))]
        more = [[r.randrange(6) for _ in range(r.randrange(1, 20))] for _ in range(turns - 1)]
        found.append([(ids, r.choice([1, 5, 20, 60]), salt) for ids in (first, *more)])
    return found


def real(
    path: Path | None, setting: Setting, seed: int, closed: bool = False, echo: bool = False, overlap: bool = False,
    hidden: bool = False, salts: bool = True, groups: tuple[SideGroup, ...] = (),
) -> Engine:
    """Runs chats for real, and records them in `path`. All first questions are asked before the first step; with
    `closed`, each next question comes when its chat has its answer. `hidden`: as a server with --hide-text records."""
    runner = SimulatedRunner(setting.blocks + 1, setting.block_size, setting.seqs, VOCABULARY, echo=echo, groups=groups)
    engine = simulated(Engine(
        runner, setting.scheduler(), overlap=overlap, prefix_caching=setting.cache, eviction_policy=setting.eviction,
        eos_ids=frozenset({VOCABULARY - 1}),
    ))
    engine.finished = []  # type: ignore[attr-defined]
    recorder = None
    if path is not None:
        recorder = Recorder(path, keyframe_every=700)
        info = EngineInfo(model="simulated", device="none", prefix_caching=setting.cache, overlap=overlap)
        recorder.begin(setting.info(info), engine.snapshot())
    left = {f"chat {i}": list(turns) for i, turns in enumerate(chats(seed, 3 if closed else 1, salts))}

    def ask(group: str, before: list[int]) -> None:
        new, most, salt = left[group].pop(0)
        params = SamplingParams(max_tokens=most, seed=seed)
        engine.add_request([*before, *new], params, group, cache_salt=salt, priority=int(group.split()[1]) % 3 - 1)

    for group in left:
        ask(group, [])
    while engine.has_work:
        for item in engine.step():
            if item.finish_reason:
                engine.finished.append(item.request)  # type: ignore[attr-defined]
                if left[item.request.group]:
                    ask(item.request.group, item.request.ids)
        if recorder is not None:
            recorder.feed(masked(record) if hidden else record for record in engine.log.drain())
    engine.check()
    if recorder is not None:
        recorder.close()
    return engine


def masked(record: tuple[Any, ...]) -> tuple[Any, ...]:
    place = MASKED.get(record[2])
    if place is None:
        return record
    place += 3
    return (*record[:place], [7] * len(record[place]), *record[place + 1 :])


def counts(engine: Engine) -> dict[str, Any]:
    finished: list[Request] = engine.finished  # type: ignore[attr-defined]
    return {
        "steps": engine.scheduler.step,
        "requests": sorted((r.group, r.prompt_len, r.cached_tokens, r.preemptions, len(r.ids)) for r in finished),
        "drafts": sum(r.drafted_tokens for r in finished), "accepted": sum(r.accepted_tokens for r in finished),
    }


def played_counts(player: Player) -> dict[str, Any]:
    every = player.played.values()
    return {
        "steps": player.engine.scheduler.step,
        "requests": sorted(
            (p.asked.group, p.asked.prompt, p.cached, p.preemptions, p.asked.prompt + len(p.tokens)) for p in every
        ),
        "drafts": sum(p.drafted for p in every), "accepted": sum(p.accepted for p in every),
    }


CHANGES = [
    "budget=16", "budget=512", "blocks=60", "blocks=400", "seqs=3", "policy=static", "policy=longest-prefix",
    "policy=priority", "eviction=fifo,blocks=60", "cache=off", "chunking=off", "budget=24,blocks=70,seqs=5",
    "block_size=8",
]


@pytest.mark.parametrize("change", ["seqs=8", *CHANGES])
@pytest.mark.parametrize("closed", [False, True])
def test_counts_are_those_of_a_real_run_under_the_other_setting(change, closed, tmp_path):
    real(tmp_path / "run.trace", BASE, 1, closed)
    question = Question(tmp_path / "run.trace", "closed" if closed else "recorded")
    setting = question.changed(changes(change))
    expected = counts(real(None, setting, 1, closed))
    assert played_counts(question.play(setting)) == expected
    assert len(expected["requests"]) == (42 if closed else 14)


@pytest.mark.parametrize("seed", range(2, 8))
def test_counts_of_random_chats_in_a_small_pool(seed, tmp_path):
    r = random.Random(seed)
    real(tmp_path / "run.trace", BASE, seed, closed=True)
    question = Question(tmp_path / "run.trace", "closed")
    small = {"blocks": str(r.choice([60, 90])), "budget": str(r.choice([8, 40])), "seqs": "6"}
    for policy in ("fcfs", "priority", "longest-prefix"):  # in another order than in the recording, questions come
        setting = question.changed({**small, "policy": policy})
        expected = counts(real(None, setting, seed, closed=True))
        player = question.play(setting, traced=True)
        assert played_counts(player) == expected, policy
        player.write(tmp_path / f"{policy}.trace", question.reader.info)
        TraceReader(tmp_path / f"{policy}.trace").check()


def test_drafts_are_those_of_a_real_run(tmp_path):
    setting = replace(BASE, speculation=4, block_size=1)
    real(tmp_path / "fine.trace", setting, 3, echo=True, salts=False)  # blocks of one token: all texts are known
    fine = Question(tmp_path / "fine.trace")
    off = fine.changed({"speculation": "off"})
    assert played_counts(fine.play(off)) == counts(real(None, off, 3, echo=True, salts=False))
    expected = counts(real(None, fine.setting, 3, echo=True, salts=False))
    assert expected["accepted"] > 20
    assert played_counts(fine.play(fine.setting)) == expected


@pytest.mark.parametrize("traced", [False, True])
def test_a_target_for_gaps_is_recorded_and_learns_from_the_played_times(traced, tmp_path):
    real(tmp_path / "run.trace", replace(BASE, budget=512, gap=40.0), 1, closed=True)
    question = Question(tmp_path / "run.trace", "closed")
    assert question.setting.gap == 40 and question.changed({"gap": "off"}).scheduler().max_gap_ms is None
    costs = replace(work.costs(), own=[float(name in ("steps", "prefill tokens")) for name in FEATURES])
    player = Player(question.recorded, costs, question.setting, "closed", traced).run()
    assert LEAST < player.engine.scheduler.gaps.tokens < 40  # 1 ms a token: only 39 would fit


@pytest.mark.parametrize(("speculation", "leave"), [(0, False), (4, False), (0, True)])
def test_figures_are_those_of_the_records(speculation, leave, tmp_path):
    """`leave`: some requests end before their first token: in the queue, or when a part of the prompt is computed."""
    small = replace(BASE, blocks=60, budget=24, speculation=speculation)
    real(tmp_path / "run.trace", small, 1, closed=True, echo=bool(speculation))
    question = Question(tmp_path / "run.trace", "closed")
    assert question.figures == Run(recorded_view(question.reader)).figures
    for n, one in enumerate(question.recorded.requests[::4] if leave else ()):
        one.reply, one.reason, one.ended = 0, "abort", one.at + (n + 1) * 2e-4
    player = question.play(question.setting, traced=True)
    told, seen = asdict(player.figures), asdict(Run(player.view("played")).figures)
    assert len({one.left > 0 for one in player.played.values()}) == 1 + leave
    for name in ("requests", "finished", "steps", "replies", "computed", "cached", "twice", "evicted", "preemptions"):
        assert told[name] == seen[name], name
    for name in ("gaps", "first_p50", "first_p99", "gap_p50", "gap_p99"):
        assert told[name] == pytest.approx(seen[name], rel=0.01), name  # records have whole microseconds
    if not leave:  # who leaves when hangs on measured times
        assert told["twice"] > 100 < told["evicted"] and told["preemptions"]


@pytest.mark.parametrize("blocks", ["1000", "500"])
def test_prompt_tokens_of_requests_from_before_a_recording_count_if_a_smaller_pool_lets_them_wait(blocks):
    question = Question(find_trace("vllm-8b"))
    player = question.play(question.changed({"blocks": blocks}), traced=True)
    told, seen = asdict(player.figures), asdict(Run(player.view("played")).figures)
    for name in ("requests", "finished", "prompt_tokens", "computed", "cached", "twice", "firsts", "preemptions"):
        assert told[name] == seen[name], name
    assert question.play(question.setting).figures.computed < told["computed"]


def test_the_next_question_of_a_request_that_ends_before_the_first_played_step_is_played():
    question = Question(find_trace("vllm-8b"), "closed")
    setting, requests = question.changed({"blocks": "1000"}), question.recorded.requests
    player = question.play(setting)
    assert "1 request from before the recording ended before the first played step." in player.notes
    [ended] = {one.id for one in requests} - {one.asked.id for one in player.played.values()}
    requests[-1].after = next(one for one in requests if one.id == ended)
    assert question.play(setting).figures.requests == player.figures.requests == len(requests) - 1


def test_hidden_texts_are_known_by_their_blocks(tmp_path):
    roomy = Setting(budget=64, seqs=8, blocks=2000, block_size=4, context=2048)
    real(tmp_path / "run.trace", roomy, 1, closed=True, hidden=True)
    question = Question(tmp_path / "run.trace", "closed")
    assert question.recorded.hidden
    for change in ("budget=16", "blocks=90", "seqs=3", "cache=off"):
        setting = question.changed(changes(change))
        assert played_counts(question.play(setting)) == counts(real(None, setting, 1, closed=True)), change
    with pytest.raises(EngineError, match="hidden: drafts"):
        question.play(question.changed({"speculation": "4"}))


def test_a_run_without_a_cache_tells_what_a_cache_would_have_saved(tmp_path):
    without = Setting(budget=64, seqs=8, blocks=160, block_size=4, context=2048, cache=False)
    real(tmp_path / "run.trace", without, 1, closed=True, salts=False)
    question = Question(tmp_path / "run.trace", "closed")
    setting = question.changed({"cache": "on"})
    expected = counts(real(None, setting, 1, closed=True, salts=False))
    assert played_counts(question.play(setting)) == expected
    assert sum(cached for _, _, cached, _, _ in expected["requests"]) > 500


def test_steps_that_overlap(tmp_path):
    real(tmp_path / "run.trace", BASE, 1, closed=True, overlap=True)
    question = Question(tmp_path / "run.trace", "closed")
    assert question.costs.overlap
    for change in ("seqs=8", "budget=16", "blocks=70"):
        setting = question.changed(changes(change))
        expected = counts(real(None, setting, 1, closed=True, overlap=True))
        assert played_counts(question.play(setting)) == expected, change


def test_settings_are_checked():
    assert changes("budget=1024, cache=off") == {"budget": "1024", "cache": "off"}
    assert points("budget=512..3000") == ("budget", ["512", "1024", "2048", "3000"])
    assert points("policy=fcfs|static") == ("policy", ["fcfs", "static"])
    for text, why in (
        ("budget", "is not a list"), ("budgets=3", "no setting 'budgets'"), ("budget=0", "from 1 to"),
        ("cache=maybe", "on or off"), ("policy=mine", "one of fcfs"), ("budget=1,budget=2", "is not a list"),
        ("blocks=99999999999", "from 1 to"),
    ):
        with pytest.raises(EngineError, match=why):
            changes(text)
    with pytest.raises(EngineError, match="the smaller first"):
        points("budget=512..256")


def test_what_does_not_fit_is_said(tmp_path):
    real(tmp_path / "run.trace", BASE, 1)
    question = Question(tmp_path / "run.trace")
    player = question.play(question.changed({"blocks": "9"}))
    assert any("did not fit" in note for note in player.notes)
    assert any("cut" in note for note in player.notes)
    assert not question.play(question.setting).notes
    larger = question.play(question.changed({"budget": "1024"}))
    assert any(note.startswith("extrapolated: ") and "prompt tokens in a step" in note for note in larger.notes)
