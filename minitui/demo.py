"""`minitui demo NAME`: a scenario in a small engine of its own, told step by step, on the screen or as lines of text.

A demo is a coroutine over a Stage: it opens chats, asks, waits for something to be true of the engine, and tells what
was seen. Every figure it tells was read from the engine's state or from an answer's metrics in this run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.state import SHARED, State
from minitui.feed import Feed
from minitui.sessions import Chats, Sampling, Session
from minitui.source import Source
from minitui.view import View

if TYPE_CHECKING:
    from minitui.app import MinituiApp

PATIENCE = 20.0  # seconds until a wait is given up with an error


@dataclass
class Stage:
    """What a demo plays on. `beat` scales the pauses left for reading."""

    source: Source
    chats: Chats
    feed: Feed  # folds the records into the view that is asked what happened
    system: str
    say: Callable[[str], None]
    show: Callable[[Session], None] = lambda session: None
    look: Callable[[str], None] = lambda screen: None  # chat | inspect
    beat: float = 1.0

    async def pause(self, seconds: float) -> None:
        """Time to read."""
        await asyncio.sleep(seconds * self.beat)

    def state(self) -> State:
        """The engine's state, as far as its records have come."""
        self.feed.pump()
        return self.feed.view.live.state

    async def until(self, what: str, true: Callable[[], Any]) -> None:
        """Wait until `true()`; EngineError says what did not come about."""
        end = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > end:
                raise EngineError(f"the demo waited {PATIENCE:.0f} s in vain for {what}")
            await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Demo:
    """`play` is the scenario; `options` are the engine's."""

    title: str
    play: Callable[[Stage], Awaitable[None]]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)

    async def script(self, app: MinituiApp) -> None:
        """Play it in the application."""

        def say(text: str) -> None:
            app.story = text

        stage = Stage(app.source, app.chats, app.feed, app.system, say, app.select_session, app.switch_mode)
        app.set_focus(None)
        try:
            await self.play(stage)
        except EngineError as error:
            app.story = str(error)


QUESTIONS = ("What is a KV cache?", "What is paged attention?", "What is a radix tree?", "What is continuous batching?")


async def shared_prefix(stage: Stage) -> None:
    """Four chats with one system prompt: its blocks are computed once and held four times."""
    source, chats = stage.source, stage.chats
    size = source.info["block_size"]
    first = chats.sessions[0] if chats.sessions else chats.new(stage.system)
    stage.show(first)
    await source.control("pace", factor=20)
    stage.say(
        "Chat 1 asks its first question. Nothing is cached: the whole prompt, system prompt included, must be computed. "
        "(Slow motion: every step is stretched ×20; all figures are the real ones.)"
    )
    await stage.pause(3.0)
    chats.send(first, QUESTIONS[0])
    await stage.until("the first token of chat 1", lambda: first.messages[-1].text)
    one = _request(stage, first)
    stage.say(
        f"Its {one.prompt_tokens} prompt tokens were computed and now stand in {one.shared_blocks} blocks of {size} in the radix tree. "
        "Chat 1 writes its answer; three more chats with the same system prompt come now."
    )
    stage.look("inspect")
    await stage.pause(3.5)
    others = [chats.new(stage.system) for _ in QUESTIONS[1:]]
    for session, question in zip(others, QUESTIONS[1:], strict=True):
        chats.send(session, question)
    second = others[0]
    await stage.until("the first token of chat 2", lambda: second.messages[-1].text)
    two = _request(stage, second)
    state = stage.state()
    stage.say(
        f"The moment: chat 2 found {two.cached_tokens} of its {two.prompt_tokens} prompt tokens in the tree and computed only "
        f"{two.prompt_tokens - two.cached_tokens}. {state.counts[SHARED]} blocks are held by several requests at once: the same "
        "memory, no copy."
    )
    await stage.pause(4.0)
    await source.control("pace", factor=1)
    sessions = [first, *others]
    await stage.until("all four answers", lambda: not any(s.busy for s in sessions))
    metrics = [s.messages[-1].metrics for s in sessions]
    if failed := [s.messages[-1].error for s in sessions if not s.messages[-1].metrics]:
        raise EngineError(f"an answer of the demo failed: {failed[0]}")
    total, cached = sum(m["prompt_tokens"] for m in metrics), sum(m["cached_tokens"] for m in metrics)
    stage.say(
        f"Four prompts, {total} tokens: {cached} came from the cache and {total - cached} were computed, "
        f"{cached / total:.0%} saved. The answers are what they would have been without it. Press 1 for the chats, q to quit."
    )


def _request(stage: Stage, session: Session) -> Any:
    """The engine's view of the request that answers `session` now."""
    requests = stage.state().requests
    request = next((r for r in requests.values() if r.group == session.id), None)
    if request is None:
        raise EngineError("an answer of the demo ended before it could be looked at: try a slower pace")
    return request


DEMOS = {"shared-prefix": Demo("one system prompt, four chats", shared_prefix, max_tokens=48)}


async def tell_plainly(
    demo: Demo, source: Source, system: str, sampling: Sampling, load: Any = None, beat: float = 0.0
) -> int:
    """Play it without a screen, telling it as lines of text; returns the exit code."""
    from minitui.models import load_codec

    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)

    try:
        await source.start(lambda progress: None)
        chats = Chats(source, sampling=sampling)
        chats.use(await asyncio.to_thread(load or load_codec, source.info))
        feed = Feed(source, View())
        await feed.sync()
        await demo.play(Stage(source, chats, feed, system, say, beat=beat))
        return 0
    finally:
        await source.close()
