"""Sends server-sent events. The data of an event is one line of ASCII JSON, so no text in it can end the event."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minitui.server.errors import ApiError, as_api_error

logger = logging.getLogger("minitui.server")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": \n\n"


def event(value: Any, name: str = "") -> bytes:
    """Returns one event, with `value` as JSON. `name`: the event's type; may be empty."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'), allow_nan=False)}\n\n".encode("ascii")


def failure(error: ApiError) -> bytes:
    """Returns the end of a stream that failed: OpenAI's error body."""
    return event(error.body) + DONE


class EventStream(Response):
    """Sends each frame immediately. The stream ends early if the caller disconnects or reads nothing for `stalled_s`.

    `on_end` is always called at the end, to free resources. For an exception in `frames`, the result of `on_error` is
    sent, because the status has already been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], on_end: Callable[[], None], stalled_s: float,
        on_error: Callable[[ApiError], bytes] = failure,
    ) -> None:  # fmt: skip
        self.frames = frames
        self.on_end, self.on_error = on_end, on_error
        self.stalled_s = stalled_s
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, watching):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            self.on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for frame in self.frames:
                await self._put(send, frame, True)
        except TimeoutError:
            logger.info("a caller read nothing for %g s, so its stream was ended", self.stalled_s)
            return
        except Exception as error:
            await self._put(send, self.on_error(as_api_error(error)), True)
        await self._put(send, b"", False)

    async def _put(self, send: Send, frame: bytes, more: bool) -> None:
        async with asyncio.timeout(self.stalled_s):
            await send({"type": "http.response.body", "body": frame, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the caller disconnects first, cancels `work` and raises ApiError."""
    task = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the caller has disconnected")
        return task.result()
    finally:
        for pending in (task, watching):
            pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pending
