"""Writes the log of a proxy, in a process of its own: reading a long prompt would delay answers that pass meanwhile."""

from __future__ import annotations

import json
import logging
import secrets
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.prefix.session import FORMAT, Turn, parts_of

logger = logging.getLogger("minitui")
KEPT = 256 << 10  # bytes kept of an answer's begin, and of its end
WHOLE = 8 << 20  # bytes: a JSON answer of at most this size is read whole
MOST_WAITING = 256 << 20  # bytes of requests that wait for the log's process


@dataclass(slots=True)
class Answer:
    """What is kept of an answer. `json`: it is no stream; `replica`: what the server calls itself."""

    json: bool
    replica: str
    first_ms: float | None = None  # until the first byte
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    def add(self, chunk: bytes) -> None:
        """Note the next bytes."""
        room = (WHOLE if self.json else KEPT) - len(self._head)
        self._head += chunk[: max(0, room)]
        if len(chunk) > room:
            self._tail += chunk[max(0, room) :]
            del self._tail[:-KEPT]

    def usage(self) -> tuple[int | None, int | None]:
        """Returns (prompt tokens, cached ones), as the server tells; None: it does not."""
        texts = [bytes(self._head)] if self.json else [*self._head.split(b"\n"), *self._tail.split(b"\n")]
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


class LogFile:
    """The log's file. `hide`: texts are stored as keyed hashes of their pieces. Raises EngineError if the file exists
    or cannot be written."""

    def __init__(self, path: Path, hide: bool) -> None:
        self._key = secrets.token_bytes(32) if hide else b""
        self._salts: dict[str, str] = {}
        try:
            self._file = path.open("x", encoding="utf-8", errors="replace")
        except FileExistsError:
            raise EngineError(f"{path} exists: name another file with --log") from None
        except OSError as error:
            raise EngineError(f"{path} cannot be written: {error.strerror}") from None
        path.chmod(0o600)
        self._line(json.dumps({"format": FORMAT, "hidden": hide}))

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
        salt = str(data.get("cache_salt") or "")  # it can be a secret: equal salts have equal names
        named = self._salts.setdefault(salt, f"salt {len(self._salts) + 1}") if salt else ""
        self._line(Turn(
            number, at, parts, str(data.get("model", ""))[:200], named, answer.replica[:80], *answer.usage(),
            answer.first_ms,
        ).to_json())

    def _line(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_file: LogFile | None = None


def _open(path: Path, hide: bool) -> None:
    global _file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the proxy, which then waits for this process
    _file = LogFile(path, hide)


def _write(*noted: Any) -> None:
    assert _file is not None
    _file.write(*noted)


class Log:
    """A LogFile in a process of its own. Raises EngineError as a LogFile does."""

    def __init__(self, path: Path, hide: bool) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._waiting = 0  # bytes
        try:
            self._pool.submit(_open, path, hide).result()
        except EngineError:
            self._pool.shutdown()
            raise

    def write(self, number: int, at: float, body: bytes, answer: Answer) -> None:
        """Write a request and what its answer told, later. `at`: seconds since the proxy began."""
        if self._waiting > MOST_WAITING:
            logger.warning("request %d is not in the log, which is behind", number)
            return
        self._waiting += len(body)
        self._pool.submit(_write, number, at, body, answer).add_done_callback(lambda done: self._wrote(done, len(body)))

    def _wrote(self, done: Future[None], size: int) -> None:
        self._waiting -= size
        if (error := done.exception()) is not None:  # the client must not notice
            logger.warning("the log cannot be written: %s", error)

    def close(self) -> None:
        """Write what is left, and end the process."""
        self._pool.shutdown()
