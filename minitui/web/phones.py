"""The phones of a class: one stream of states, one vote for each phone and question.

A phone needs no key: the link has a token. A phone is known by a cookie that this process signs. Its newest answer
counts. A browser that deletes the cookie is a new phone: PER_ADDRESS limits the new phones of an address. The limit is
high, because a whole class can share one address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

from minitui.server.origins import is_same_origin

MOST_PHONES = 400  # open streams; below the limit of connections
MOST_VOTERS = 1000  # of one question
PER_ADDRESS = 300  # new phones
VOTE_S = 0.3  # shortest time between two votes of a phone
COUNTS_S = 0.25  # between two counts for the application
ALIVE_S = 15.0  # a stream without a change gets a comment
STALLED_S = 20.0  # a phone that reads nothing for this long is disconnected
LARGEST = 256  # bytes of a request
MOST_CHOICES = 8
COOKIE = "phone"
SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Phones:
    """The state that phones see, their streams and votes. `count(...)` tells the application the counts."""

    def __init__(self, count: Callable[..., object]) -> None:
        self.votes: dict[str, int] = {}  # phone -> choice, of the open question
        self._voted_on = 0  # the number of the question that they are about
        self.streams: set[asyncio.Task[Any]] = set()
        self.state: dict[str, Any] = {"all": {}, "lecturer": {}}
        self._event = event({})
        self._changed = asyncio.Event()  # another event after each change
        self._count = count
        self._counted_at, self._counting = float("-inf"), False
        self._secret = secrets.token_bytes(32)
        self._new: Counter[str] = Counter()  # address -> new phones
        self._voted_at: dict[str, float] = {}

    # ---- the state

    def published(self, data: bytes) -> None:
        """Take a state of the application."""
        try:
            state = json.loads(data)
            self.state = {"all": dict(state["all"]), "lecturer": dict(state["lecturer"])}
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if self._number not in (0, self._voted_on):  # a question that returns, as after another screen, keeps its votes
            self._voted_on = self._number
            self.votes.clear()
            self._voted_at.clear()
        self._event = event(self.state["all"])
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def _asked(self) -> dict[str, Any]:
        return self.state["all"].get("ask") or {}

    @property
    def _number(self) -> int:
        return int(self._asked.get("number", 0))

    def counts(self) -> dict[str, Any] | None:
        """Returns the counts of the open question; None if there is none."""
        choices = self._asked.get("choices")
        if not choices:
            return None
        counted = Counter(self.votes.values())
        counts = [counted[choice] for choice in range(len(choices))]
        present = max(len(self.streams), len(self.votes))  # a phone that has answered may sleep: it has no stream then
        return {"number": self._number, "counts": counts, "phones": present}

    def _send_counts(self) -> None:
        """Tell the application and the lecturer the counts, now or after COUNTS_S."""
        if not self._counting:
            self._counting = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._counted_at + COUNTS_S), self._send_now)

    def _send_now(self) -> None:
        self._counting, self._counted_at = False, asyncio.get_running_loop().time()
        if counts := self.counts():
            self._count(type="counts", **counts)
        self._tell()

    # ---- phones

    def phone(self, request: web.Request) -> str:
        """Returns the id in the cookie of this phone; "" if it has none of this process."""
        id, _, signature = request.cookies.get(COOKIE, "").partition(".")
        return id if hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(id).encode()) else ""

    def _sign(self, id: str) -> str:
        return hmac.new(self._secret, id.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:32]

    def welcome(self, request: web.Request, response: web.Response) -> None:
        """Give a new phone its cookie. Raises HTTPTooManyRequests."""
        if self.phone(request):
            return
        address = request.remote or ""
        if self._new[address] >= PER_ADDRESS or len(self._new) > 10 * MOST_VOTERS:
            raise web.HTTPTooManyRequests(text=f"{PER_ADDRESS} phones have come from this address, which is the limit")
        self._new[address] += 1
        id = secrets.token_hex(8)
        response.set_cookie(COOKIE, f"{id}.{self._sign(id)}", httponly=True, samesite="Strict", path=request.path)

    async def vote(self, request: web.Request) -> web.Response:
        """Count a vote: {"number": of the question, "choice": from 0}."""
        check_origin(request)
        phone, now = self.phone(request), time.monotonic()
        if not phone:
            raise web.HTTPForbidden(text="this phone is not known: load the page again")
        match await small_json(request):
            case {"number": int(number), "choice": int(choice)}:
                pass
            case _:
                raise web.HTTPBadRequest(text='a vote has a "number" and a "choice"')
        if not number or number != self._number:
            raise web.HTTPConflict(text="this question is closed")
        if not 0 <= choice < min(len(self._asked["choices"]), MOST_CHOICES):
            raise web.HTTPBadRequest(text=f"there is no choice {choice}")
        if now - self._voted_at.get(phone, float("-inf")) < VOTE_S:
            raise web.HTTPTooManyRequests(text="too many answers: wait a second")
        if phone not in self.votes and len(self.votes) >= MOST_VOTERS:
            raise web.HTTPTooManyRequests(text=f"{MOST_VOTERS} phones have answered, which is the limit")
        self.votes[phone], self._voted_at[phone] = choice, now
        self._send_counts()
        return web.Response(status=204)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send the newest state after each change: a slow phone gets fewer states."""
        if len(self.streams) >= MOST_PHONES:
            raise web.HTTPServiceUnavailable(text=f"{MOST_PHONES} phones are connected, which is the limit")
        task = asyncio.current_task()
        assert task is not None
        self.streams.add(task)
        self._send_counts()
        try:
            return await self._send(request, lambda: self._event)
        finally:
            self.streams.discard(task)
            self._send_counts()

    async def lecturer(self, request: web.Request) -> web.StreamResponse:
        """Send the lecturer's page its states, with the counts."""
        return await self._send(
            request, lambda: event({**self.state, "votes": self.counts(), "phones": len(self.streams)})
        )

    async def _send(self, request: web.Request, newest: Callable[[], bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        last = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                changed, data = self._changed, newest()
                async with asyncio.timeout(STALLED_S):
                    await response.write(data if data != last else b":\n\n")
                last = data
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_S):
                        while newest() == last:
                            await changed.wait()
                            changed = self._changed
        return response


def check_origin(request: web.Request) -> None:
    """Raises HTTPForbidden if another site's page sends the request."""
    origins = request.headers.getall("Origin", [])
    if len(origins) != 1 or not is_same_origin(origins[0], request.headers["Host"]):
        raise web.HTTPForbidden(text="only a page of this address may do this")


async def small_json(request: web.Request) -> Any:
    """Returns the JSON of a small body. Raises HTTPBadRequest or HTTPRequestEntityTooLarge."""
    body = b""
    while len(body) <= LARGEST and (piece := await request.content.read(LARGEST + 1 - len(body))):
        body += piece
    if len(body) > LARGEST:
        raise web.HTTPRequestEntityTooLarge(LARGEST, len(body))
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is not JSON") from None


def event(state: dict[str, Any]) -> bytes:
    """Returns a state as one server-sent event."""
    return b"data: " + json.dumps(state, separators=(",", ":")).encode() + b"\n\n"
