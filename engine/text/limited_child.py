"""The side of a LimitedProcess that runs the task, in the process that engine/text/limited_process.py starts.

The kernel enforces the limits. RLIMIT_AS limits memory (macOS ignores this limit). Timers limit time: their signals end
this process. When the parent ends, the kernel closes the parent's end of a pipe and sends this process a signal, which
ends it too.

    stdin, a socket    in: a frame with the setup, then a frame for each request
                       out: READY, then a frame for each request
    arguments          seconds and seconds of processor time per request (0: no limit), bytes of memory, bytes of an
                       answer, the pipe's file descriptor
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

READY, TEXT, FAILURE = b".", b"=", b"!"  # the kinds of frames
HEAD = struct.Struct("!cQ")  # kind of frame, length of its contents
Answer = tuple[bytes, bytes]  # TEXT or FAILURE, and the contents


def serve(prepare: Callable[[bytes], Callable[[bytes, int], Answer]]) -> None:
    """Answer requests until the parent closes the socket. `prepare`: takes the setup and returns the function that
    answers a request; its second argument is the largest number of bytes of an answer."""
    seconds, cpu_seconds, memory, longest, lifeline = sys.argv[1:6]
    _limit(int(memory))
    _end_with_parent(int(lifeline))
    timers = ((signal.ITIMER_REAL, float(seconds)), (signal.ITIMER_PROF, float(cpu_seconds)))
    with open(0, "rb") as source, open(0, "wb", closefd=False) as out:
        _send(out, READY, b"")
        answer = prepare(_receive(source))
        while request := _receive(source):
            for timer, limit in timers:
                signal.setitimer(timer, limit)
            _send(out, *answer(request, int(longest)))
            for timer, _ in timers:
                signal.setitimer(timer, 0)


def _limit(memory: int) -> None:
    for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGIO):  # they must end this process, even if the parent
        signal.signal(number, signal.SIG_DFL)  # ignores them
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # the system lacks this limit, or a lower limit is set
            resource.setrlimit(kind, (value, value))


def _end_with_parent(lifeline: int) -> None:
    """Let a signal end this process when the other end of the pipe is closed, even during a call into C."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO


def _receive(source: BinaryIO) -> bytes:
    """Returns the contents of the next frame; empty if the parent has closed the socket."""
    head = source.read(HEAD.size)
    return source.read(HEAD.unpack(head)[1]) if len(head) == HEAD.size else b""


def _send(out: BinaryIO, kind: bytes, contents: bytes) -> None:
    out.write(HEAD.pack(kind, len(contents)))
    out.write(contents)
    out.flush()
