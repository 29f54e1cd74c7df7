"""Traces: what an engine recorded, kept in a file that can be replayed, sought through and exported.

A trace is gzipped lines of JSON. The first is the header, an object; the others are arrays with a letter in front:

    {"minitui_trace": 1, "info": {...}, "recorded": "2026-01-31T12:00:00Z", "random_text": false}
    ["k", seq, step, played, snapshot]      a keyframe: the whole state at record `seq` (Engine.snapshot()), last step
                                            planned, and seconds of play until here
    ["r", seq, [[t, kind, ...], ...]]       records from number `seq` on, without gaps, with the fields that
                                            engine/trace/records.py names
    ["w", [[id, "bytes"], ...]]             what token ids spell, bytes written as Latin-1
    ["n", {"group": "name"}]                what chats are called
    ["b", step, "text"]                     a bookmark
    ["e", {"records": n, "steps": n}]       the end, written when the recording was closed

Every keyframe begins a new gzip member, so that a reader may start at any of them; and a file that ends in the middle
of a line, because its writer was killed, is read up to the line before. Lines with other letters are skipped.

A file may come from anyone: it is unpacked within limits (trace_lines.py), each line is checked (trace_check.py), and
each record must follow from the state before it (trace_follow.py). What is wrong is a TraceError that names the line.

Time of play is the engine's time without what slow motion added and with pauses, in which nothing could happen, cut
to a second: a recording of a lecture replays at the speed of the engine, not of the lecturer.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.trace.records import Record
from engine.trace.state import State
from minitui.trace import check
from minitui.trace.follow import Follower
from minitui.trace.lines import GZIP, MOST_VALUES, LineFile, Member, TraceError, parse

__all__ = ["GZIP", "VERSION", "Keyframe", "Part", "PlayClock", "TraceError", "TraceReader"]

VERSION = 1
LONGEST_PAUSE = 1.0  # seconds of play
RANDOM = "random text, not shown"  # stands in its place


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
    offset: int  # in the file, of its gzip member
    line: int  # lines of the file before that member


@dataclass(slots=True)
class Part:
    """The records between two keyframes, and when each is due, in seconds of play."""

    keyframe: Keyframe
    snapshot: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    values: int = 0  # of its text: what it takes in memory

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
        """Scans the file once, and reads the first and the last part; TraceError if it is no trace, or one of a version
        this program does not know. A wrong line in another part is a TraceError when that part is read."""
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.keyframes: list[Keyframe] = []
        self.words: dict[int, bytes] = {}
        self.names: dict[str, str] = {}
        self.bookmarks: list[tuple[int, str]] = []
        self.complete = False
        self._parts: dict[int, Part] = {}
        self._scan()
        self.part(0)  # every reader begins there
        last = self.part(len(self.keyframes) - 1)
        self.last_step = max((step for step, _ in last.ends_of_steps()), default=last.keyframe.step)
        self.seconds = last.due[-1] if last.due else last.keyframe.played
        pool = {"num_blocks": last.snapshot["num_blocks"] - 1, "block_size": last.snapshot["block_size"]}
        self.header["info"] = pool | self.header["info"]

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself."""
        return self.header["info"]

    @property
    def first_step(self) -> int:
        """The last step before the recording began; -1: it begins with the engine."""
        return self.keyframes[0].step

    def part(self, index: int) -> Part:
        """The records from keyframe `index` to the next; the last few are kept. TraceError if it cannot be read."""
        part = self._parts.get(index)
        if part is None:
            part = self._read_part(self.keyframes[index])
            kept = self._parts
            while kept and (len(kept) >= 4 or sum(p.values for p in kept.values()) + part.values > MOST_VALUES):
                del kept[next(iter(kept))]
            self._parts[index] = part
        return part

    def records(self) -> Iterator[Record]:
        """All of them, oldest first."""
        for index in range(len(self.keyframes)):
            yield from self.part(index).records

    def check(self) -> None:
        """Read every part: TraceError if one of them cannot be."""
        for index in range(len(self.keyframes)):
            self.part(index)

    def part_of_step(self, step: int) -> int:
        """The part in which this step was planned."""
        index = 0
        for i, keyframe in enumerate(self.keyframes):
            if keyframe.step < step:
                index = i
        return index

    def locate(self, step: int) -> tuple[int, int]:
        """(part, records of it) up to the last end of a step at which `step` is the last one planned: its own end, or,
        where an engine plans a step before the one before it has ended, that of the one before. The end of the trace
        for later steps."""
        found: tuple[int, int] | None = None
        for index in range(self.part_of_step(step), len(self.keyframes)):
            part = self.part(index)
            planned = part.keyframe.step
            for count, record in enumerate(part.records, 1):
                if record[2] == "step":
                    planned = record[3]
                if record[2] in ("time", "fail") and planned >= step:
                    if planned > step and found is not None:
                        return found
                    found = (index, count)
                    if planned > step:
                        return found
        index = len(self.keyframes) - 1
        return found or (index, len(self.part(index).records))

    def state_at(self, step: int) -> State:
        """The state at `locate(step)`."""
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
        with LineFile(self.path) as file:
            if not file.is_gzip():
                raise TraceError(f"{self.path} is no minitui trace: it is not a gzip file")
            for member in file.members():
                self._scan_member(file, member)
        if not self.header or not self.keyframes:
            raise TraceError(f"{self.path} is empty: nothing was recorded before its writer ended")
        self.bookmarks.sort()

    def _scan_member(self, file: LineFile, member: Member) -> None:
        before, keyframe = file.line, None
        lines = iter(member)
        try:
            for line in lines:
                if not self.header:
                    self.header = self._check_header(line)
                elif line.startswith(b'["k"'):
                    if keyframe is not None:
                        raise ValueError("a second keyframe in a gzip member")
                    keyframe = self._keyframe(line, member.offset, before)
                elif line[:3] in _SMALL:
                    self._small(check.small(parse(line)))
        except ValueError as error:
            _damaged(file, member, lines, error)
        if keyframe is None:
            return
        if not member.whole:
            try:
                self._read_part(keyframe)
            except TraceError:
                return  # it is in the damaged end
        self.keyframes.append(keyframe)

    def _check_header(self, line: bytes) -> dict[str, Any]:
        try:
            header = parse(line)
            version = header["minitui_trace"]
        except (ValueError, TypeError, KeyError):
            raise TraceError(f"{self.path} is no minitui trace: its first line is no header") from None
        if version != VERSION:
            raise TraceError(
                f"{self.path} is a trace of version {str(version)[:20]}; this minitui reads version {VERSION}: record "
                "it again, or replay it with the minitui that wrote it"
            )
        return check.header(header)

    def _keyframe(self, line: bytes, offset: int, before: int) -> Keyframe:
        found = _KEYFRAME.match(line)
        if found is None:
            raise ValueError("it is no keyframe: a number, a step and seconds of play are missing")
        seq, step, played = int(found[1]), int(found[2]), float(found[3])
        last = self.keyframes[-1] if self.keyframes else Keyframe(0, -1, 0.0, 0, 0)
        if seq < last.seq or step < last.step or played < last.played:
            raise ValueError(f"its keyframe at record {seq:,}, step {step:,} does not follow the one before it")
        return Keyframe(seq, step, played, offset, before)

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
        """The part, checked: what its lines say, and that each record follows from those before it."""
        with LineFile(self.path, keyframe.line) as file:
            member = next(file.members(keyframe.offset))
            lines = iter(member)
            part: Part | None = None
            try:
                for line in lines:
                    if line.startswith(b'["k"'):
                        part = _begin(keyframe, parse(line))
                        follower = Follower(part.state)
                        clock: PlayClock | None = None
                    elif line.startswith(b'["r"') and part is not None:
                        for record in _records(part, parse(line)):
                            follower.take(record)
                            clock = clock or PlayClock(part.snapshot["t"] or record[1], keyframe.played, part.state)
                            part.due.append(clock.tell(record))
                            part.records.append(record)
            except ValueError as error:
                _damaged(file, member, lines, error)
            if part is None:
                file.fail("its keyframe is missing")
            part.values = member.values
            self._check_end(keyframe, follower.state)
            return part

    def _check_end(self, keyframe: Keyframe, state: State) -> None:
        """A keyframe without a gap before it has the state that the records lead to: readers go on folding."""
        following = next((k for k in self.keyframes if k.offset > keyframe.offset), None)
        if following is None or following.seq != state.seq:
            return
        with LineFile(self.path, following.line) as file:
            for line in next(file.members(following.offset)):
                if line.startswith(b'["k"'):
                    try:
                        same = _timeless(_begin(following, parse(line)).snapshot) == _timeless(state.snapshot())
                    except ValueError as error:
                        file.fail(str(error))
                    if not same:
                        file.fail("its keyframe is not the state that the records before it lead to")
                    return


_KEYFRAME = re.compile(rb'\["k",(\d{1,16}),(-1|\d{1,9}),(\d{1,12}(?:\.\d{1,9})?|\d(?:\.\d+)?e-\d\d?),')
_SMALL = frozenset((b'["w', b'["n', b'["b', b'["e'))


def _damaged(file: LineFile, member: Member, lines: Iterator[bytes], error: ValueError) -> None:
    """Damaged bytes may be unpacked to damaged lines before that is noticed: then the trace ends before them. In a
    member without damage a wrong line is an error."""
    at = file.line
    for _ in lines:
        pass
    if member.whole:
        file.line = at
        file.fail(str(error))


def _begin(keyframe: Keyframe, line: Any) -> Part:
    snapshot = check.snapshot(line[4] if len(line) == 5 else None)
    if (snapshot["seq"], snapshot["step"]) != (keyframe.seq, keyframe.step):
        raise ValueError(f"its keyframe at record {keyframe.seq:,} has the state at record {snapshot['seq']:,}")
    return Part(keyframe, snapshot)


def _timeless(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Without its times, which are rounded in the file."""
    requests = {
        id: {name: value for name, value in request.items() if name not in ("submitted", "admitted")}
        for id, request in snapshot["requests"].items()
    }
    return {**snapshot, "t": 0.0, "requests": requests}


def _records(part: Part, line: Any) -> Iterator[Record]:
    if len(line) != 3 or type(line[2]) is not list:
        raise ValueError("it is no line of records: a number and a list are missing")
    _, seq, rows = line
    follows = part.keyframe.seq + 1 + len(part.records)
    if type(seq) is not int or seq != follows:
        raise ValueError(f"its records do not follow: the next has number {follows:,}")
    for i, row in enumerate(rows):
        yield check.record(seq + i, row)
