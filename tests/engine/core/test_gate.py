"""Pause, step, run until, slow motion: what the gate lets through, and that it says why it stopped."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.process import server
from engine.process.loop import EngineLoop
from engine.trace.records import Record
from tests.engine.core.test_scheduler_simulation import make_engine


def steps_taken(engine: Engine, tries: int = 200) -> int:
    """Run as the engine process does: only while the gate allows it."""
    taken = 0
    for _ in range(tries):
        if engine.has_work and engine.gate.allows():
            engine.step()
            taken += 1
    return taken


def busy_engine(**options: object) -> Engine:
    engine = make_engine(**options)  # type: ignore[arg-type]
    for i in range(3):
        engine.add_request([i, 1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    return engine


def built_of(engine: Engine, prepare: Callable[[bool], dict[str, Any] | None] = lambda wanted: None) -> Any:
    """What EngineLoop needs of a Built."""
    return SimpleNamespace(engine=engine, tokenizer=None, prepare=prepare)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_gate_lets_exactly_n_steps_through(overlap: bool) -> None:
    engine = busy_engine(overlap=overlap)
    engine.step()
    engine.gate.pause()
    engine.drain()
    step = engine.scheduler.step
    assert steps_taken(engine) == 0
    engine.gate.step(3)
    assert steps_taken(engine) == 3
    assert engine.scheduler.step == step + 3
    assert not engine._flight, "a gated step is synchronous"
    engine.gate.resume()
    steps_taken(engine)
    assert not engine.has_work


def test_a_step_that_fails_is_one_of_those_let_through() -> None:
    engine = busy_engine(rows=1)
    engine.step()
    engine.gate.step(1)

    def fail(plan: object) -> None:
        raise RuntimeError("the simulated device failed")

    engine.runner.on_launch = fail  # type: ignore[attr-defined]
    assert steps_taken(engine, 3) == 1


@pytest.mark.parametrize(
    ("event", "said"), [("finish", "finished: length"), ("admission", "was admitted"), ("hit", "tokens from the tree")]
)
def test_run_until_stops_after_the_step_in_which_it_happened_and_says_what(event: str, said: str) -> None:
    engine = busy_engine()
    engine.step()
    engine.log.drain()
    engine.gate.run_until(event)
    if event != "finish":
        steps_taken(engine, 3)
        engine.add_request([0, 1, 2, 3, 9], SamplingParams(max_tokens=2))
    taken = steps_taken(engine)
    assert 0 < taken < 60
    gates = [record for record in engine.log.drain() if record[2] == "gate"]
    assert gates[-1][3] == "closed" and said in gates[-1][4]
    assert steps_taken(engine) == 0


def test_what_is_waited_for_is_told_and_so_is_its_end() -> None:
    engine = busy_engine()

    def told() -> list[str]:
        return [record[4] for record in engine.log.drain() if record[2] == "gate"]

    engine.gate.pause()
    assert told() == ["paused"]
    engine.gate.run_until("eviction")
    engine.gate.run_until("hit")
    assert told() == ["running until eviction", "running until hit"]
    engine.gate.step(2)
    engine.gate.step(1)
    assert told() == ["stepping"]
    engine.gate.run_until("slow", 1e9)
    engine.gate.pause()
    assert told() == ["running until slow", "paused"] and not engine.gate.allows()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("event", ["admission", "prefill", "finish"])
def test_run_until_looks_at_what_happens_from_now_on_also_while_records_are_off(event: str, kept: bool) -> None:
    engine = busy_engine()
    engine.log.enabled = kept
    engine.step()
    engine.abort(1)  # all three have happened, and nobody has drained the log
    engine.gate.run_until(event)
    assert steps_taken(engine, 5) == 5
    engine.add_request([7, 7], SamplingParams(max_tokens=2, ignore_eos=True))
    assert 0 < steps_taken(engine) <= 3 and engine.has_work


def test_what_is_waited_for_between_two_steps_closes_the_gate_without_another() -> None:
    engine = busy_engine()
    engine.gate.run_until("finish")
    engine.abort(1)
    assert steps_taken(engine) == 0
    engine.gate.settle()
    assert [record[4] for record in engine.log.drain() if record[2] == "gate"][-1] == "r1 finished: abort"


def test_run_until_preemption_and_eviction() -> None:
    engine = make_engine(blocks=10, block_size=4, budget=64, watermark=0.0)
    for i in range(3):
        engine.add_request([i, 1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.gate.run_until("preemption")
    steps_taken(engine)
    assert any(r.preemptions for r in engine.scheduler.waiting)


def test_slow_motion_stretches_a_step_in_proportion_to_its_real_duration() -> None:
    engine = busy_engine(overlap=True)
    engine.gate.set_pace(50)
    engine.step()
    assert engine.gate.stretch_s == pytest.approx(49 * engine.gate.last_wall_s) and engine.gate.last_wall_s > 0
    engine.gate.set_pace(1)
    assert engine.gate.stretch_s == 0


@pytest.mark.parametrize(("overlap", "idle"), [(True, True), (True, False), (False, True)])
def test_text_is_sent_at_each_step_if_that_delays_none(overlap: bool, idle: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("engine.process.loop.FLUSH_S", 3600.0)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    messages: list[int] = []  # the number of deltas in each

    def send_news(deltas: list[Any], records: list[Record]) -> None:
        if deltas:
            messages.append(len(deltas))
        if any(delta[3:] for delta in deltas if delta[3:4] == ("length",)):
            commands.put(("close", 0, (), None))

    engine = make_engine(overlap=overlap)
    commands.put(("submit", 1, ([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True), "", 0, 0, ""), None))
    built, heart = built_of(engine), SimpleNamespace(begin=lambda task: None)
    writer = SimpleNamespace(send=lambda *message: None, send_news=send_news, idle=idle)
    EngineLoop(built, commands, writer, heart).run()  # type: ignore[arg-type]
    assert sum(messages) == 12 and (len(messages) > 9) == (overlap and idle)


def test_in_slow_motion_the_engine_sends_during_the_delay_and_no_step_takes_longer_for_it() -> None:
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    records: list[Record] = []

    class SlowWriter:
        """Needs 20 ms to send records, as on a machine whose cores are busy."""

        def send(self, *message: Any) -> None:
            pass

        def send_news(self, deltas: list[Any], news: list[Record]) -> None:
            records.extend(news)
            time.sleep(0.02)
            if any(record[2] == "finish" for record in news):
                commands.put(("close", 0, (), None))

    engine = make_engine(overlap=False)
    engine.gate.set_pace(2)
    commands.put(("submit", 1, ([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True), "", 0, 0, ""), None))
    EngineLoop(built_of(engine), commands, SlowWriter(), SimpleNamespace(begin=lambda task: None)).run()  # type: ignore[arg-type]
    emit_ms = [record[5] / 1e3 for record in records if record[2] == "parts"]
    assert len(emit_ms) >= 11 and median(emit_ms) < 10
    assert engine.log.held > 0.02 * 10


class Pieces:
    """A Runner.prepare with some pieces of work. The last one ends the engine, or fails."""

    def __init__(self, commands: queue.SimpleQueue[Any], count: int, fails: bool = False) -> None:
        self.commands, self.left, self.fails = commands, count, fails
        self.done: list[bool] = []  # of each piece: True if a running request waited for it

    def __call__(self, wanted: bool) -> dict[str, Any] | None:
        self.done.append(wanted)
        self.left -= 1
        if self.fails:
            raise RuntimeError("out of memory")
        if not self.left:
            self.commands.put(("close", 0, (), None))
        return {"text": f"{self.left} left"} if self.left else None


def run_with(pieces: Pieces, heart: Any, *, tokens: int = 0) -> Engine:
    engine, commands = make_engine(), pieces.commands
    if tokens:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        commands.put(("submit", 1, ([1, 2, 3], params, "", 0, 0, ""), None))

    def send_news(deltas: list[Any], records: list[Record]) -> None:
        if any(record[2] == "finish" for record in records) and pieces.fails:
            commands.put(("close", 0, (), None))

    writer = SimpleNamespace(send=lambda *message: None, send_news=send_news, idle=True)
    EngineLoop(built_of(engine, pieces), commands, writer, heart).run()  # type: ignore[arg-type]
    return engine


def test_an_idle_engine_prepares_later_steps_and_says_so() -> None:
    told: list[str] = []
    heart = type("Told", (), {"begin": lambda self, task: None, "__setattr__": lambda self, _, text: told.append(text)})
    pieces = Pieces(queue.SimpleQueue(), 4)
    run_with(pieces, heart())
    assert pieces.done == [False] * 4 and told == ["3 left", "2 left", "1 left", ""]


@pytest.mark.parametrize("graphs", [{}, {"rows": [1]}])
def test_a_client_knows_of_missing_graphs_before_the_engine_is_ready(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, ...]] = []
    heart = server.Heart(lambda *beat: sent.append(beat))
    built = SimpleNamespace(info=EngineInfo(device="a GPU", graphs=graphs), close=lambda: None)
    monkeypatch.setattr("engine.build.build_engine", lambda *_, **options: built)
    monkeypatch.setattr(server, "EngineLoop", lambda *_: SimpleNamespace(run=lambda: None))
    writer = SimpleNamespace(send=lambda *message: sent.append(message))
    command = server.Command("start", 0, (EngineConfig("a model"),))
    assert server._serve(command, queue.SimpleQueue(), writer, heart, lambda: None) == (0, None)  # type: ignore[arg-type]
    ready = [message[0] for message in sent].index("ready")
    assert bool(sent[ready - 1][3]) == bool(graphs) and sent[ready - 1][0] == "beat"


def test_a_running_request_waits_only_for_what_its_steps_lack_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.loop.PREPARE_SHARE", 1e-9)
    pieces = Pieces(queue.SimpleQueue(), 2)
    engine = run_with(pieces, SimpleNamespace(begin=lambda task: None), tokens=6)
    assert pieces.done == [True, False], "once between the steps, then when the request had ended"
    assert not engine.has_work and engine.log.held > 0


def test_if_a_piece_fails_requests_go_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    heart = SimpleNamespace(begin=lambda task: None, preparing="some")
    pieces = Pieces(queue.SimpleQueue(), 9, fails=True)
    engine = run_with(pieces, heart, tokens=6)
    assert len(pieces.done) == 1 and heart.preparing == "" and not engine.has_work
    assert "the preparation of steps ends" in caplog.text
