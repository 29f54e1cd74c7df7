"""The answer to one request: a queue of deltas, read through an async iterator; and the answers to several."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, Generic, TypeVar

from engine.errors import EngineDead, EngineError
from engine.text.output import Delta

Item = TypeVar("Item")

class Stream:
    """One request's deltas, as an async iterator. `text`, `ids`, `finish_reason` and `metrics` collect the contents of
    the deltas that were read. The writer calls `accept` once and `put` for every delta. If the writer puts an error,
    the iteration raises it and ends."""

    def __init__(self) -> None:
        self.request_id: int | None = None
        self.seed: int | None = None
        self.ids: list[int] = []
        self._texts: list[str] = []
        self.finish_reason = ""
        self.metrics: dict[str, Any] = {}
        self._unread: deque[Delta | EngineError] = deque()
        self._arrival: asyncio.Future[None] | None = None  # an Event takes several times as long
        self._at_once: Callable[[], bool] | None = None  # of the reader that waits
        self._decided = asyncio.Event()  # set when the request is accepted or has failed

    # ---- for the reader

    @property
    def text(self) -> str:
        """The text of the deltas that were read."""
        return "".join(self._texts)

    @property
    def unread(self) -> int:
        """The number of deltas that have arrived and were not read."""
        return len(self._unread)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Delta]:
        while not self.finish_reason:
            await self.wait()
            yield self._next()

    @property
    def ending(self) -> bool:
        """True if the last unread item ends the answer."""
        item = self._unread[-1]
        return isinstance(item, EngineError) or bool(item.finish_reason)

    async def wait(self, at_once: Callable[[], bool] | None = None) -> None:
        """Wait until there is an unread delta or error. At most one reader may wait. `at_once`: called when something
        has arrived; if it returns True, because it has read all of that, the wait goes on. To wake the reader's task
        would take as long as to read a delta."""
        if not self._unread:
            self._arrival, self._at_once = asyncio.get_running_loop().create_future(), at_once
            try:
                await self._arrival
            finally:
                self._at_once = None  # it often belongs to the owner of this stream: only the collector would free both

    def drain(self) -> list[Delta]:
        """Returns the unread deltas without waiting. Raises the same errors as the iteration."""
        deltas: list[Delta] = []
        while self._unread and not (deltas and isinstance(self._unread[0], EngineError)):
            deltas.append(self._next())
        return deltas

    def _next(self) -> Delta:
        item = self._unread.popleft()
        if isinstance(item, EngineError):
            self.finish_reason = f"error: {item}"
            raise item
        self.ids += item.ids
        self._texts.append(item.text)
        if item.finish_reason:
            self.finish_reason, self.metrics = item.finish_reason, item.metrics or {}
        return item

    async def started(self) -> int:
        """Waits until the request is accepted; returns its id. Raises the same errors as the iteration."""
        await self._decided.wait()
        if self.request_id is None:
            raise next((item for item in self._unread if isinstance(item, EngineError)),
                       EngineDead("the engine ended before it accepted the request"))
        return self.request_id

    def cancel(self) -> None:
        """Ask the engine to end this request, with finish_reason "abort". Does nothing if the request has ended."""
        raise NotImplementedError

    # ---- for the writer

    def accept(self, request_id: int, seed: int | None = None) -> None:
        """Record that the engine has accepted the request."""
        self.request_id, self.seed = request_id, seed
        self._decided.set()

    def put(self, item: Delta | EngineError) -> None:
        """Add the next delta, or the error that ends the answer."""
        self.add(item)
        self.tell()

    def add(self, item: Delta | EngineError) -> None:
        """Like `put`, but the reader learns of it when `tell` is called."""
        self._unread.append(item)
        if isinstance(item, EngineError):
            self._decided.set()

    def tell(self) -> None:
        """Tell the reader that something has arrived."""
        arrival = self._arrival
        if arrival is None or arrival.done() or not self._unread:
            return
        if self._at_once is None or not self._at_once():
            arrival.set_result(None)


class Merged(Generic[Item]):
    """Iterates over (index of the source, item) of several sources, as the items arrive. Raises their first error. A
    slow reader slows the sources down: at most one item of each is held. `cancel` must be called in the end."""

    def __init__(self, sources: Sequence[AsyncIterable[Item]]) -> None:
        self._arrived: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(len(sources))
        self._left = len(sources)
        self._tasks = [asyncio.create_task(self._read(*numbered)) for numbered in enumerate(sources)]

    def __aiter__(self) -> Merged[Item]:
        return self

    async def __anext__(self) -> tuple[int, Item]:
        while self._left:
            found = await self._arrived.get()
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return found
            self._left -= 1
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the reading. Repeated calls are allowed."""
        for task in self._tasks:
            task.cancel()

    async def _read(self, index: int, source: AsyncIterable[Item]) -> None:
        try:
            async for item in source:
                await self._arrived.put((index, item))
        except Exception as error:
            await self._arrived.put(error)
        await self._arrived.put(None)
