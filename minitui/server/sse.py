"""Sends server-sent events. The data of an event is one line of ASCII JSON, so no text in it can end the event."""

from __future__ import annotations

import asyncio
import json
import logging
import math
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
as_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # json.dumps makes an encoder for each call


def event(value: Any, name: str = "") -> bytes:
    """Returns one event, with `value` as JSON. `name`: the event's type; may be empty."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {as_json(value)}\n\n".encode("ascii")


def failure(error: ApiError) -> bytes:
    """Returns the end of a stream that failed: OpenAI's error body."""
    return event(error.body) + DONE


class EventStream(Response):
    """Sends each frame immediately. The response begins with the first frame, which may be empty: an exception before
    it is raised. For a later one, the result of `on_error` is sent, because the status has already been sent. The
    stream ends early if the caller disconnects or reads nothing for `stalled_s`. `on_end` is always called at the end,
    to free resources."""

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], on_end: Callable[[], None], stalled_s: float,
        on_error: Callable[[ApiError], bytes] = failure,
    ) -> None:
        self.frames = frames
        self.on_end, self.on_error = on_end, on_error
        self.stalled_s = stalled_s
        self._began = False
        self._sending_since = math.inf  # on the loop's clock; inf: no frame is being sent
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope.get("state", {}).get("write", lambda frame: False)))
        watching = asyncio.ensure_future(_disconnected(receive))
        clock = asyncio.get_running_loop().time
        left = self.stalled_s
        try:
            # One timer for a stream, not one for each frame: a timer costs more than the rest of a frame.
            while left > 0:
                await asyncio.wait({sending, watching}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() or watching.done():
                    break
                left = self.stalled_s - max(0.0, clock() - self._sending_since)
            if sending.done():
                sending.result()
            elif not self._began:
                raise ApiError(499, "the caller has disconnected")
            elif left <= 0:
                logger.info("a caller read nothing for %g s, so its stream was ended", self.stalled_s)
        finally:
            for task in (sending, watching):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            self.on_end()

    async def _send(self, send: Send, write: Callable[[bytes], bool]) -> None:
        """Send the response. `write`: sends a frame faster, if it can; the others are sent with `send`, which waits."""
        frame = await anext(self.frames, None)
        self._began = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time

        async def put(frame: bytes, more: bool = True) -> None:
            self._sending_since = clock()
            await send({"type": "http.response.body", "body": frame, "more_body": more})
            self._sending_since = math.inf

        try:
            while frame is not None:
                if frame and not write(frame):
                    await put(frame)
                frame = await anext(self.frames, None)
        except Exception as error:
            await put(self.on_error(as_api_error(error)))
        await put(b"", False)


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
