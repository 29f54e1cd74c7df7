"""Renders a checkpoint's chat template in a separate process with limits of time, memory and output.

The method `start` or the first rendering starts the process (`engine/text/template_process.py`), which also serves all
later renderings. A rendering takes about 0.1 ms longer in that process than in this one. That process is killed when it
exceeds a limit, and it ends when its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, EngineError, InvalidRequest

SECONDS = 5.0  # for one rendering; the first rendering includes the compilation
MEMORY = 1 << 30  # bytes of address space
LONGEST = 16 << 20  # bytes of a rendering
LONGEST_VALUES = 64 << 20  # bytes of the values (messages, tools, ...) as JSON
LONGEST_SOURCE = 1 << 20  # characters of a template; the longest templates in use have about 30,000
START_SECONDS = 60.0  # for the interpreter to start, on a busy machine

SCRIPT = Path(__file__).with_name("template_process.py")
READY, TEXT = b".", b"="
HEAD = struct.Struct("!cQ")


class ChatTemplate:
    """One template. Its methods may be called from any thread; one rendering runs at a time."""

    def __init__(self, source: str, directory: Path) -> None:
        """`directory`: the directory of the checkpoint, for error messages. The process is not started yet."""
        self.source = source
        self.directory = directory
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._process: _Process | None = None
        self._stops = 0

    def start(self) -> None:
        """Start the process without waiting for it, so that the first rendering is fast."""
        self._running()

    def stop(self) -> None:
        """End the process: running and waiting renderings raise InvalidRequest. A later rendering starts it again."""
        self._stops += 1
        self._end()

    def render(self, values: dict[str, Any]) -> str:
        """Render the template with `values`, which must be JSON values; return the text.

        Raises CheckpointError if the template cannot be compiled, and InvalidRequest if it refuses the values, fails
        or exceeds a limit.
        """
        stops = self._stops
        request = _as_json(values)
        with self._turn:
            if self._stops != stops:
                raise _refusal("was stopped")
            try:
                process = self._running()
                process.prepare(self.source)
                kind, contents = process.ask(request)
            except BaseException as error:
                self._end()  # a late answer would be read as the answer to the next request
                if isinstance(error, TimeoutError):
                    raise _refusal(f"did not end within {SECONDS:g} seconds") from None
                if not isinstance(error, (OSError, EOFError)):
                    raise
                if self._stops != stops:
                    raise _refusal("was stopped") from None
                raise _refusal("ended its process, probably because memory ran out") from None
        if kind == TEXT:
            return contents.decode("utf-8", "surrogatepass")
        raise self._failure(*json.loads(contents))

    def _failure(self, kind: str, name: str, sentence: str) -> EngineError:
        if name == "MemoryError":
            self._end()  # otherwise Python might keep the memory
            return _refusal(f"needs more than {MEMORY >> 20:,} MiB of memory")
        if name == "TooLong":
            return _refusal(f"writes more than {LONGEST >> 20} MiB")
        if kind == "broken":
            return CheckpointError(f"the chat template of {self.directory} is broken: {sentence or name}")
        if kind == "refused":
            return InvalidRequest(f"the model's chat template refuses these messages: {sentence}", "messages")
        advice = ": each needs a role and a content" if name in ("TypeError", "AttributeError", "KeyError") else ""
        return InvalidRequest(
            f"the model's chat template cannot render these messages ({name}: {sentence}){advice}", "messages"
        )

    def _running(self) -> _Process:
        with self._starting:
            if self._process is None or self._process.ended:
                self._end()
                self._process = _Process()
            return self._process

    def _end(self) -> None:
        if (process := self._process) is not None:
            process.end()


class _Process:
    """The child process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        pipe, lifeline = os.pipe()  # carries no data: its closing ends the child when this process ends
        arguments = [str(number) for number in (SECONDS + 1, MEMORY, LONGEST, pipe)]
        with theirs:
            try:
                # -P: do not import from the script's directory. start_new_session: ctrl+c does not reach the child.
                self._child = subprocess.Popen(
                    [sys.executable, "-P", str(SCRIPT), *arguments], pass_fds=[pipe],
                    stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                os.close(lifeline)
                raise EngineError(
                    f"the process that renders chat templates could not be started: {error.strerror}"
                ) from None
            finally:
                os.close(pipe)
        self._socket = ours
        self._prepared = False
        self.end = weakref.finalize(self, _kill, self._child, ours, lifeline)

    @property
    def ended(self) -> bool:
        """True once the process can no longer be used."""
        return not self.end.alive or self._child.poll() is not None

    def prepare(self, source: str) -> None:
        """Wait until the process runs and send it the template. Raises EngineError."""
        if self._prepared:
            return
        self._until = time.monotonic() + START_SECONDS
        try:
            self._receive()
        except TimeoutError:
            raise EngineError(
                f"the process that renders chat templates did not start within {START_SECONDS:g} seconds"
            ) from None
        except EOFError:
            if not self.end.alive:  # this process has ended the child
                raise
            raise EngineError(
                f"the process that renders chat templates did not start (exit code {self._child.wait()})"
            ) from None
        self._send(json.dumps(source).encode())
        self._prepared = True

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request; return the kind and the contents of the answer. Raises TimeoutError, EOFError, OSError."""
        self._until = time.monotonic() + SECONDS
        self._send(request)
        return self._receive()

    def _send(self, contents: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(HEAD.pack(b" ", len(contents)) + contents)

    def _receive(self) -> tuple[bytes, bytes]:
        kind, length = HEAD.unpack(self._read(HEAD.size))
        if length > LONGEST:
            raise EOFError
        return kind, self._read(length)

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            self._socket.settimeout(self._left())
            if not (part := self._socket.recv(min(length - len(parts), 1 << 20))):
                raise EOFError
            parts += part
        return bytes(parts)

    def _left(self) -> float:
        # Never 0: if this process was paused (Ctrl+Z), the answer may have arrived, although the deadline has passed.
        return max(0.01, self._until - time.monotonic())


def _kill(child: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a waiting thread
    child.kill()
    child.wait()
    connection.close()
    os.close(lifeline)


def _as_json(values: dict[str, Any]) -> bytes:
    try:
        request = json.dumps(values, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"the chat template takes JSON values only, and these messages contain something else: {error}", "messages"
        ) from None
    if len(request) > LONGEST_VALUES:
        raise InvalidRequest(
            f"these messages have {len(request) >> 20:,} MiB; a chat template takes at most {LONGEST_VALUES >> 20} MiB",
            "messages",
        )
    return request


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template {what}; a template may take {SECONDS:g} seconds and {MEMORY >> 20:,} MiB of "
        f"memory, and write {LONGEST >> 20} MiB of text",
        "messages",
    )
