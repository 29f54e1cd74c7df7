"""Forty sessions with planted causes: at least 95 % are named, and none is invented in sessions without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from minitui.prefix.diagnose import CAUSES, Finding, diagnose, difference
from minitui.prefix.report import WELL
from minitui.prefix.session import Part, Turn, parts_of

WORDS = ("cache", "block", "token", "prefix", "step", "tree", "pool", "reads", "the", "file", "and", "writes", "test")
Body = dict[str, Any]


class Session:
    """An agent's session of six turns; the cause is planted in the fourth."""

    def __init__(self, seed: int, api: str, hidden: bool) -> None:
        self.random, self.api, self.hidden = random.Random(seed), api, hidden
        r = self.random
        self.tools = [
            {"type": "function", "function": {"name": f"tool_{i}", "description": self.text(40)}} for i in range(5)
        ]
        r.shuffle(self.tools)
        day = f"2026-{r.randrange(1, 13):02}-{r.randrange(10, 28)}"
        dated = f"Today is {day}. cch={r.randrange(16**5):05x}"
        self.system = f"You are an agent. {self.text(60)} {dated}; {self.text(200)}"
        self.thinking = True
        self.messages: list[Body] = []
        self.salt, self.model, self.replica = "", "model", "a"
        self.turns: list[Turn] = []
        self.caches: dict[tuple[str, str, str], list[str]] = {}
        self.told = True
        self.evicts = False

    def text(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    def body(self) -> Body:
        messages = [dict(m) for m in self.messages]
        if not self.thinking:
            for message in messages:
                message.pop("reasoning_content", None)
        body: Body = {"model": self.model, "tools": list(self.tools), "cache_salt": self.salt}
        if self.api == "anthropic":
            return body | {"system": [{"type": "text", "text": self.system}], "messages": messages}
        return body | {"messages": [{"role": "system", "content": self.system}, *messages]}

    def ask(self) -> None:
        """Send the history with a new question; a server with caches of 16 characters a block answers."""
        self.messages.append({"role": "user", "content": self.text(30)})
        body = self.body()
        parts = parts_of(body)
        prompt = "".join(f"<{part.kind}>{part.text}" for part in parts)
        cache = self.caches.setdefault((self.salt, self.model, self.replica), [])
        if self.evicts:
            cache.clear()
        hit = max((common(prompt, text) for text in cache), default=0) // 64 * 64
        parts = [part.hide(b"key") for part in parts] if self.hidden else parts
        turn = Turn(len(self.turns), len(self.turns) * 10.0, parts, self.model, self.salt, self.replica)
        turn.prompt, turn.first_ms = len(prompt) // 4, 20 + (len(prompt) - hit) * 0.1
        turn.cached = hit // 4 if self.told else None
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": self.text(50), "reasoning_content": self.text(30)})
        cache.append(prompt + self.messages[-1]["content"])


def common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def reorder(s: Session) -> None:
    s.tools = s.tools[2:] + s.tools[:2]


def add_tool(s: Session) -> None:
    s.tools.insert(1, {"type": "function", "function": {"name": "new", "description": "more"}})


def date(s: Session) -> None:
    at = s.system.index("Today is ") + 9
    s.system = s.system[:at] + "2027-01-31" + s.system[at + 10 :]


def value(s: Session) -> None:
    at = s.system.index("cch=") + 4
    new = "abcd3" if s.system[at : at + 5] != "abcd3" else "12345"
    s.system = s.system[:at] + new + s.system[at + 5 :]


def system(s: Session) -> None:
    s.system = s.system.replace("You are an agent.", "You are a careful agent who asks before each change of a file.")


def history(s: Session) -> None:
    s.messages[1] = s.messages[1] | {"content": "I have edited what I said here before."}


def shortened(s: Session) -> None:
    del s.messages[:2]


def thinking(s: Session) -> None:
    s.thinking = False


def salt(s: Session) -> None:
    s.salt = "other"


def adapter(s: Session) -> None:
    s.model = "model-lora"


def replica(s: Session) -> None:
    s.replica = "b"


def evicted(s: Session) -> None:
    s.evicts = True


PLANTED: dict[str, Callable[[Session], None]] = {
    "tools reordered": reorder, "tools changed": add_tool, "date or time": date, "changing value": value,
    "system prompt changed": system, "history changed": history, "history shortened": shortened,
    "thinking removed": thinking, "salt": salt, "adapter": adapter, "another replica": replica, "unknown": evicted,
}


def session(seed: int, cause: str, api: str = "openai", hidden: bool = False) -> list[Finding]:
    s = Session(seed, api, hidden)
    for turn in range(6):
        if turn == 3 and cause:
            PLANTED[cause](s)
        s.ask()
        s.evicts = False
    return diagnose(s.turns)


def test_forty_sessions():
    """Of a cache that was emptied the server tells nothing: that is "unknown"."""
    named, wrong = 0, []
    for seed in range(40):
        cause = list(PLANTED)[seed % len(PLANTED)]
        found = session(seed, cause, ("openai", "anthropic")[seed % 2])
        told = [finding.cause for finding in found]
        named += told[3] == cause
        if told[3] != cause:
            wrong.append((seed, cause, told))
        assert told[:3] == ["first", "none", "none"] and set(told[4:]) == {"none"}, (seed, cause, told)
    assert named >= 38, wrong


@pytest.mark.parametrize("hidden", [False, True])
def test_nothing_is_invented_in_sessions_without_a_fault(hidden):
    for seed in range(40):
        found = session(100 + seed, "", ("openai", "anthropic")[seed % 2], hidden)
        assert [finding.cause for finding in found] == ["first"] + ["none"] * 5
        assert not any(finding.lost for finding in found)


@pytest.mark.parametrize("hidden", [False, True])
def test_nothing_is_invented_between_chats_and_agents_that_begin_alike(hidden):
    """Chats with one system prompt, and agents whose system prompts begin with the same words, are no change."""
    turns: list[Turn] = []
    for chat in range(4):
        s = Session(chat // 2, "openai", hidden)
        s.random.seed(chat)
        if chat == 3:
            s.tools, s.system = s.tools[:1], "You are an agent. " + s.text(150)
        for _ in range(3):
            s.ask()
        turns += s.turns
    causes = [finding.cause for finding in diagnose(turns)]
    assert set(causes) <= {"first", "none", "unknown"}, causes


def test_hidden_texts_still_tell_the_kind_of_change():
    for cause in ("tools reordered", "tools changed", "system prompt changed", "history changed", "salt", "unknown"):
        found = session(7, cause, hidden=True)[3]
        assert found.cause == cause
        assert found.before in ("", "hidden") and found.after in ("", "hidden")


def test_a_server_that_does_not_tell_what_was_cached():
    s = Session(1, "openai", False)
    s.told = False
    for turn in range(5):
        if turn == 2:
            s.evicts = True
        if turn == 3:
            date(s)
        s.ask()
        s.evicts = False
    found = diagnose(s.turns)
    assert [finding.cause for finding in found] == ["first", "none", "none", "date or time", "none"]
    assert all(finding.cached is None and finding.seconds is None for finding in found)


def test_the_difference_and_what_it_costs():
    found = session(2, "date or time")[3]
    assert "2027-01-31" in found.after and "2026-" in found.before
    assert found.ancestor == 2 and found.lost > 100
    assert found.seconds == pytest.approx(found.lost * 4 * 0.1e-3, rel=0.1)  # the server takes 0.1 ms a character


def test_every_cause_says_whose_fault_it_is():
    assert set(PLANTED) <= set(CAUSES)
    assert all(fault and repair for cause, (fault, repair) in CAUSES.items() if cause not in WELL)


@pytest.mark.parametrize("fractions", [("515293", "591962"), ("515293", "515311")])
def test_a_time_that_differs_in_its_microseconds_is_a_time(fractions):
    question = Part("user", "What is a KV cache?")
    texts = (f"It is 2026-11-30T06:58:35.{each}. Answer well." for each in fractions)
    first, second = ([Part("system", text), question] for text in texts)
    assert difference(second, first)[0] == "date or time"
