"""Waiting for a condition, an answer or a source. The machine may be busy, so a test never waits for a fixed time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

import psutil

from minitui.chat.conversation import Message, Session
from minitui.chat.sessions import Chats

PATIENCE = 60.0  # seconds


async def until(
    true: Callable[[], Any], what: str | Callable[[], str] = "it did not happen in time", seconds: float = PATIENCE
) -> Any:
    """Returns the first true value of `true()`, which may be awaitable. AssertionError with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := await value if inspect.isawaitable(value := true()) else value):
        assert time.monotonic() < end, what() if callable(what) else what
        await asyncio.sleep(0.005)
    return found


def wait_until(true: Callable[[], Any], what: str = "it did not happen in time", seconds: float = PATIENCE) -> Any:
    """As `until`, without an event loop."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return found


async def ask(chats: Chats, chat: Session, question: str = "Q") -> Message:
    """Asks in a chat; returns the message of the answer when it has ended."""
    chats.send(chat, question)
    await until(lambda: not chat.busy)
    return chat.messages[-1]


async def drained(stream: AsyncIterable[Any]) -> None:
    """Returns when the stream has ended."""
    async for _ in stream:
        pass


@contextlib.asynccontextmanager
async def started(source: Any) -> AsyncIterator[Any]:
    """Starts the source, and closes it at the end."""
    try:
        await source.start(lambda progress: None)
        yield source
    finally:
        await source.close()


def ended(pids: Iterable[int]) -> bool:
    """Returns True if none of these processes runs; a zombie does not run."""
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
