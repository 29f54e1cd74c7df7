"""What demos and lessons play on: an engine with its chats, and verbs to drive it by, all of them told by its records.

The gate does the timing, not the clock: a scenario that stops the engine "at the first hit" stands at the same step on
every machine, watched by a class or by a test. `beat` only scales the pauses for reading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.core.gate import RUNNING
from engine.errors import EngineError
from engine.trace.state import RequestView, State
from minitui.chat.conversation import Sampling, Session
from minitui.chat.sessions import Chats
from minitui.sources.base import Source
from minitui.viewmodel.model import Event, View
from minitui.viewmodel.updater import Updater

PATIENCE = 30.0  # seconds until a wait is given up with an error
PACES = (1, 2, 5, 10, 20, 50, 100, 200)
BAR = 28  # cells of a full bar
HELD_TICK = 0.05  # seconds between two looks whether the picture is still held
THINK_SECONDS = 6.0  # to think about a prediction
LETTERS = "abcdefgh"  # of its choices

Restart = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Counted from the records of some steps. Prompt tokens are computed or cached."""

    steps: int
    computed: int
    cached: int
    decoded: int
    evicted_blocks: int
    preemptions: int
    slowest_ms: float
    prefill_ms: float  # of the steps that computed prompts
    decode_ms: float  # of the others
    drafted: int
    accepted: int

    @property
    def prompt_tokens(self) -> int:
        return self.computed + self.cached

    @property
    def share_cached(self) -> float:
        """Of the prompt tokens, 0 to 1."""
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass
class Stage:
    """See the module. `say` shows a text, `show` a chat, `look` a screen ("chat" or "inspect")."""

    source: Source
    chats: Chats
    feed: Updater  # folds the records into the view that is asked what happened
    system: str
    say: Callable[[str], None]
    show: Callable[[Session], None] = lambda session: None
    look: Callable[[str], Any] = lambda screen: None
    restart: Restart | None = None  # the same model in an engine with other options
    beat: float = 1.0
    bar: str = "█"
    held: Callable[[], bool] = lambda: False  # a countdown waits while this is true
    keys: bool = False  # somebody can press them, which `guess` is told
    said: list[str] = field(default_factory=list)
    _choices: Sequence[str] = ()  # of the prediction that is asked for now
    _guessed: int | None = None
    _began: tuple[int, int] = (-1, 0)  # the last step and the last record before what is counted

    # ---- reading

    @property
    def view(self) -> View:
        return self.feed.view

    def state(self) -> State:
        """The engine's state, as far as its records have come."""
        self.feed.pump()
        return self.view.live.state

    def request(self, session: Session) -> RequestView:
        """The engine's view of the request that answers `session`; EngineError if it has ended."""
        request = self.state().requests.get(session.request or -1)
        if request is None:
            raise EngineError(f"chat {self.chats.number(session)} is no longer being answered")
        return request

    def begin_count(self) -> None:
        """Figures count from here on."""
        self._began = (self.state().step, self.state().seq)

    def events(self, kind: str) -> list[Event]:
        """The decisions of this kind (one of minitui.viewmodel.events.KINDS) since `begin_count`, oldest first."""
        self.state()
        return [event for event in self.view.events.items if event.kind == kind and event.seq > self._began[1]]

    def figures(self) -> Figures:
        """What the steps since `begin_count` did, from their records."""
        self.state()
        view = self.view
        rows = [view.steps.get(step) for step in range(self._began[0] + 1, view.steps.last + 1)]
        steps = [row for row in rows if row is not None]
        return Figures(
            steps=len(steps),
            computed=sum(row.prefill_tokens for row in steps),
            cached=sum(event.record[4] for event in self.events("hit")),
            decoded=sum(row.decodes + row.accepted for row in steps),
            drafted=sum(row.drafted for row in steps),
            accepted=sum(row.accepted for row in steps),
            evicted_blocks=sum(event.record[4] for event in self.events("evict")),
            preemptions=len(self.events("preempt")),
            slowest_ms=max((row.wall_ms or 0.0 for row in steps), default=0.0),
            prefill_ms=sum(row.wall_ms or 0.0 for row in steps if row.chunks),
            decode_ms=sum(row.wall_ms or 0.0 for row in steps if not row.chunks),
        )

    # ---- telling

    def tell(self, text: str) -> None:
        """Say something, and remember it."""
        self.said.append(text)
        self.say(text)

    async def pause(self, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """Time to read, until `done()`; whoever holds the picture still (space) prolongs it."""
        left = seconds * self.beat
        await asyncio.sleep(0)
        while (left > 0 or self.held()) and not done():
            began = time.monotonic()
            await asyncio.sleep(min(left, HELD_TICK) if left > 0 else HELD_TICK)
            if not self.held():
                left -= time.monotonic() - began

    async def predict(self, question: str, choices: Sequence[str]) -> None:
        """Ask the room, and leave it time to think; a guess ends that."""
        lines = "\n".join(f"   {LETTERS[i]}) {choice}" for i, choice in enumerate(choices))
        how = f"\nPress {' '.join(LETTERS[: len(choices)])}; space gives more time." if self.keys else ""
        self.tell(f"Predict: {question}\n{lines}{how}")
        self._choices, self._guessed = choices, None
        await self.pause(THINK_SECONDS, lambda: self._guessed is not None)
        self._choices = ()

    @property
    def asks(self) -> int:
        """Among how many choices a guess is waited for now."""
        return len(self._choices)

    def guess(self, choice: int) -> None:
        """Somebody has pressed a letter."""
        self._guessed = choice

    def verdict(self, right: int) -> str:
        """What to say of the guess, now that the answer is known; nothing if there was none."""
        if self._guessed is None:
            return ""
        so = ", and so it is. " if self._guessed == right else f"; it is {LETTERS[right]}. "
        return f"You said {LETTERS[self._guessed]}{so}"

    def bars(self, rows: Sequence[tuple[str, float, str]]) -> str:
        """Lines of (label, amount, text), each with a bar in proportion to the largest amount."""
        most = max((amount for _, amount, _ in rows), default=0.0) or 1.0
        label_width = max(len(label) for label, _, _ in rows)
        lines = []
        for label, amount, text in rows:
            cells = max(1 if amount else 0, round(amount / most * BAR))
            lines.append(f"   {label:<{label_width}}  {self.bar * cells:<{BAR}}  {text}")
        return "\n".join(lines)

    # ---- driving

    def chat(
        self, system: str | None = None, title: str = "", max_tokens: int | None = None, whole: bool = False
    ) -> Session:
        """A new chat. `whole`: its answer goes on to `max_tokens` whatever the model says."""
        session = self.chats.new(self.system if system is None else system, title)
        if max_tokens is not None:
            session.sampling = replace(session.sampling, max_tokens=max_tokens, ignore_eos=whole)
        return session

    async def until(self, what: str, true: Callable[[], Any]) -> None:
        """Wait until `true()`; EngineError says what did not come about."""
        end = time.monotonic() + PATIENCE
        look_again = 0.001
        while not true():
            if self.source.error:
                raise EngineError(self.source.error)
            if self.held():  # nothing reaches the picture
                end = time.monotonic() + PATIENCE
            if time.monotonic() > end:
                raise EngineError(f"waited {PATIENCE:.0f} s in vain for {what}")
            await asyncio.sleep(look_again)
            look_again = min(1.5 * look_again, 0.01)  # seconds: most waits are for a step of a few milliseconds

    async def ask(self, session: Session, text: str) -> int:
        """Ask in a chat, and return when the engine has queued it: arrivals keep their order. The request's id."""
        before = session.request
        await self.pause(0)
        self.chats.send(session, text)
        await self.until(f"chat {self.chats.number(session)} to be queued", lambda: self._queued(session, before))
        assert session.request is not None
        return session.request

    def _queued(self, session: Session, before: int | None) -> bool:
        if session.state == "error":
            raise EngineError(session.messages[-1].error)
        self.feed.pump()
        return session.request != before and session.request in self.view.lanes.lanes

    async def gate(self) -> None:
        """Stop the engine between two steps."""
        await self.source.control("pause")
        await self.until("the engine to stop", lambda: self.state().gate == "closed")

    async def open(self) -> None:
        """Let it run."""
        await self.pause(0)
        await self.source.control("resume")

    async def step(self, n: int = 1, seconds: float = 0.0) -> None:
        """`n` steps one after the other, each left standing for `seconds`; fewer if the engine runs out of work."""
        for _ in range(n):
            state = self.state()
            if not state.requests:
                return
            last = state.step
            await self.pause(0)
            await self.source.control("step", n=1)
            await self.until(f"step {last + 1}", partial(self._ended_after, last))
            await self.pause(seconds)

    def _ended_after(self, last: int) -> bool:
        state = self.state()
        row = self.view.steps.get(state.step) if state.step > last else None
        return row is not None and row.end_seq > 0

    async def step_until(self, what: str, true: Callable[[], Any], most: int = 2000, seconds: float = 0.0) -> None:
        """Step by step until `true()`."""
        for _ in range(most):
            if true():
                return
            if not self.state().requests:
                break
            await self.step(1, seconds)
        if not true():
            raise EngineError(f"{what} did not come about")

    async def run_until(self, event: str) -> str:
        """Run until something happens (a key of engine.core.gate.EVENTS) and stand at that step; what the engine
        says."""
        seen = len(self._stops())
        await self.pause(0)
        await self.source.control("run_until", predicate={"event": event})
        await self.until(f"the {event}", lambda: len(self._stops()) > seen)
        return str(self._stops()[-1].record[4])

    def _stops(self) -> list[Any]:
        self.feed.pump()
        return [
            event for event in self.view.events.items
            if event.record[2] == "gate" and event.record[3] == "closed"
            and not str(event.record[4]).startswith((RUNNING, "paused", "stepping"))
        ]  # fmt: skip

    async def answers(self, sessions: Sequence[Session]) -> list[dict[str, Any]]:
        """Let the engine run until these chats are answered, then in real time; the metrics of the answers."""
        await self.open()
        await self.until("the answers", lambda: not any(session.busy for session in sessions))
        if self.state().pace != 1:
            await self.source.control("pace", factor=1)
        for session in sessions:
            if session.state == "error":
                raise EngineError(session.messages[-1].error)
        return [session.messages[-1].metrics for session in sessions]

    async def slow(self, seconds: float) -> None:
        """Slow motion in which a step like the last ones takes about so long; real time where nobody watches."""
        last = self.view.steps.last
        rows = [self.view.steps.get(step) for step in range(max(0, last - 8), last + 1)]
        recent = [row.wall_ms for row in rows if row is not None and row.wall_ms]
        typical = sorted(recent)[len(recent) // 2] / 1e3 if recent else 0.01
        wanted = seconds * self.beat / typical
        factor = max((pace for pace in PACES if pace <= wanted), default=1)
        await self.source.control("pace", factor=factor)

    async def other_engine(self, **options: Any) -> None:
        """Go on with the same model in an engine with other options; what has been told stays."""
        if self.restart is None:
            raise EngineError("this engine cannot be started with other options")
        self.feed.restart()
        await self.restart(options)
        self.feed.replaced()
        await self.feed.sync()
        self._began = (-1, 0)
        for session in self.chats.sessions:
            session.request = None


def sampling(max_tokens: int) -> Sampling:
    """Greedy, so that every run of a demo writes the same."""
    return Sampling(temperature=0.0, max_tokens=max_tokens)
