"""The script of the process that runs a chat template. engine/text/chat_template.py starts it.

A template is a program that comes with a checkpoint. No check in Python can interrupt a long call into C (`'a' *
10**10`, a sort), so the kernel enforces the limits. RLIMIT_AS limits memory (macOS ignores this limit). A timer limits
time: its signal ends this process. When the parent ends, the kernel closes the parent's end of a pipe and sends this
process a signal, which ends it too.

    stdin, a socket    in: a frame with the template, then a frame with the values of each rendering, as JSON
                       out: READY, then a frame for each rendering
    arguments          seconds per rendering, bytes of memory, bytes of output, the pipe's file descriptor
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.sandbox

READY, TEXT, FAILURE = b".", b"=", b"!"
HEAD = struct.Struct("!cQ")  # kind of frame, length of its contents
LONGEST_MESSAGE = 500  # characters of an error


def main() -> None:
    """Render until the parent closes the socket."""
    seconds, memory, max_bytes = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit(memory)
    end_with_parent(int(sys.argv[4]))
    with open(0, "rb") as source, open(0, "wb", closefd=False) as out:
        send(out, READY, b"")
        template = None
        text = json.loads(receive(source))
        while values := receive(source):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                compiling = template is None
                template = template or environment().from_string(text)
                compiling = False
                answer = TEXT, b"".join(pieces(template, json.loads(values), max_bytes))
            except Exception as error:
                kind = "broken" if compiling else "refused" if isinstance(error, jinja2.TemplateError) else "failed"
                sentence = str(error)[:LONGEST_MESSAGE]
                answer = FAILURE, json.dumps([kind, type(error).__name__, sentence]).encode()
            send(out, *answer)
            signal.setitimer(signal.ITIMER_REAL, 0)


def limit(memory: int) -> None:
    """Set the limits of this process."""
    for number in (signal.SIGALRM, signal.SIGIO):  # both must end this process, even if the parent ignores them
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # the system lacks this limit, or a lower limit is set
            resource.setrlimit(kind, (value, value))


def end_with_parent(lifeline: int) -> None:
    """Let a signal end this process when the other end of the pipe is closed, even during a call into C."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO


def receive(source: BinaryIO) -> bytes:
    """Returns the contents of the next frame; empty if the parent has closed the socket."""
    head = source.read(HEAD.size)
    return source.read(HEAD.unpack(head)[1]) if len(head) == HEAD.size else b""


def send(out: BinaryIO, kind: bytes, contents: bytes) -> None:
    """Write a frame."""
    out.write(HEAD.pack(kind, len(contents)))
    out.write(contents)
    out.flush()


class TooLong(Exception):
    """The rendering is longer than allowed."""


def pieces(template: jinja2.Template, values: dict[str, Any], max_bytes: int) -> Iterator[bytes]:
    """Yields the rendering in UTF-8, piece by piece. Raises TooLong after `max_bytes` bytes."""
    size = 0
    for piece in template.generate(values):
        encoded = piece.encode("utf-8", "surrogatepass")
        size += len(encoded)
        if size > max_bytes:
            raise TooLong
        yield encoded


def environment() -> jinja2.Environment:
    """Returns the environment that transformers uses: loops with break, tojson, raise_exception, strftime_now."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = strftime_now
    return sandbox


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, which marks replies for training. Here it only renders its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns the value as JSON, as the filter of transformers does; jinja2's own filter also escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse the messages. Templates call this."""
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """Returns the local time. Templates call this."""
    return datetime.now().strftime(pattern)


if __name__ == "__main__":
    main()
