"""Traces: what an engine recorded, kept in a file that can be replayed, sought through and exported.

A trace is gzipped lines of JSON. The first is the header, an object; the others are arrays with a letter in front:

    {"minitui_trace": 1, "info": {...}, "recorded": "2026-01-31T12:00:00Z", "random_text": false}
    ["k", seq, step, played, snapshot]      a keyframe: the whole state at record `seq` (Engine.snapshot()), last step
                                            planned, and seconds of play until here
    ["r", seq, [[t, kind, ...], ...]]       records from number `seq` on, without gaps, fields as in engine/records.py
    ["w", [[id, "bytes"], ...]]             what token ids spell, bytes written as Latin-1
    ["n", {"group": "name"}]                what chats are called
    ["b", step, "text"]                     a bookmark
    ["e", {"records": n, "steps": n}]       the end, written when the recording was closed

Every keyframe begins a new gzip member, so that a reader may start at any of them; and a file that ends in the middle
of a line, because its writer was killed, is read up to the line before. Lines with other letters are skipped.

Time of play is the engine's time without what slow motion added and with pauses, in which nothing could happen, cut
to a second: a recording of a lecture replays at the speed of the engine, not of the lecturer.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.records import Record
from engine.state import State

VERSION = 1
LONGEST_PAUSE = 1.0  # seconds of play
GZIP = 31  # zlib's window bits for a gzip member
CHUNK = 1 << 16
RANDOM = "random text, not shown"  # stands in its place


class TraceError(EngineError):
    """A trace that cannot be read or written: which file, and why."""


class PlayClock:
    """Seconds of play: engine time without slow motion, pauses cut to LONGEST_PAUSE."""

    def __init__(self, t: float, played: float, state: State) -> None:
        self.now = played
        self._t = t
        self._pace = state.pace
        self._closed = state.gate == "closed"
        self._live = len(state.requests)
        self._stretched = 0.0

    def tell(self, record: Record) -> float:
        """The moment of play at which this record is due. Records must come in order."""
        elapsed = max(0.0, record[1] - self._t)
        self._t = max(self._t, record[1])
        if self._stretched:
            left_out = min(elapsed, self._stretched)
            self._stretched -= left_out
            elapsed -= left_out
        if self._closed or not self._live:
            elapsed = min(elapsed, LONGEST_PAUSE)
        self.now += elapsed
        kind = record[2]
        if kind == "time":
            if self._pace > 1:
                self._stretched += record[7] / 1e3 * (self._pace - 1)
        elif kind == "submit":
            self._live += 1
        elif kind == "finish":
            self._live -= 1
        elif kind == "gate":
            self._closed = record[3] == "closed"
        elif kind == "pace":
            self._pace, self._stretched = record[3], 0.0
        return self.now


@dataclass(frozen=True, slots=True)
class Keyframe:
    """Where a part of the trace begins: after record `seq` and step `step`, `played` seconds into it."""

    seq: int
    step: int
    played: float
    offset: int  # in the file


@dataclass(slots=True)
class Part:
    """The records between two keyframes, and when each is due, in seconds of play."""

    keyframe: Keyframe
    snapshot: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    due: list[float] = field(default_factory=list)

    @property
    def state(self) -> State:
        """The state at its beginning."""
        state = State.from_snapshot(self.snapshot)
        state.t = self.snapshot.get("t", 0.0)
        return state

    def ends_of_steps(self) -> Iterator[tuple[int, int]]:
        """(step, index after its last record): a step has ended when its timing is told, or it failed."""
        for i, record in enumerate(self.records):
            if record[2] in ("time", "fail"):
                yield record[3], i + 1


class TraceReader:
    """A trace, read part by part. `complete` is False where it ends without its end; what is there can be used."""

    def __init__(self, path: str | Path) -> None:
        """Scans the file once; TraceError if it is no trace, or one of a version this program does not know."""
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.keyframes: list[Keyframe] = []
        self.words: dict[int, bytes] = {}
        self.names: dict[str, str] = {}
        self.bookmarks: list[tuple[int, str]] = []
        self.complete = False
        self._parts: dict[int, Part] = {}
        self._scan()
        last = self.part(len(self.keyframes) - 1)
        self.last_step = max((step for step, _ in last.ends_of_steps()), default=last.keyframe.step)
        self.seconds = last.due[-1] if last.due else last.keyframe.played

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself."""
        return self.header["info"]

    @property
    def first_step(self) -> int:
        """The last step before the recording began; -1: it begins with the engine."""
        return self.keyframes[0].step

    def part(self, index: int) -> Part:
        """The records from keyframe `index` to the next; the last few are kept."""
        part = self._parts.get(index)
        if part is None:
            part = self._read_part(self.keyframes[index])
            while len(self._parts) >= 4:
                del self._parts[next(iter(self._parts))]
            self._parts[index] = part
        return part

    def records(self) -> Iterator[Record]:
        """All of them, oldest first."""
        for index in range(len(self.keyframes)):
            yield from self.part(index).records

    def part_of_step(self, step: int) -> int:
        """The part in which this step was planned."""
        index = 0
        for i, keyframe in enumerate(self.keyframes):
            if keyframe.step < step:
                index = i
        return index

    def locate(self, step: int) -> tuple[int, int]:
        """(part, records of it that were told until `step` had ended); the end of the trace for later steps."""
        for index in range(self.part_of_step(step), len(self.keyframes)):
            for ended, count in self.part(index).ends_of_steps():
                if ended >= step:
                    return index, count
        index = len(self.keyframes) - 1
        return index, len(self.part(index).records)

    def state_at(self, step: int) -> State:
        """The state when `step` had ended."""
        index, count = self.locate(step)
        part = self.part(index)
        state = part.state
        state.apply_all(part.records[:count])
        return state

    def final_state(self) -> State:
        """The state at the end."""
        part = self.part(len(self.keyframes) - 1)
        state = part.state
        state.apply_all(part.records)
        return state

    def decode(self, ids: Iterable[int]) -> str:
        """What token ids spell; numbers where the trace does not tell, and nothing of random weights' output."""
        ids = list(ids)
        if self.header["random_text"]:
            return RANDOM if ids else ""
        if not self.words:
            return " ".join(map(str, ids))
        return b"".join(self.words.get(token, b"\xef\xbf\xbd") for token in ids).decode("utf-8", "replace")

    def add_bookmark(self, step: int, text: str) -> None:
        """Mark a step, in the file."""
        if not self.complete:
            raise TraceError(f"{self.path} was cut off: nothing can be appended to it, so the bookmark is not kept")
        line = json.dumps(["b", step, text]).encode() + b"\n"
        member = zlib.compressobj(6, zlib.DEFLATED, GZIP)
        try:
            with self.path.open("ab") as file:
                file.write(member.compress(line) + member.flush())
        except OSError as error:
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; the bookmark is not kept") from None
        self.bookmarks.append((step, text))
        self.bookmarks.sort()

    # ---- the file

    def _scan(self) -> None:
        """One pass: the header, where the keyframes are, words, names and bookmarks."""
        for offset, lines in self._members():
            for line in lines:
                if not self.header:
                    self.header = self._check_header(line)
                elif line.startswith(b'["k"'):
                    found = _KEYFRAME.match(line)
                    if found:
                        seq, step, played = found.groups()
                        self.keyframes.append(Keyframe(int(seq), int(step), float(played), offset))
                elif line[:3] in _SMALL:
                    self._small(json.loads(line))
        if not self.header or not self.keyframes:
            raise TraceError(f"{self.path} is empty: nothing was recorded before its writer ended")
        self.bookmarks.sort()

    def _check_header(self, line: bytes) -> dict[str, Any]:
        try:
            header = json.loads(line)
            version = header["minitui_trace"]
        except (ValueError, TypeError, KeyError):
            raise TraceError(f"{self.path} is no minitui trace: its first line is no header") from None
        if version != VERSION:
            raise TraceError(
                f"{self.path} is a trace of version {version}; this minitui reads version {VERSION}: record it again, "
                "or replay it with the minitui that wrote it"
            )
        return header

    def _small(self, line: list[Any]) -> None:
        kind = line[0]
        if kind == "w":
            self.words.update((token, text.encode("latin-1")) for token, text in line[1])
        elif kind == "n":
            self.names.update(line[1])
        elif kind == "b":
            self.bookmarks.append((line[1], line[2]))
        elif kind == "e":
            self.complete = True

    def _read_part(self, keyframe: Keyframe) -> Part:
        _, lines = next(self._members(keyframe.offset))
        start = next(i for i, line in enumerate(lines) if line.startswith(b'["k"'))
        part = Part(keyframe, _restored(json.loads(lines[start])[4]))
        clock: PlayClock | None = None
        for line in lines[start + 1 :]:
            if not line.startswith(b'["r"'):
                continue
            _, seq, rows = json.loads(line)
            if seq != keyframe.seq + 1 + len(part.records):
                break  # a damaged end
            for i, row in enumerate(rows):
                record = _record(seq + i, row)
                if clock is None:
                    clock = PlayClock(part.snapshot["t"] or record[1], keyframe.played, part.state)
                part.due.append(clock.tell(record))
                part.records.append(record)
        return part

    def _members(self, offset: int = 0) -> Iterator[tuple[int, list[bytes]]]:
        """(offset, whole lines) of each gzip member from `offset` on; of a broken one, what can be had."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise TraceError(f"{self.path} cannot be read: {error.strerror}") from None
        with file:
            file.seek(offset)
            rest = file.read(CHUNK)
            if offset == 0 and rest[:2] != b"\x1f\x8b":
                raise TraceError(f"{self.path} is no minitui trace: it is not a gzip file")
            while rest:
                member = zlib.decompressobj(GZIP)
                text: list[bytes] = []
                start, taken = offset, 0
                while rest and not member.eof:
                    try:
                        text.append(member.decompress(rest))
                    except zlib.error:
                        rest = b""
                        break
                    taken += len(rest) - len(member.unused_data)
                    rest = member.unused_data or (b"" if member.eof else file.read(CHUNK))
                lines = b"".join(text).split(b"\n")[:-1]  # the last is empty, or was cut
                if not member.eof:
                    # Damaged bytes may be decompressed to damaged lines before that is noticed.
                    yield start, list(takewhile(_is_json, lines))
                    return
                yield start, lines
                offset += taken
                rest = rest or file.read(CHUNK)


_KEYFRAME = re.compile(rb'\["k",(\d+),(-?\d+),([\d.e+-]+),')
_SMALL = frozenset((b'["w', b'["n', b'["b', b'["e'))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _record(seq: int, row: list[Any]) -> Record:
    """A record as the engine makes it: its chunks, nodes and drafts are tuples."""
    t, kind, *fields = row
    if kind == "step":
        fields[1] = [tuple(chunk) for chunk in fields[1]]
    elif kind in ("withdraw", "draft", "accept"):
        fields[1] = [tuple(part) for part in fields[1]]
    return (seq, t, kind, *fields)


def _restored(snapshot: dict[str, Any]) -> dict[str, Any]:
    """JSON has made strings of the numbers that are keys."""
    for name in ("requests", "nodes", "pending"):
        snapshot[name] = {int(key): value for key, value in snapshot[name].items()}
    return snapshot
