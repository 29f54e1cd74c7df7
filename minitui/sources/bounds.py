"""An HTTP client that limits how much it reads, for servers that are not trusted.

    head     at most 100 KiB (h11's limit), and complete within the sum of the request's connect and read timeouts
    body     at most MAX_BODY bytes and BODY_S seconds, or the request's own Bounds; never compressed
    stream   unlimited (RECORDS) or at most MAX_ANSWER bytes (ANSWER); reading takes at most half of the event loop's
             time

If a server exceeds a limit, the client raises Excess, a transport error with the numbers in its message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError, not_installed

try:
    import httpx
except ImportError as error:
    raise EngineError(not_installed("talking to a server", error, "serve")) from error

MAX_BODY = 8 << 20
BODY_S = 60.0
MAX_ANSWER = 256 << 20  # a token takes about 300 bytes
BRIEF_S = 0.002  # if a piece takes longer to handle, other work of the event loop then gets the same time


@dataclass(frozen=True)
class Bounds:
    """Limits of a body in bytes and seconds; None: no limit."""

    size: int | None = MAX_BODY
    seconds: float | None = BODY_S

    def extension(self) -> dict[str, Any]:
        """Returns these bounds as the `extensions` of a request."""
        return {"bounds": self}


LARGE = Bounds(64 << 20, 300.0)  # a tokenizer, or the state of a large pool
ANSWER = Bounds(MAX_ANSWER, None)
RECORDS = Bounds(None, None)  # a record stream does not end


class Excess(httpx.ReadError):
    """A server sent too much, too slowly, or compressed data."""


class BoundedClient(httpx.AsyncClient):
    """httpx.AsyncClient with the limits that the module's docstring lists."""

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send as httpx.AsyncClient.send does. Raises Excess if the server exceeds a limit."""
        request.headers["Accept-Encoding"] = "identity"
        timeouts = request.extensions.get("timeout", {})
        read_s = timeouts.get("read")
        try:
            async with asyncio.timeout(None if read_s is None else read_s + (timeouts.get("connect") or 0.0)):
                response = await super().send(request, stream=True, **options)
        except TimeoutError as error:
            raise Excess(f"{request.url} sent no complete head within {read_s:g} s", request=request) from error
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise Excess(
                    f"{request.url} compressed its answer ({encoding[:40]}), but minitui asked for uncompressed data",
                    request=request,
                )
            failed = response.status_code >= 400
            bounds = Bounds() if failed else request.extensions.get("bounds", Bounds())
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Bounded(response.stream, request, bounds)
            if not stream:
                await response.aread()
        except BaseException:
            await response.aclose()
            raise
        return response


async def give_turn(began: float) -> None:
    """Let the event loop do other work for as long as the caller has worked since `began`, as time.monotonic()."""
    spent = time.monotonic() - began
    await asyncio.sleep(spent if spent > BRIEF_S else 0.0)  # so a flood of data takes at most half of the time


class _Bounded(httpx.AsyncByteStream):
    """A body whose iteration raises Excess when it exceeds its bounds."""

    def __init__(self, inner: httpx.AsyncByteStream, request: httpx.Request, bounds: Bounds) -> None:
        self._inner, self._request, self._bounds = inner, request, bounds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, seconds = self._bounds.size, self._bounds.seconds
        read, began = 0, time.monotonic()
        async for piece in self._inner:
            read += len(piece)
            if size is not None and read > size:
                raise self._excess(f"more than {size >> 20} MiB")
            if seconds is not None and time.monotonic() - began > seconds:
                raise self._excess(f"only {read:,} bytes in {seconds:g} s")
            handed_out = time.monotonic()
            yield piece
            await give_turn(handed_out)

    def _excess(self, what: str) -> Excess:
        return Excess(f"{self._request.url} sent {what}", request=self._request)

    async def aclose(self) -> None:
        await self._inner.aclose()
