"""The streams and calls of a client that wait for messages of the engine process."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.errors import EngineError, InvalidRequest
from engine.process.stream import Stream
from engine.text.output import Delta


class Waiting:
    """Passes each message to the stream or the future that waits for it. Use it only on its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.streams: dict[int, Stream] = {}  # tag -> the open stream
        self._calls: dict[int, asyncio.Future[Any]] = {}  # tag -> the answer
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._loop = loop

    def for_start(self) -> asyncio.Future[dict[str, Any]]:
        """Return the description of the engine that starts now. Raises EngineError if it cannot start."""
        self._ready = self._loop.create_future()
        return self._ready

    def for_answer(self, tag: int) -> asyncio.Future[Any]:
        """Return the answer to the call `tag`. Raises InvalidRequest if the engine refuses the call."""
        self._calls[tag] = self._loop.create_future()
        return self._calls[tag]

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Pass a message on. A stream or call that no longer waits gets nothing."""
        kind, *rest = message
        if kind == "news":
            for packed in rest[0]:
                self._put_text(packed)
        elif kind == "accepted":
            stream = self.streams.get(rest[0])
            if stream is not None:
                stream.accept(rest[1], rest[2])
        elif kind == "refused":
            stream = self.streams.pop(rest[0], None)
            if stream is not None:
                stream.put(InvalidRequest(rest[1], rest[2]))
        elif kind == "answer":
            future = self._calls.pop(rest[0], None)
            if future is not None and not future.done():
                if rest[1]:
                    future.set_result(rest[2])
                else:
                    future.set_exception(InvalidRequest(rest[2], "control"))
        elif self._ready is not None and not self._ready.done():
            if kind == "ready":
                self._ready.set_result(rest[0])
            elif kind == "failed":
                self._ready.set_exception(EngineError(rest[0]))

    def _put_text(self, packed: tuple[Any, ...]) -> None:
        tag = packed[0]
        stream = self.streams.get(tag)
        if stream is None:
            return
        delta = Delta(*packed)
        delta.request_id = stream.request_id or 0
        if delta.finish_reason:
            del self.streams[tag]
        stream.put(delta)

    def fail(self, error: EngineError) -> None:
        """Raise `error` in the start and in every open stream and call."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark it as retrieved, because the waiting task may have been cancelled
        self.end_streams(error)
        calls, self._calls = list(self._calls.values()), {}
        for future in calls:
            if not future.done():
                future.set_exception(error)

    def end_streams(self, error: EngineError) -> None:
        """Raise `error` in every open stream."""
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.put(error)
