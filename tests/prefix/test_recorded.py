"""Forty recorded sessions with planted causes: at least 95 % are named, and none is invented. The real engine runs them
over a simulated device, and records; a token is a character."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.errors import EngineError
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.side_pool import SideGroup
from minitui.prefix.diagnose import Finding
from minitui.prefix.recorded import findings_of, parts_of_text
from minitui.prefix.report import lines
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from minitui.whatif.asked import asked_in
from tests.prefix.test_diagnose import PLANTED, Session
from tests.support.simulation import SimulatedRunner, simulated

TURNS = 5
PLANTED_AT = 3
BLOCKS = 400


class Recorded:
    """A session over an engine with these side groups, recorded in `path`."""

    def __init__(self, path: Path, seed: int, *groups: SideGroup, chat: bool = False) -> None:
        runner = SimulatedRunner(BLOCKS + 1, 16, 8, 256, groups=groups)
        self.engine = simulated(Engine(runner, SchedulerConfig(4096, 8, max_model_len=6400, checkpoint_interval=512)))
        self.session = Session(seed, "openai", False)
        self.path, self.group = path, f"chat {seed}" if chat else ""
        self.numbers: list[int] = []
        self.recorder = Recorder(path)
        self.recorder.begin(EngineInfo(model="simulated", device="none"), self.engine.snapshot())

    def ask(self) -> None:
        """The next turn: the history, as a template with tools and thinking writes it, and a new question."""
        session = self.session
        session.messages.append({"role": "user", "content": session.text(20)})
        body = session.body()
        tools = "\n".join(json.dumps(tool) for tool in body["tools"])
        text = ""
        for message in body["messages"]:
            inside = message["content"]
            if message["role"] == "system":
                inside += f"\n<tools>\n{tools}\n</tools>"
            if message.get("reasoning_content"):
                inside = f"<think>{message['reasoning_content']}</think>{inside}"
            text += f"<|im_start|>{message['role']}\n{inside}<|im_end|>\n"
        self.numbers.append(self.run(f"{text}<|im_start|>assistant\n", session.salt, self.group))
        session.messages.append({"role": "assistant", "content": session.text(25), "reasoning_content": "hm " * 30})

    def run(self, text: str, salt: str = "", group: str = "", reply: int = 3) -> int:
        """Returns the number of a request with this prompt, when it has its answer."""
        params = SamplingParams(max_tokens=reply, seed=1, ignore_eos=True)
        request = self.engine.add_request(list(text.encode("latin-1")), params, group, cache_salt=salt)
        while self.engine.has_work:
            self.engine.step()
        self.recorder.feed(self.engine.log.drain())
        return request.id

    def findings(self) -> dict[int, Finding]:
        self.recorder.close()
        recorded = asked_in(TraceReader(self.path))
        return {one.number: one for one in findings_of(recorded, lambda ids: bytes(ids).decode("latin-1"))}


def flood(s: Recorded) -> None:
    """Other requests take the whole pool."""
    for _ in range(2):
        s.run(s.session.text(1100)[: 16 * (BLOCKS - 4)])


CAUSES: dict[str, Callable[[Recorded], None]] = {
    name: lambda s, plant=plant: plant(s.session)  # type: ignore[misc]
    for name, plant in PLANTED.items() if name not in ("adapter", "another replica", "unknown")
} | {"eviction": flood}


def test_forty_recorded_sessions(tmp_path):
    named, wrong = 0, []
    for seed in range(40):
        cause = list(CAUSES)[seed % len(CAUSES)]
        s = Recorded(tmp_path / f"{seed}.trace", seed, chat=seed % 3 == 0)
        for turn in range(TURNS):
            if turn == PLANTED_AT:
                CAUSES[cause](s)
            s.ask()
        found = s.findings()
        told = [found[number].cause for number in s.numbers]
        named += told[PLANTED_AT] == cause
        if told[PLANTED_AT] != cause:
            wrong.append((seed, cause, told))
        assert told[:PLANTED_AT] == ["first", "none", "none"] and set(told[PLANTED_AT + 1 :]) == {"none"}, (cause, told)
    assert named >= 38, wrong


def test_nothing_is_invented_between_chats_with_one_system_prompt(tmp_path):
    s = Recorded(tmp_path / "run.trace", 1, chat=True)
    other = Session(1, "openai", False)  # the same system prompt and tools
    for turn in range(4):
        s.ask()
        s.session, other = other, s.session
        s.session.random.seed(turn + 100)
        s.group = f"chat {turn % 2}"
    causes = [one.cause for one in s.findings().values()]
    assert causes == ["first", "none", "none", "none"]


def test_a_window_and_a_checkpoint_that_cut_a_hit(tmp_path):
    text = "<|im_start|>user\n" + "What is kept of a text for a window, and what of a state? " * 12
    s = Recorded(tmp_path / "window.trace", 1, SideGroup("window 32", "window", 12, 32))
    numbers = [s.run(text), s.run(text[:300] + "Now something else."), s.run("x" * 170), s.run(text)]
    found = s.findings()
    assert found[numbers[0]].cause == "first" and found[numbers[3]].cause == "window"
    assert "window 32" in found[numbers[3]].where and found[numbers[3]].lost > 200
    s = Recorded(tmp_path / "state.trace", 1, SideGroup("state", "state", 20))
    numbers = [s.run(text), s.run(text[:500] + "Now something else."), s.run(text[:500] + "And this.")]
    found = s.findings()
    assert [found[number].cause for number in numbers] == ["first", "checkpoint", "none"]
    assert found[numbers[1]].could == 496 and found[numbers[1]].cached == 496 - found[numbers[1]].lost


def test_a_prompt_of_one_block_cannot_share(tmp_path):
    s = Recorded(tmp_path / "run.trace", 1)
    numbers = [s.run("a" * 30), s.run("a" * 12), s.run("a" * 40)]
    found = s.findings()
    assert [found[number].cause for number in numbers] == ["first", "too short for a block", "none"]
    assert lines(list(found.values()), "run")[-2:] == ["", "No request lost its prefix."]


def test_a_recording_without_requests_is_refused_whatever_its_file_is_called(tmp_path):
    """The file of a server that was watched has a name that its user does not know."""
    with pytest.raises(EngineError, match="the recording has no requests: record, or watch"):
        Recorded(tmp_path / "run.trace", 1).findings()


def test_the_parts_of_a_prompt():
    text = (
        '<|im_start|>system\nSee <tools></tools>:\n<tools>\n{"a": 1}\n{"b": 2}\n</tools>\nNow.<|im_end|>\n'
        "<|im_start|>assistant\n<think>hm</think>Yes.<|im_end|>\n<|im_start|>assistant\n"
    )
    kinds = [part.kind for part in parts_of_text(text)]
    assert kinds == ["system", "system", "tool", "tool", "system", "thinking", "assistant"]
    llama = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    assert [(part.kind, part.text) for part in parts_of_text(llama)] == [("user", "\n\nHi<|eot_id|>")]
