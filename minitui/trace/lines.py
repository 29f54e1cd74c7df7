"""Reads the lines of a trace file one at a time, with a limited use of memory. A gzip member can unpack to a thousand
times its size, and JSON objects take ten times the size of their text. So three numbers are limited: the size of the
unpacked text relative to the file, the length of a line, and the number of values in a part (a gzip member)."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import EngineError

GZIP = 31  # zlib's window bits for a gzip member
CHUNK = 1 << 16
MOST_RATIO = 100  # bytes of unpacked text per byte of the file; in traces of real runs the ratio is 2 to 15
LEAST_TEXT = 16 << 20  # bytes of unpacked text allowed for a file of any size
LONGEST_LINE = 32 << 20  # bytes: enough for a keyframe with four million cached tokens
MOST_VALUES = 16_000_000  # JSON values in a part; each takes up to 60 bytes of memory


class TraceError(EngineError):
    """A trace cannot be read or written; the message names the file and the reason."""


class Member:
    """A gzip member of a file. Iterate over its lines once. Then `whole` is True if the member is undamaged, and `end`
    is the offset of the next member. A damaged member yields the lines before the damage, and perhaps damaged lines."""

    def __init__(self, file: LineFile, offset: int) -> None:
        self.offset = self.end = offset
        self.whole = False
        self.values = 0  # JSON values in the lines read so far
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        file, unpack = self._file, zlib.decompressobj(GZIP)
        pending, packed = bytearray(), b""
        file.seek(self.offset)
        while not unpack.eof:
            packed = packed or file.read(CHUNK)
            before = len(packed)
            try:
                text = unpack.decompress(packed, CHUNK)
            except zlib.error:
                return
            if not before and not text and not unpack.eof:
                return
            packed = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
            self.end += before - len(packed)
            file.count_unpacked(len(text))
            self.values += text.count(b",") + text.count(b"[")
            if self.values > MOST_VALUES:
                file.fail(f"a part of it has more than {MOST_VALUES:,} values")
            *lines, rest = text.split(b"\n")
            for line in lines:
                file.line += 1
                yield bytes(pending) + line
                pending.clear()
            pending += rest
            if len(pending) > LONGEST_LINE:
                file.fail(f"the next line is longer than {LONGEST_LINE >> 20} MiB")
        self.whole = True


class LineFile:
    """A trace file, open for reading. `line` counts the lines read, beginning at the number that the caller gives."""

    def __init__(self, path: Path, line: int = 0) -> None:
        self.path = path
        self.line = line
        try:
            self._raw = path.open("rb")
            self._size = os.fstat(self._raw.fileno()).st_size
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
        self._most = max(LEAST_TEXT, MOST_RATIO * self._size)
        self._taken = 0

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def seek(self, offset: int) -> None:
        """Continue reading at `offset`."""
        self._raw.seek(offset)

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes; fewer at the end. Raises TraceError if the disk or the network fails."""
        try:
            return self._raw.read(size)
        except OSError as error:
            self.fail(error.strerror or str(error))

    def members(self, offset: int = 0) -> Iterator[Member]:
        """Yields the members from `offset` on. The caller must read each member to its end before it takes the next."""
        while offset < self._size:
            member = Member(self, offset)
            yield member
            if not member.whole:
                return
            offset = member.end

    def count_unpacked(self, size: int) -> None:
        """Count `size` more bytes of unpacked text. Raises TraceError if the sum exceeds the limit."""
        self._taken += size
        if self._taken > self._most:
            self.fail(f"it unpacks to more than {self._most >> 20:,} MiB, the limit for a file of its size")

    def fail(self, reason: str) -> NoReturn:
        """Raise a TraceError with the line number and the reason."""
        raise TraceError(f"{self.path} cannot be read beyond line {max(1, self.line):,}: {reason}")


def wrong_line(file: LineFile, member: Member, lines: Iterator[bytes], error: ValueError) -> None:
    """Raise TraceError if the gzip member is undamaged. In a damaged member, a wrong line ends the trace."""
    at = file.line
    for _ in lines:
        pass
    if member.whole:
        file.line = at
        file.fail(str(error))


def parse(line: bytes) -> Any:
    """Returns the value of a line of JSON. Raises ValueError for any other text, and for NaN and infinity."""
    try:
        return json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({str(error)[:80]})") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def snapshot_json(snapshot: dict[str, Any]) -> Iterator[str]:
    """Yields a snapshot as JSON in pieces, one for each node of the tree. Other threads can run between two pieces."""
    head = {name: value for name, value in snapshot.items() if name != "nodes"}
    yield json.dumps(head, separators=(",", ":"))[:-1] + ',"nodes":{'
    for i, (id, node) in enumerate(snapshot["nodes"].items()):
        yield f'{"," if i else ""}"{id}":{json.dumps(node, separators=(",", ":"))}'
    yield "}}"
