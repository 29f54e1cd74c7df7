"""Runs the process of an application that a browser displays. The process sends and receives packets of Textual's web
driver through two pipes. A packet has one byte for its type, four bytes for the length of the payload, then the
payload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os

from engine.errors import EngineError
from minitui.lifeline import VARIABLE, lifeline

READY = b"__GANGLION__\n"  # the first line that Textual's web driver writes
QUIT_S = 4.0  # seconds to wait after each attempt to end the application
MAX_UNREAD = 4 << 20  # bytes of input that an application has not read yet; more is dropped


class WebProcess:
    """The process of an application. It ends when the process that started it ends (minitui/lifeline.py). Subclasses
    implement `handle` for its packets."""

    driver = "textual.drivers.web_driver:WebDriver"
    fps = 60

    def __init__(self, command: list[str], size: tuple[int, int]) -> None:
        """`size`: columns and rows."""
        self._command, self.size = command, size
        self._process: asyncio.subprocess.Process | None = None
        self._stderr = b""  # the last 4096 bytes
        self._reading: asyncio.Task[None] | None = None

    async def handle(self, kind: bytes, data: bytes) -> None:
        """Handle a packet of the application."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process; return when its driver is ready. Raises EngineError with its stderr if it ends earlier."""
        columns, rows = self.size
        environment = {
            **os.environ, "TEXTUAL_DRIVER": self.driver, "TEXTUAL_COLOR_SYSTEM": "truecolor",
            "TEXTUAL_FPS": str(self.fps), "COLUMNS": str(columns), "ROWS": str(rows), "TERM_PROGRAM": "textual",
            VARIABLE: str(lifeline()),
        }
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True,
            pass_fds=[lifeline()],
        )
        self._reading = asyncio.create_task(self._read_stderr())
        assert self._process.stdout is not None
        while (line := await self._process.stdout.readline()) != READY:
            if not line:
                await self._reading
                raise EngineError(self.message or "the application ended without a message")

    @property
    def message(self) -> str:
        """Returns what the process has written to stderr, such as an error."""
        return self._stderr.decode(errors="replace").strip().removeprefix("minitui: ")

    @property
    def returncode(self) -> int:
        """The exit code of the process; 0 before it ends or if a signal ended it."""
        return max(0, (self._process.returncode if self._process is not None else None) or 0)

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr = (self._stderr + data)[-4096:]

    async def run(self) -> None:
        """Pass the packets of the process to `handle`; return when the process has ended."""
        assert self._process is not None and self._process.stdout is not None
        read = self._process.stdout.readexactly
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await read(5)
                await self.handle(head[:1], await read(int.from_bytes(head[1:], "big")))

    def type(self, text: str) -> None:
        """Send typed text to the application."""
        self._write(b"D", text.encode("utf-8", "replace"))  # a browser can send lone surrogates

    def resize(self, size: tuple[int, int]) -> None:
        """Set the columns and rows of the application's screen."""
        self.size = size  # used if the process has not started yet
        self.send(type="resize", width=size[0], height=size[1])

    def send(self, **message: object) -> None:
        """Send the application a message of Textual's web protocol, such as a resize."""
        self._write(b"M", json.dumps(message).encode())

    def _write(self, kind: bytes, data: bytes) -> None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is None or pipe.is_closing() or pipe.transport.get_write_buffer_size() > MAX_UNREAD:
            return
        pipe.write(b"%s%s%s" % (kind, len(data).to_bytes(4, "big"), data))

    async def stop(self) -> None:
        """End the process: first with a quit message, then with SIGTERM, then with SIGKILL."""
        process = self._process
        if process is None:
            return
        assert process.stdout is not None
        unread = asyncio.create_task(_discard(process.stdout))  # while this pipe is full, the process cannot end
        self.send(type="quit")
        for end in (lambda: None, process.terminate, process.kill):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    end()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(QUIT_S):
                        await process.wait()
        tasks = [task for task in (unread, self._reading) if task is not None]
        await asyncio.wait(tasks, timeout=QUIT_S)  # its last message
        for task in tasks:
            task.cancel()


def page_message(kind: bytes, data: bytes) -> str | None:
    """Returns the message for the browser's page if this packet has one: the title and the keys of the screen."""
    message = json.loads(data) if kind == b"M" else {}
    return json.dumps(["page", message["title"], message["keys"]]) if message.get("type") == "page" else None


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
