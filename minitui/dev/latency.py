"""Measures the time from a key press to its echo on the screen while the engine writes answers in eight chats.

    python -m minitui.dev.latency [--chats 8] [--tokens 1500] [--seconds 60] [--json] [-- OPTIONS OF MINITUI CHAT]

It runs the real application in a pseudo-terminal with the bundled model, and asks the same question in every chat. The
option ignore_eos makes every answer as long as --tokens. Then it types characters that no answer contains, one at a
time. When the answers have ended, it asks again. It also measures the application's share of a core, and the bytes per
second that the application writes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import pexpect
import typer

from minitui.visible import json_text

MAX_READ = 1 << 16  # the most bytes of one read
GLYPHS = "àáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿāăąćĉċčďđēĕėęěĝğġģĥħĩīĭįıĵķĺļľłńņňŋōŏőœŕŗřśŝşšţťŧũūŭůűųŵŷźżž"


@dataclass(frozen=True)
class Measured:
    """The result. p50 to worst: times until the echo, in milliseconds. `core`: the share of one core that the
    application uses, without the engine."""

    keys: int
    p50: float
    p95: float
    p99: float
    worst: float
    core: float
    bytes_per_second: float
    answering: float  # seconds in which answers were written


class Application:
    """`minitui chat` in a pseudo-terminal of `columns` × `rows`."""

    def __init__(self, columns: int, rows: int, arguments: list[str]) -> None:
        home = tempfile.mkdtemp(prefix="minitui-latency-")
        environment = {
            **os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor",
            "MINITUI_DATA": home, "MINITUI_CONFIG": os.path.join(home, "settings.toml"),
        }
        command = ["-m", "minitui", "chat", *arguments]
        self.terminal = pexpect.spawn(sys.executable, command, dimensions=(rows, columns), env=environment)
        self.written = 0

    def read(self, seconds: float) -> bytes:
        """Returns the next output; empty if there is none within `seconds`."""
        try:
            data: bytes = self.terminal.read_nonblocking(MAX_READ, seconds)
        except pexpect.TIMEOUT:
            return b""
        except pexpect.EOF:
            time.sleep(seconds)
            return b""
        self.written += len(data)
        return data

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Waits until the application has written `text`. Raises TimeoutError."""
        seen, end = b"", time.monotonic() + seconds
        while text.encode() not in seen:
            if time.monotonic() > end:
                raise TimeoutError(f"the application did not write {text!r} within {seconds:.0f} s")
            seen = seen[-4096:] + self.read(0.1)

    def drain(self, seconds: float) -> None:
        """Reads for `seconds` and drops the output."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def type(self, text: str) -> None:
        """Sends `text` to the application as key presses."""
        os.write(self.terminal.child_fd, text.encode())

    def command(self, text: str) -> None:
        """Types a line and presses enter."""
        self.type(text)
        self.drain(0.3)
        self.type("\r")
        self.drain(0.3)

    def echo(self, glyph: str) -> float:
        """Types `glyph`; returns the seconds until its echo. Raises TimeoutError."""
        wanted = glyph.encode()
        started = time.perf_counter()
        os.write(self.terminal.child_fd, wanted)
        seen = b""
        while wanted not in seen:
            seen = seen[-8:] + self.read(5.0)
            if time.perf_counter() - started > 5:
                raise TimeoutError("a key was not echoed within 5 s")
        return time.perf_counter() - started

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the application's process; the engine has another process."""
        with open(f"/proc/{self.terminal.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the application."""
        self.terminal.kill(signal.SIGTERM)
        self.drain(1.0)
        self.terminal.close(force=True)


def measure(chats: int, tokens: int, seconds: float, columns: int, rows: int, arguments: list[str]) -> Measured:
    """Types for `seconds` while `chats` chats get answers of `tokens` tokens; returns the figures."""
    app = Application(columns, rows, arguments)
    try:
        app.wait_for("blocks of")
        app.drain(1.0)
        for number in range(chats):
            if number:
                app.command("/new")
            app.command("/set ignore_eos on")
            app.command(f"/set max_tokens {tokens}")
        took: list[float] = []
        glyphs = list(GLYPHS)
        random.Random(0).shuffle(glyphs)
        began = time.monotonic()
        asked = answering = 0.0
        busy_for = 0.0
        cpu, written = app.cpu_seconds(), app.written
        typed = 0
        while (now := time.monotonic()) - began < seconds:
            if now - asked > busy_for:  # the answers may have ended: ask again in every idle chat
                app.command("/all Explain everything about the KV cache.")
                asked, busy_for = time.monotonic(), 5.0
                continue
            took.append(app.echo(glyphs[typed % len(glyphs)]))
            typed += 1
            if typed % 40 == 0:
                app.type("\x15")  # empty the line
            pause = 0.06 + random.random() * 0.08  # as a fast typist; random: any phase of a frame
            app.drain(pause)
            answering += time.monotonic() - now
        span = time.monotonic() - began
        took.sort()

        def at(share: float) -> float:
            return round(took[min(int(share * len(took)), len(took) - 1)] * 1e3, 1)

        return Measured(
            len(took), at(0.5), at(0.95), at(0.99), round(took[-1] * 1e3, 1),
            round((app.cpu_seconds() - cpu) / span, 3), round((app.written - written) / span), round(answering, 1),
        )
    finally:
        app.close()


def main(
    options: Annotated[list[str] | None, typer.Argument(help="Options of minitui chat, after --.")] = None,
    chats: Annotated[int, typer.Option(help="Number of chats.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 1500,
    seconds: Annotated[float, typer.Option(help="How long to type.")] = 60.0,
    columns: Annotated[int, typer.Option(help="Width of the terminal.")] = 120,
    rows: Annotated[int, typer.Option(help="Height of the terminal.")] = 36,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the time from a key press to its echo while the engine writes answers in several chats."""
    found = measure(chats, tokens, seconds, columns, rows, options or [])
    if json:
        print(json_text(asdict(found)))
        return
    print(
        f"{found.keys} keys over {found.answering:.0f} s of answering in {chats} chats: "
        f"p50 {found.p50} ms, p95 {found.p95} ms, p99 {found.p99} ms, worst {found.worst} ms; "
        f"the application used {found.core:.0%} of a core and wrote {found.bytes_per_second / 1e3:,.0f} KB/s"
    )


if __name__ == "__main__":
    typer.run(main)
