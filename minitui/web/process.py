"""An application whose screen is a browser: a process that talks through two pipes, in the packets of Textual's web
driver (one byte of type, four of length, the payload)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os

from engine.errors import EngineError
from minitui.lifeline import VARIABLE, lifeline

READY = b"__GANGLION__\n"  # Textual's web driver writes this line first
GOODBYE_S = 4.0  # the application has so long to end
MAX_UNTYPED = 4 << 20  # bytes typed that an application has not read yet


class WebProcess:
    """Subclasses say in `take` where its packets go. It ends when this process does (minitui/lifeline.py)."""

    driver = "textual.drivers.web_driver:WebDriver"
    fps = 60

    def __init__(self, command: list[str], size: tuple[int, int]) -> None:
        """`size`: columns and rows."""
        self._command, self._size = command, size
        self._process: asyncio.subprocess.Process | None = None
        self._said = b""  # the end of what it wrote to stderr
        self._reading: asyncio.Task[None] | None = None

    async def take(self, kind: bytes, data: bytes) -> None:
        """A packet of the application."""
        raise NotImplementedError

    async def start(self) -> None:
        """Returns when it draws. Raises EngineError with its own words if it does not begin."""
        columns, rows = self._size
        environment = {
            **os.environ, "TEXTUAL_DRIVER": self.driver, "TEXTUAL_COLOR_SYSTEM": "truecolor",
            "TEXTUAL_FPS": str(self.fps), "COLUMNS": str(columns), "ROWS": str(rows), "TERM_PROGRAM": "textual",
            VARIABLE: str(lifeline()),
        }  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True,
            pass_fds=[lifeline()],
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read_stderr())
        assert self._process.stdout is not None
        while (line := await self._process.stdout.readline()) != READY:
            if not line:
                await self._reading
                raise EngineError(self._said.decode(errors="replace").strip().removeprefix("minitui: ") or "it ended")

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._said = (self._said + data)[-4096:]

    async def run(self) -> None:
        """Pass on what it draws; returns when it has ended."""
        assert self._process is not None and self._process.stdout is not None
        read = self._process.stdout.readexactly
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await read(5)
                await self.take(head[:1], await read(int.from_bytes(head[1:], "big")))

    def type(self, text: str) -> None:
        """What is typed into it."""
        self._write(b"D", text.encode("utf-8", "replace"))  # a browser can send half a surrogate pair

    def tell(self, **message: object) -> None:
        """Something beside keys."""
        self._write(b"M", json.dumps(message).encode())

    def _write(self, kind: bytes, data: bytes) -> None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is None or pipe.is_closing() or pipe.transport.get_write_buffer_size() > MAX_UNTYPED:
            return
        pipe.write(b"%s%s%s" % (kind, len(data).to_bytes(4, "big"), data))

    async def stop(self) -> None:
        """End it, in good order if it will."""
        process = self._process
        if process is None:
            return
        assert process.stdout is not None
        unread = asyncio.create_task(_discard(process.stdout))  # a full pipe would hold up its end
        self.tell(type="quit")
        for end in (lambda: None, process.terminate, process.kill):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    end()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await process.wait()
        for task in (unread, self._reading):
            if task is not None:
                task.cancel()


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
