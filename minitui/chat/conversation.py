"""A conversation: its messages, sampling options and title. This module needs neither an engine nor a terminal."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minitui.sampling import Sampling
from minitui.sources.base import Stream
from minitui.sources.routing import Opening

LEAST_SPAN = 0.2  # share of the window of `rate`; with arrivals over a shorter time, the rate would be unreliable
LONGEST_TITLE = 40
SKIPPED_WORDS = (  # a title leaves out these words at the beginning of a question
    "a an and about are can could did do does explain for from give i in is it me mean of on please tell the to what "
    "whats when where which who would you your"
)


@dataclass
class Message:
    """One message. `state`: done | queued | running | cancelled | error. `metrics`: the engine's figures."""

    role: str
    text: str = ""
    state: str = "done"
    error: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    unfolded: bool = False  # True: the application shows the thinking of this answer
    version: int = 0  # the number of changes so far

    @property
    def busy(self) -> bool:
        """True while this message is an unfinished answer."""
        return self.state in ("queued", "running")

    def touch(self) -> None:
        """Marks this message as changed."""
        self.version += 1


@dataclass
class Session:
    """One chat. `ids` are the token ids sent and received so far."""

    id: str
    title: str
    system: str
    sampling: Sampling = field(default_factory=Sampling)
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    ids_model: str = ""  # the model to which `ids` belong
    parent: str | None = None
    named: bool = False  # True: the user chose the title, so questions do not change it
    note: str = ""  # shown under the transcript
    primed: bool = False  # a request of another chat computed the prompt of this replay, because the cache had nothing
    request: int | None = None  # the engine's request id of the current or last answer
    created: float = field(default_factory=time.time)
    closed: bool = False
    _stream: Stream | None = None
    _cancelled: bool = False  # True: the engine was asked to cancel the answer
    _task: asyncio.Task[None] | None = None
    _arrivals: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=128))

    @property
    def busy(self) -> bool:
        """True while an answer is unfinished."""
        return bool(self.messages) and self.messages[-1].busy

    @property
    def questions(self) -> list[Message]:
        """The user's messages."""
        return [message for message in self.messages if message.role == "user"]

    @property
    def state(self) -> str:
        """The state of the last message, or "idle" for an empty chat."""
        return self.messages[-1].state if self.messages else "idle"

    @property
    def opening(self) -> Opening:
        """What routes this chat, if several servers can answer it."""
        first = next((message.text for message in self.questions), "")
        addresses = (m.metrics["replica"]["url"] for m in reversed(self.messages) if "replica" in m.metrics)
        return Opening(self.system or first, next(addresses, ""))

    def rate(self, window: float = 1.0, now: float | None = None) -> float:
        """Returns tokens per second over the last `window` seconds; 0 until arrivals span LEAST_SPAN of the window."""
        now = time.monotonic() if now is None else now
        recent = [(t, n) for t, n in self._arrivals if now - t <= window]
        if not recent or recent[-1][0] - recent[0][0] < LEAST_SPAN * window:
            return 0.0
        return sum(n for _, n in recent[1:]) / (recent[-1][0] - recent[0][0])

    def forget_rate(self) -> None:
        """Restarts the measurement of `rate`."""
        self._arrivals.clear()

    def conversation(self) -> list[dict[str, str]]:
        """Returns the messages for the chat template: system prompt, all questions, and finished answers with text."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + [
            {"role": m.role, "content": m.text} for m in self.messages if not m.busy and (m.text or m.role == "user")
        ]


def title_of(question: str) -> str:
    """Returns a title for a question: at most LONGEST_TITLE characters of its first line, without leading
    SKIPPED_WORDS."""
    words = question.strip().split("\n")[0].replace("?", " ").replace("!", " ").split()
    while len(words) > 1 and words[0].lower().rstrip(",.:;'") in SKIPPED_WORDS.split():
        words.pop(0)
    title = ""
    for word in words:
        if title and len(title) + 1 + len(word) > LONGEST_TITLE:
            break
        title = f"{title} {word}".strip()[:LONGEST_TITLE]
    return title.rstrip(".,;: ")


def new_id() -> str:
    """Returns a random id for a new chat."""
    return uuid.uuid4().hex[:8]
