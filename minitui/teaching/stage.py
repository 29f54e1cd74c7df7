"""The stage of demos and lessons: an engine with its chats, predictions, and runs that are compared. Scenarios pause
the engine at events, not at times, so that a scenario runs in the same way on every machine. minitui/teaching/driver.py
runs the steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.text.output import Delta
from engine.text.tokenizer import Tokenizer
from engine.trace.views import RequestView
from minitui.chat.conversation import Sampling, Session
from minitui.chat.prompt import Codec
from minitui.chat.sessions import Chats
from minitui.sources.base import Source
from minitui.teaching.driver import Driver
from minitui.teaching.prediction import LETTERS, Poll, verdict
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View

BAR_WIDTH = 28  # cells of a full bar
THINK_SECONDS = 6.0  # the user's time for a prediction
ANSWER_SECONDS = 4.0  # the user's time for its answer
# Titles of the chats of `Stage.chat`. Those of their questions would be words of the legends, such as "prefill".
TITLES = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Seoul", "Tunis", "Hanoi")

Restart = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class Stage(Driver):
    """An engine, its chats and their view."""

    chats: Chats
    system: str
    say: Callable[[str], None]  # shows a text
    show: Callable[[Session], None] = lambda session: None  # shows a chat
    look: Callable[[str], Any] = lambda screen: None  # opens a screen: "chat" or "inspect"
    restart: Restart | None = None  # starts the same model in an engine with other options
    bar: str = "█"
    think: float = THINK_SECONDS  # the user's time for a prediction, in seconds
    keys: bool = False  # True if the user can answer a prediction with a key, which calls `guess`
    typed: str = ""  # the text that the reader typed for the experiment; empty: the experiment's own text
    home: dict[str, Any] = field(default_factory=dict)  # the options of a lesson's own engine; see `go_home`
    _questions: dict[str, int] = field(default_factory=dict)  # id of each chat of `chat` -> its questions by `ask`
    _options: dict[str, Any] | None = None  # the options of the last `other_engine`
    poll: Poll | None = None  # the open prediction
    answered: tuple[Poll, int] | None = None  # the last prediction with a verdict, and its right choice
    answer_waits: bool = False  # an answer is shown, and `reveal` goes on
    _asked: Poll | None = None  # the last prediction
    _revealed: bool = False  # the prediction ends without a guess
    _guessed: int | None = None

    # ---- predictions and text

    async def predict(self, question: str, choices: Sequence[str]) -> None:
        """Asks for a prediction; returns after a guess, `reveal` or `think` seconds. With keys, shows the seconds that
        are left."""
        lines = "\n".join(f"   {LETTERS[i]}) {choice}" for i, choice in enumerate(choices))
        said = ""

        def tell(left: float) -> None:
            nonlocal said
            text = f"Predict: {question}\n{lines}"
            if self.keys:
                time = f"The answer comes in {ceil(left)} s; space stops the time." if isfinite(left) else ""
                if self.held():
                    time = "The time is stopped; space continues."
                text += f"\nPress {' '.join(LETTERS[: len(choices)])}. {time}"
            if text != said:
                said = text
                self.say(text)

        tell(self.think * self.beat)
        self.poll = self._asked = Poll(question, tuple(choices))
        self._guessed, self._revealed = None, False
        try:
            await self.pause(self.think, lambda: self._guessed is not None or self._revealed, tell)
        finally:
            self.poll = None

    @property
    def open_choices(self) -> int:
        """The number of choices of the open prediction; 0 if there is none."""
        return len(self.poll.choices) if self.poll is not None else 0

    def guess(self, choice: int) -> None:
        """Takes the user's choice, an index into the choices."""
        self._guessed = choice

    def reveal(self) -> None:
        """Ends the open prediction without a guess, or the time for reading its answer."""
        self._revealed = True

    async def read_answer(self) -> None:
        """Waits for the user to read an answer. If predictions wait without end, as in a class, so does the answer."""
        self._revealed, self.answer_waits = False, not isfinite(self.think)
        try:
            await self.pause(inf if self.answer_waits else ANSWER_SECONDS, lambda: self._revealed)
        finally:
            self.answer_waits = False

    def verdict(self, right: int) -> str:
        """Returns a sentence about the guess, or the answer without one, given the index of the right choice."""
        if self._asked is not None:
            self.answered = (self._asked, right)
        return verdict(self._guessed, right) + " "

    def bars(self, rows: Sequence[tuple[str, float, str]]) -> str:
        """Returns a line for each (label, amount, text), with a bar in proportion to the largest amount."""
        most = max((amount for _, amount, _ in rows), default=0.0) or 1.0
        label_width = max(len(label) for label, _, _ in rows)
        lines = []
        for label, amount, text in rows:
            cells = round(amount / most * BAR_WIDTH)
            lines.append(f"   {label:<{label_width}}  {self.bar * cells:<{BAR_WIDTH}}  {text}")
        return "\n".join(lines)

    # ---- chats

    @property
    def codec(self) -> Codec:
        """The tokenizer of the chats, which `plain_stage` or the application has loaded."""
        assert self.chats.codec is not None
        return self.chats.codec

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's own files."""
        return Tokenizer(Path(self.source.info.model_dir))

    def prompt(self, question: str, system: str = "") -> list[int]:
        """Returns the token ids of the prompt for a question."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.codec.apply_chat_template([*messages, {"role": "user", "content": question}])

    def request(self, session: Session) -> RequestView:
        """Returns the request of `session`. Raises EngineError if the request has ended."""
        request = self.state().requests.get(session.request or -1)
        if request is None:
            raise EngineError(f"chat {self.chats.number(session)} is no longer being answered")
        return request

    def chat(
        self, system: str | None = None, title: str = "", max_tokens: int | None = None, whole: bool = False
    ) -> Session:
        """Opens a new chat. `whole`: its answer has exactly `max_tokens` tokens; end tokens do not end the answer."""
        title = title or TITLES[len(self.chats.sessions) % len(TITLES)]
        session = self.chats.new(self.system if system is None else system, title)
        self._questions[session.id] = 0
        if max_tokens is not None:
            session.sampling = replace(session.sampling, max_tokens=max_tokens, ignore_eos=whole)
        return session

    async def end_chats(self) -> None:
        """Ends all answers, and removes the chats as `remove_chats`."""
        for session in self.chats.sessions:
            self.chats.cancel(session)
        await self.until("the chats to end", lambda: not any(session.busy for session in self.chats.sessions))
        await self.until("the engine to be empty", lambda: not self.state().requests)
        self.remove_chats()

    def remove_chats(self) -> None:
        """Removes the empty chats, and the chats in which only the stage has asked: the reader's chats stay."""
        asked = self._questions
        self.chats.sessions[:] = [s for s in self.chats.sessions if len(s.questions) > asked.get(s.id, 0)]

    async def write(
        self, question: str, tokens: int, steps: int = 0, seconds: float = 0.0, system: str | None = None
    ) -> Session:
        """Asks in a new chat, shows it, and runs `steps` steps. The answer has exactly `tokens` tokens."""
        (session,) = await self.write_all([question], [tokens], system)
        await self.step(steps, seconds)
        return session

    async def write_all(
        self, questions: Sequence[str], tokens: Iterable[int], system: str | None = None
    ) -> list[Session]:
        """Asks each question in a new chat and shows the first chat. The answers have exactly `tokens` tokens."""
        sessions = [self.chat(system, max_tokens=n, whole=True) for n in tokens]
        self.show(sessions[0])
        for session, question in zip(sessions, questions, strict=True):
            await self.ask(session, question)
        return sessions

    async def complete(self, ids: list[int], params: SamplingParams) -> list[Delta]:
        """Runs a request for these ids to its end, and pauses the engine again. Returns the request's deltas."""
        stream = self.source.submit(ids, params, group="lesson")
        await self.open()
        deltas = [delta async for delta in stream]
        self.state()
        await self.gate()
        return deltas

    async def ask(self, session: Session, text: str) -> int:
        """Asks in a chat and waits until the request is queued, so that requests keep their order; returns its id."""
        before = session.request
        await self.pause(0)
        self.chats.send(session, text)
        if session.id in self._questions:
            self._questions[session.id] += 1
        await self.until(f"chat {self.chats.number(session)} to be queued", lambda: self._queued(session, before))
        assert session.request is not None
        return session.request

    def _queued(self, session: Session, before: int | None) -> bool:
        if session.state == "error":
            raise EngineError(session.messages[-1].error)
        self.feed.pump()
        return session.request != before and session.request in self.view.history.lanes.lanes

    async def answers(self, sessions: Sequence[Session]) -> list[dict[str, Any]]:
        """Runs the engine until these chats are answered, and ends slow motion. Returns the answers' metrics."""
        await self.open()
        await self.until("the answers", lambda: not any(session.busy for session in sessions))
        if self.state().pace != 1:
            await self.source.control("pace", factor=1)
        for session in sessions:
            if session.state == "error":
                raise EngineError(session.messages[-1].error)
        return [session.messages[-1].metrics for session in sessions]

    # ---- runs and engines

    async def begin_run(self, name: str, first: bool = False) -> None:
        """Begins a run. The panel of two runs (minitui/tui/widgets/side_by_side.py) shows it below the run before it.
        `first`: there is no run before it. The second run is in the same engine, or in the next (`other_engine`)."""
        await self._end_run()
        if first:
            self.view.earlier = None
        await self.feed.sync()
        self.view.run_name = name

    async def _end_run(self) -> None:
        if self.view.run_name:
            await self.settle()
            self.view.keep_run()

    def forget_runs(self) -> None:
        """Ends a comparison, also in the middle of a run: the next engine begins without a run before it."""
        self.view.run_name, self.view.earlier = "", None

    async def other_engine(self, **options: Any) -> None:
        """Replaces the engine by one with the same model and other options."""
        if self.restart is None:
            raise EngineError("this engine cannot be started with other options")
        await self._end_run()
        self._options = options
        self.feed.restart()
        await self.restart(options)
        self.feed.replaced()
        await self.feed.sync()
        self._began = (-1, 0)
        for session in self.chats.sessions:
            session.request = None

    async def go_home(self) -> None:
        """Returns to the lesson's own engine, if an experiment has replaced it."""
        if self._options not in (None, self.home):
            await self.other_engine(**self.home)
            self.view.earlier = None


@asynccontextmanager
async def plain_stage(
    source: Source, sampling: Sampling, load: Callable[[EngineInfo], Codec], **fields: Any
) -> AsyncIterator[Stage]:
    """Yields a stage without the application: starts the engine, and closes it at the end. `fields`: see Stage."""
    try:
        await source.start(lambda progress: None)
        chats = Chats(source, sampling=sampling)
        chats.use(await asyncio.to_thread(load, source.info))
        feed = Updater(source, View())
        await feed.sync()
        yield Stage(source, feed, chats, **fields)
    finally:
        await source.close()
