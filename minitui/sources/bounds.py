"""An HTTP client that reads no more than is reasonable from a server that it does not trust.

    head     100 KiB (h11), and complete within the time that the request allows for silence
    body     MAX_BODY and BODY_S, unless the request names other Bounds; never compressed
    stream   as long as it likes (RECORDS) or MAX_ANSWER (ANSWER), but reading it takes half of the event loop at most

A bound that is met raises Excess, which is a transport error: callers treat the server as one that cannot be used, and
the sentence has the numbers.
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
BRIEF_S = 0.002  # work on one piece after which the event loop need not rest


@dataclass(frozen=True)
class Bounds:
    """Most bytes and seconds of a body; None: any."""

    size: int | None = MAX_BODY
    seconds: float | None = BODY_S

    def extension(self) -> dict[str, Any]:
        """For the `extensions` of a request."""
        return {"bounds": self}


LARGE = Bounds(64 << 20, 300.0)  # a tokenizer, or the state of a large pool
ANSWER = Bounds(MAX_ANSWER, None)
RECORDS = Bounds(None, None)


class Excess(httpx.ReadError):
    """A server sent more than it may, or too slowly."""


class BoundedClient(httpx.AsyncClient):
    """See the module's docstring."""

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """As httpx.AsyncClient.send. Raises Excess."""
        request.headers["Accept-Encoding"] = "identity"
        allowed = request.extensions.get("timeout", {})
        silence = allowed.get("read")
        try:
            async with asyncio.timeout(None if silence is None else silence + (allowed.get("connect") or 0.0)):
                response = await super().send(request, stream=True, **options)
        except TimeoutError as error:
            raise Excess(f"{request.url} sent no complete head within {silence:g} s", request=request) from error
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise Excess(f"{request.url} compresses its answer ({encoding[:40]}), which was not asked for",
                             request=request)  # fmt: skip
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


class _Bounded(httpx.AsyncByteStream):
    """A body that ends with Excess where it goes beyond its bounds."""

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
            given = time.monotonic()
            yield piece
            spent = time.monotonic() - given
            if spent > BRIEF_S:
                await asyncio.sleep(spent)  # a flood leaves the application half of its time

    def _excess(self, what: str) -> Excess:
        return Excess(f"{self._request.url} sent {what}", request=self._request)

    async def aclose(self) -> None:
        await self._inner.aclose()
