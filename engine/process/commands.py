"""Commands for the engine process, and the client's end of the socket."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

MAX_UNSENT = 256 << 20  # bytes
SIZE, LONG_SIZE = struct.Struct("!i"), struct.Struct("!Q")  # the head of a message; of a long one: -1 and its size


class Command(NamedTuple):
    """A client's command: submit, abort, call, start or close; or "lost", which the engine process sends to itself."""

    kind: str
    tag: int  # the client's number for the stream or the call
    arguments: tuple[Any, ...] = ()
    problem: BaseException | None = None  # why the arguments could not be read

    def packed(self) -> bytes:
        """Returns the command as bytes. Kind and tag can be read without the arguments, which are packed separately."""
        return pickle.dumps((self.kind, self.tag, pickle.dumps(self.arguments, pickle.HIGHEST_PROTOCOL)))

    @classmethod
    def read(cls, data: bytes) -> Command:
        """Returns the command in `data`, with a `problem` if its arguments are unreadable."""
        kind, tag = "unreadable", 0
        try:
            kind, tag, arguments = pickle.loads(data)
            return cls(kind, tag, tuple(pickle.loads(arguments)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return cls(kind, tag, problem=error)


class Link(asyncio.Protocol):
    """The client's end of the socket to the engine process, in the format of multiprocessing.Connection. It sends and
    receives on the event loop. Threads would wait for Python's lock several times for each message."""

    transport: asyncio.Transport

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._data = bytearray()  # the beginning of a message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= SIZE.size:
            (size,), start = SIZE.unpack_from(self._data), SIZE.size
            if size < 0:  # a message of 2 GiB or more
                start += LONG_SIZE.size
                size = LONG_SIZE.unpack_from(self._data, SIZE.size)[0] if len(self._data) >= start else 1 << 63
            if len(self._data) < start + size:
                return
            message = bytes(self._data[start : start + size])
            del self._data[: start + size]
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def put(self, message: bytes) -> bool:
        """Send a message without waiting. Returns False and does not send it if others are unsent and all together
        exceed MAX_UNSENT bytes."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent + len(message) > MAX_UNSENT:
            return False
        small = len(message) < 1 << 31
        head = SIZE.pack(len(message)) if small else SIZE.pack(-1) + LONG_SIZE.pack(len(message))
        self.transport.write(head + message)
        return True
