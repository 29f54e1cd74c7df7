"""The part of ZeroMQ's protocol that reading KV events takes: ZMTP 3.0 without security (rfc.zeromq.org/spec/23).

libzmq hands out a message when its last part has arrived, and limits neither the number of the parts nor their sum, so
one message can fill the memory. Here both are limited, and data that minitui has not read yet waits at the publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 0)) + b"NULL".ljust(20, b"\0") + bytes(32)
VERSION, MECHANISM = 10, slice(12, 32)  # of a greeting
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
PEERS = {"SUB": ("PUB", "XPUB"), "DEALER": ("ROUTER",)}  # type of a socket -> the types that it connects to
MOST_PARTS = 8  # of a message; a KV event message has 3
MOST_BYTES = 4 << 20  # of a message
GREET_S = 5.0  # the longest time for the connection and the handshake


class Excess(Exception):
    """A message is beyond the limits. Its text continues a sentence that begins with "a message"."""


class Connection:
    """One connection. Its methods raise OSError when it is lost."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> list[bytes]:
        """Returns the parts of the next message; an empty list for a command. Raises Excess."""
        parts: list[bytes] = []
        while True:
            flags, part = await self._frame(MOST_BYTES - sum(map(len, parts)))
            if flags & COMMAND:
                return []
            parts.append(part)
            if not flags & MORE:
                return parts
            if len(parts) == MOST_PARTS:
                raise Excess(f"has more than {MOST_PARTS} parts")

    async def send(self, *parts: bytes, flags: int = 0) -> None:
        """Send a message; the parts are short."""
        for i, part in enumerate(parts):
            self._writer.write(bytes((flags | (MORE if i < len(parts) - 1 else 0), len(part))) + part)
        await self._writer.drain()

    async def greet(self, kind: str) -> None:
        """Shake hands as a socket of this type. Raises OSError if the peer is not one that it connects to."""
        self._writer.write(GREETING)
        greeting = await self._read(len(GREETING))
        signed = greeting[0] == GREETING[0] and greeting[9] == GREETING[9]  # older versions use the bytes between
        if not signed or greeting[VERSION] < 3 or greeting[MECHANISM] != GREETING[MECHANISM]:
            raise ConnectionError("the peer does not speak ZMTP 3 without security")
        await self.send(b"\5READY" + _socket_type(kind), flags=COMMAND)
        flags, ready = await self._frame(1 << 16)
        if not flags & COMMAND or not any(_socket_type(peer) in ready for peer in PEERS[kind]):
            raise ConnectionError(f"the peer is none of {PEERS[kind]}")

    async def _frame(self, most: int) -> tuple[int, bytes]:
        """Returns the flags and the content of the next frame, which has at most `most` bytes. Raises Excess."""
        flags = (await self._read(1))[0]
        size = int.from_bytes(await self._read(8 if flags & LONG else 1), "big")
        if size > most:
            raise Excess(f"has more than {MOST_BYTES:,} bytes")
        return flags, await self._read(size)

    async def _read(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the peer closed the connection") from error


def _socket_type(kind: str) -> bytes:
    """Returns the property of a READY command that names the type of a socket."""
    return b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()


@contextlib.asynccontextmanager
async def connect(kind: str, address: str) -> AsyncIterator[Connection]:
    """Connects a socket of type `kind`, SUB or DEALER, to tcp://HOST:PORT or ipc://PATH. Raises OSError."""
    scheme, _, place = address.partition("://")
    async with asyncio.timeout(GREET_S) as limit:
        if scheme == "ipc":
            reader, writer = await asyncio.open_unix_connection(place)
        else:
            host, _, port = place.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            connection = Connection(reader, writer)
            try:
                await connection.greet(kind)
            except Excess as error:
                raise ConnectionError(str(error)) from error
            limit.reschedule(None)
            yield connection
        finally:
            writer.close()
