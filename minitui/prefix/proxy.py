"""A proxy in front of an OpenAI- or Anthropic-like server, which notes the prompts of its requests in a log.

Bytes pass in both directions as they come. Headers with keys pass, too, and are never stored. The log is written after
an answer has ended, so a client waits for nothing but the way through this process. Bodies of requests are bounded; of
an answer only its first and last bytes are kept, to read what the server says about its cache.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from minitui.prefix.session import FORMAT, Turn, parts_of
from minitui.protocol import is_loopback

logger = logging.getLogger("minitui")
MOST_BODY = 64 << 20  # bytes of a request
KEPT = 256 << 10  # bytes kept of an answer's begin, and of its end
WHOLE = 8 << 20  # bytes: a JSON answer of at most this size is read whole
PROMPTS = ("/chat/completions", "/completions", "/responses", "/messages")  # ends of paths whose requests have prompts
# Headers about one connection; the others pass. Compressed answers could not be read.
HOP = frozenset((
    "host", "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    "content-length", "accept-encoding",
))  # fmt: skip
REPLICA = ("x-data-parallel-rank", "x-served-by", "x-replica")  # headers in which an answer names its replica


class Log:
    """Writes the log. `hide`: texts are stored as keyed hashes of their pieces."""

    def __init__(self, path: Path, hide: bool) -> None:
        self._key = secrets.token_bytes(32) if hide else b""
        self._began = time.monotonic()
        self._next = 0
        try:
            self._file = path.open("x", encoding="utf-8", errors="replace")
        except FileExistsError:
            raise EngineError(f"{path} exists: name another file with --log") from None
        except OSError as error:
            raise EngineError(f"{path} cannot be written: {error.strerror}") from None
        path.chmod(0o600)
        self._line(json.dumps({"format": FORMAT, "hidden": hide}))

    def number(self) -> int:
        """Returns the number of a request that has just arrived."""
        self._next += 1
        return self._next - 1

    def write(self, number: int, at: float, body: bytes, answer: Answer) -> None:
        """Write a request and what its answer told. A body that is no JSON object has no prompt."""
        try:
            data = json.loads(body)
            if type(data) is not dict:
                return
            parts = parts_of(data)
        except (ValueError, RecursionError):
            return
        if self._key:
            parts = [part.hide(self._key) for part in parts]
        prompt, cached = answer.usage()
        self._line(Turn(
            number, round(at - self._began, 3), parts, str(data.get("model", ""))[:200],
            self._salt(str(data.get("cache_salt") or "")), answer.replica[:80], prompt, cached, answer.first_ms,
        ).to_json())  # fmt: skip

    def _salt(self, salt: str) -> str:
        """Returns a name for a salt, which can be a secret: equal for equal salts."""
        names = self.__dict__.setdefault("_salts", {})
        return names.setdefault(salt, f"salt {len(names) + 1}") if salt else ""

    def _line(self, text: str) -> None:
        try:
            self._file.write(text + "\n")
            self._file.flush()
        except OSError as error:  # the client must not notice
            logger.warning("the log cannot be written: %s", error.strerror)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Answer:
    """What is kept of an answer."""

    def __init__(self, response: httpx.Response, began: float) -> None:
        self.first_ms: float | None = None
        self.replica = next((response.headers[name] for name in REPLICA if name in response.headers), "")
        self._json = "json" in response.headers.get("content-type", "")
        self._began, self._head, self._tail = began, bytearray(), bytearray()

    def add(self, chunk: bytes) -> None:
        """Note the next bytes."""
        if self.first_ms is None:
            self.first_ms = round((time.monotonic() - self._began) * 1e3, 3)
        most = WHOLE if self._json else KEPT
        room = most - len(self._head)
        self._head += chunk[: max(0, room)]
        if len(chunk) > room:
            self._tail += chunk[max(0, room) :]
            del self._tail[:-KEPT]

    def usage(self) -> tuple[int | None, int | None]:
        """Returns (prompt tokens, cached ones), as the server tells; None: it does not."""
        texts = [bytes(self._head)] if self._json else [*self._head.split(b"\n"), *self._tail.split(b"\n")]
        prompt = cached = None
        for text in texts:
            line = text.removeprefix(b"data:").strip()
            if b'"usage"' not in line or not line.startswith(b"{"):
                continue
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                continue
            found = _usage(data)
            prompt = found[0] if found[0] is not None else prompt
            cached = found[1] if found[1] is not None else cached
        return prompt, cached


def _usage(data: Any) -> tuple[int | None, int | None]:
    for each in (data, *(data.get(name) for name in ("response", "message"))):
        usage = each.get("usage") if isinstance(each, dict) else None
        if not isinstance(usage, dict):
            continue
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        if "cache_read_input_tokens" in usage:  # Anthropic's input_tokens are those after the cached ones
            cached = usage["cache_read_input_tokens"]
            parts = (prompt, cached, usage.get("cache_creation_input_tokens") or 0)
            prompt = sum(parts) if all(map(_number, parts)) else None
        return prompt if _number(prompt) and prompt else None, cached if _number(cached) else None
    return None, None


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


class Proxy:
    """The ASGI application."""

    def __init__(self, to: str, log: Log, client: httpx.AsyncClient | None = None) -> None:
        self.log = log
        self._to = to.rstrip("/")
        timeout = httpx.Timeout(None, connect=10.0)
        self.client = client or httpx.AsyncClient(
            timeout=timeout, limits=httpx.Limits(max_connections=None), follow_redirects=False,
            trust_env=not is_loopback(urlsplit(to).hostname or ""),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive)
            try:
                response = await self._answer(request)
            except ClientDisconnect:
                return
            await response(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.shutdown":
                await self.client.aclose()
                self.log.close()
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _answer(self, request: Request) -> Response:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if not is_loopback(host) or "origin" in request.headers:
            return PlainTextResponse("this proxy serves programs on this machine, not web pages\n", 403)
        began = time.monotonic()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY:
                return PlainTextResponse(f"the body has more than {MOST_BODY:,} bytes\n", 413)
        query = request.scope["query_string"].decode("latin-1")
        url = self._to + request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1").lower() not in HOP]
        headers.append((b"accept-encoding", b"identity"))
        try:
            sent = self.client.build_request(request.method, url, headers=headers, content=bytes(body))
            response = await self.client.send(sent, stream=True)
        except httpx.HTTPError as error:
            return PlainTextResponse(f"{self._to} cannot be reached: {type(error).__name__}\n", 502)
        noted = request.method == "POST" and request.url.path.endswith(PROMPTS) and response.status_code < 400
        number = self.log.number() if noted else -1
        passed = StreamingResponse(self._stream(response, number, began, bytes(body)), response.status_code)
        passed.raw_headers = [
            (k.lower(), v) for k, v in response.headers.raw
            if k.decode("latin-1").lower() not in HOP or k.lower() == b"content-length"
        ]  # fmt: skip
        return passed

    async def _stream(
        self, response: httpx.Response, number: int, began: float, body: bytes
    ) -> AsyncIterator[bytes]:
        answer = Answer(response, began)
        try:
            async for chunk in response.aiter_raw():
                answer.add(chunk)
                yield chunk
        finally:
            await response.aclose()
            if number >= 0:
                self.log.write(number, began, body, answer)
