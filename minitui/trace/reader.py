"""Traces: the records of an engine in a file, for replay, seeking and export.

A trace is gzipped lines of JSON. The first line is the header, an object; the others are arrays that begin with a
letter:

    {"minitui_trace": 1, "info": {...}, "recorded": "2026-01-31T12:00:00Z", "random_text": false}
    ["k", seq, step, played, snapshot]      a keyframe: the state after record `seq` (Engine.snapshot()), the last
                                            planned step, and the play time (play_clock.py)
    ["r", seq, [[t, kind, ...], ...]]       records from number `seq` on, without gaps; engine/trace/records.py names
                                            their fields
    ["w", [[id, "bytes"], ...]]             token ids and their bytes, written as Latin-1
    ["n", {"group": "name"}]                names of chats
    ["b", step, "text"]                     a bookmark
    ["e", {"records": n, "steps": n}]       the end of a closed recording

Every keyframe begins a new gzip member, so a reader can start at any keyframe. A file that ends in the middle of a line
(its writer was killed) is read up to the previous line. Lines with other letters are skipped.

Files are untrusted: unpacking is limited (lines.py), each line is checked, and each record must be possible in the
state before it (check.py). Every fault raises a TraceError with the line number.
"""

from __future__ import annotations

import json
import marshal
import os
import re
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.info import EngineInfo
from engine.trace.kind import Record, kind_of, named, time_of
from engine.trace.state import State
from minitui.trace import check
from minitui.trace.check import Follower
from minitui.trace.lines import GZIP, MOST_VALUES, LineFile, Member, TraceError, parse, wrong_line
from minitui.trace.play_clock import PlayClock


@dataclass(frozen=True, slots=True)
class Keyframe:
    """The start of a part: the state after record `seq` and step `step`, at `played` seconds of play time."""

    seq: int
    step: int
    played: float
    offset: int  # position of the keyframe's gzip member in the file
    line: int  # number of lines before that member


@dataclass
class Part:
    """The records between two keyframes."""

    keyframe: Keyframe
    snapshot: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    values: int = 0  # number of JSON values: a measure of the memory that the part takes

    @property
    def state(self) -> State:
        """The state at the beginning of the part, as a new object."""
        return State.from_snapshot(self.snapshot)

    @cached_property
    def due(self) -> list[float]:
        """The play time of each record."""
        begin = self.snapshot["t"] or (time_of(self.records[0]) if self.records else 0.0)
        clock = PlayClock(begin, self.keyframe.played, self.state)
        return [clock.advance(record) for record in self.records]


def read_part(path: Path, keyframe: Keyframe, following: Keyframe | None = None) -> Part:
    """Returns the part that begins at a keyframe. Raises TraceError if a line of it is wrong, if a record is impossible
    in the state before it, or if `following`, the next keyframe, is not the state after the part's records."""
    with LineFile(path, keyframe.line) as file:
        member = next(file.members(keyframe.offset))
        lines = iter(member)
        part: Part | None = None
        try:
            for line in lines:
                if line.startswith(b'["k"'):
                    part = _begin(keyframe, parse(line))
                    follower = Follower(part.state)
                elif line.startswith(b'["r"') and part is not None:
                    for record in _records(part, parse(line)):
                        follower.take(record)
                        part.records.append(record)
        except ValueError as error:
            wrong_line(file, member, lines, error)
        if part is None:
            file.fail("its keyframe is missing")
        part.values = member.values
    if following is not None and following.seq == follower.state.seq:  # else: records are missing
        _check_end(path, following, follower.state)
    return part


def _packed(path: Path, *keyframes: Keyframe) -> bytes:
    """Reads a part for another process. marshal is twice as fast as pickle."""
    part = read_part(path, *keyframes)
    return marshal.dumps((part.snapshot, part.records, part.values))


def _check_end(path: Path, following: Keyframe, state: State) -> None:
    """Check that a keyframe has this state."""
    with LineFile(path, following.line) as file:
        for line in next(file.members(following.offset)):
            if line.startswith(b'["k"'):
                try:
                    written = _begin(following, parse(line)).snapshot
                    same = timeless(written) == timeless(_older(state.snapshot(), written))
                except ValueError as error:
                    file.fail(str(error))
                if not same:
                    file.fail("its keyframe differs from the state after the records before it")
                return


def _begin(keyframe: Keyframe, line: Any) -> Part:
    snapshot = check.snapshot(line[4] if len(line) == 5 else None)
    if (snapshot["seq"], snapshot["step"]) != (keyframe.seq, keyframe.step):
        raise ValueError(f"its keyframe for record {keyframe.seq:,} has the state of record {snapshot['seq']:,}")
    return Part(keyframe, snapshot)


def timeless(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Returns the snapshot without its times: the file has rounded times."""
    requests = {
        id: {name: value for name, value in request.items() if name not in ("submitted", "admitted")}
        for id, request in snapshot["requests"].items()
    }
    return {**snapshot, "t": 0.0, "requests": requests}


def _older(snapshot: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Returns the snapshot without the fields that `written`, the file's, does not have: older versions had fewer."""
    parts = {
        kind: {
            id: {name: value for name, value in one.items() if name in written[kind].get(id, one)}
            for id, one in snapshot[kind].items()
        }
        for kind in ("requests", "nodes")
    }
    return {name: value for name, value in (snapshot | parts).items() if name in written}


def _records(part: Part, line: Any) -> Iterator[Record]:
    if len(line) != 3 or type(line[2]) is not list:
        raise ValueError("not a line of records: it must have a record number and a list")
    _, seq, rows = line
    expected = part.keyframe.seq + 1 + len(part.records)
    if type(seq) is not int or seq != expected:
        raise ValueError(f"its records leave a gap or repeat: the next record number must be {expected:,}")
    for i, row in enumerate(rows):
        yield check.record(seq + i, row)


__all__ = ["VERSION", "Keyframe", "Part", "TraceError", "TraceReader"]

VERSION = 1
MOST_PARTS = 4  # in memory
STEP_ENDS = ("time", "fail")  # the records that end a step
RANDOM = "random text, not shown"  # shown in place of random text


class TraceReader:
    """A trace, read part by part. `complete` is False if the end of the file is missing; the rest can be read."""

    def __init__(self, path: str | Path, parts_later: bool = False) -> None:
        """Scans the file once, and reads the first and the last part. Raises TraceError if the file is not a trace, or
        has an unknown version. Faults in other parts are found when these parts are read. `parts_later`: read no part
        yet, for a caller that begins with `parts`."""
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.keyframes: list[Keyframe] = []
        self.words: dict[int, bytes] = {}
        self.names: dict[str, str] = {}
        self.bookmarks: list[tuple[int, str]] = []
        self.complete = False
        self._parts: dict[int, Part] = {}
        self._scan()
        if not parts_later:
            self.part(0)
            self.part(len(self.keyframes) - 1)

    @property
    def cut_off(self) -> str:
        """A sentence for the user if the file is not complete; else an empty string."""
        return "" if self.complete else f"{self.path} is not complete: it was cut off."

    @cached_property
    def info(self) -> EngineInfo:
        """The facts about the engine at the time of the recording."""
        info, snapshot = self.header["info"], self.part(len(self.keyframes) - 1).snapshot
        return replace(
            info, num_blocks=info.num_blocks or snapshot["num_blocks"] - 1,
            block_size=info.block_size or snapshot["block_size"],
        )

    @cached_property
    def seconds(self) -> float:
        """The play time of the whole recording."""
        last = self.part(len(self.keyframes) - 1)
        return last.due[-1] if last.due else last.keyframe.played

    @cached_property
    def last_planned(self) -> int:
        """The last step planned in the recording."""
        last = self.part(len(self.keyframes) - 1)
        planned = (named(record).step for record in last.records if kind_of(record) == "step")
        return max(planned, default=last.keyframe.step)

    @cached_property
    def last_step(self) -> int:
        """The last step that ended in the recording; the step before the recording if none did."""
        for index in reversed(range(len(self.keyframes))):
            if ended := [named(record).step for record in self.part(index).records if kind_of(record) in STEP_ENDS]:
                return max(*ended, self.step_before)
        return self.step_before

    @property
    def step_before(self) -> int:
        """The last step before the recording; -1 if the recording begins at the engine's start."""
        return self.keyframes[0].step

    @property
    def first_step(self) -> int:
        """The first step of the recording; after `last_step` if it has none."""
        return self.step_before + 1

    def part(self, index: int) -> Part:
        """Returns the part that begins at keyframe `index`; keeps up to MOST_PARTS of them. Raises TraceError."""
        return self._parts.get(index) or self._keep(index, read_part(self.path, *self.keyframes[index : index + 2]))

    def _keep(self, index: int, part: Part) -> Part:
        kept = self._parts
        while kept and (len(kept) >= MOST_PARTS or sum(p.values for p in kept.values()) + part.values > MOST_VALUES):
            del kept[next(iter(kept))]
        kept[index] = part
        return part

    def parts(self, on_all_cores: bool = False) -> Iterator[tuple[Part, int | None]]:
        """Yields every part, with the number of records that are missing before it; None: it continues the part before.
        Raises TraceError. `on_all_cores`: other processes read the parts, for a caller that needs all of a long file.
        """
        n, end = len(self.keyframes), self.keyframes[0].seq
        parts = self._read_ahead() if on_all_cores and n > MOST_PARTS else map(self.part, range(n))
        for index, part in enumerate(parts):
            seq = part.keyframe.seq
            yield part, seq - end if seq != end or not index else None
            end = seq + len(part.records)

    def _read_ahead(self) -> Iterator[Part]:
        """Yields all parts; each core reads at most two parts ahead."""
        cores, last = min(8, os.cpu_count() or 1), len(self.keyframes) - 1
        with ProcessPoolExecutor(cores) as pool:
            ahead, begun = deque[Future[bytes]](), 0
            for index, keyframe in enumerate(self.keyframes):
                while begun <= min(last, index + 2 * cores):
                    ahead.append(pool.submit(_packed, self.path, *self.keyframes[begun : begun + 2]))
                    begun += 1
                part = Part(keyframe, *marshal.loads(ahead.popleft().result()))
                yield self._keep(index, part) if index in (0, last) else part  # `info` and other facts need these

    def records(self) -> Iterator[Record]:
        """Yields all records, oldest first."""
        for part, _ in self.parts():
            yield from part.records

    def check(self) -> None:
        """Read every part. Raises TraceError if a part cannot be read."""
        for _ in self.parts():
            pass

    def part_of_step(self, step: int) -> int:
        """Returns the index of the part in which this step was planned."""
        return max(0, bisect_left(self.keyframes, step, key=lambda keyframe: keyframe.step) - 1)

    def locate(self, step: int) -> tuple[int, int]:
        """Returns the point of the trace at which `step` has ended, as (index of a part, number of its records before
        the point). If the trace has no record of this end, it is the next end of a step. For the last step, the point
        is the end of the trace."""
        if step < self.last_step:
            for index in range(self.part_of_step(step), len(self.keyframes)):
                for count, record in enumerate(self.part(index).records, 1):
                    if kind_of(record) in STEP_ENDS and named(record).step >= step:
                        return index, count
        index = len(self.keyframes) - 1
        return index, len(self.part(index).records)

    def number(self, part: int, records: int) -> int:
        """Returns the number of the record before a point, which is given as by `locate`."""
        return self.keyframes[part].seq + records

    @property
    def begin_t(self) -> float:
        """The engine's time at the beginning of the recording, in seconds."""
        first = self.part(0)
        return first.snapshot["t"] or (time_of(first.records[0]) if first.records else 0.0)

    @property
    def end_t(self) -> float:
        """The time of the last record on the engine's clock, in seconds."""
        last = self.part(len(self.keyframes) - 1)
        return last.records[-1][1] if last.records else last.snapshot["t"]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; the ids as text if the trace has no texts; RANDOM if its text is random."""
        ids = list(ids)
        if self.header["random_text"]:
            return RANDOM if ids else ""
        if not self.words:
            return " ".join(map(str, ids))
        return b"".join(self.words.get(token, b"\xef\xbf\xbd") for token in ids).decode("utf-8", "replace")

    def add_bookmark(self, step: int, text: str) -> None:
        """Add a bookmark to the file."""
        if not self.complete:
            raise TraceError(f"{self.path} was cut off: the bookmark cannot be saved in it")
        line = json.dumps(["b", step, text]).encode() + b"\n"
        member = zlib.compressobj(6, zlib.DEFLATED, GZIP)
        try:
            with self.path.open("ab") as file:
                file.write(member.compress(line) + member.flush())
        except OSError as error:
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; the bookmark is not saved") from None
        self.bookmarks.append((step, text))
        self.bookmarks.sort()

    # ---- the file

    def _scan(self) -> None:
        """Read the header, the positions of keyframes, the words, names and bookmarks in one pass."""
        with LineFile(self.path) as file:
            if file.read(2) != b"\x1f\x8b":
                why = "is not a gzip file" if self.path.stat().st_size else "has no bytes"
                raise TraceError(f"{self.path} is not a minitui trace: it {why}")
            for member in file.members():
                self._scan_member(file, member)
        if not self.header or not self.keyframes:
            raise TraceError(f"{self.path} has nothing to show: it ended, or is damaged, before its first keyframe")
        self.bookmarks.sort()

    def _scan_member(self, file: LineFile, member: Member) -> None:
        lines_before, keyframe = file.line, None
        lines = iter(member)
        try:
            for line in lines:
                if not self.header:
                    self.header = self._check_header(line)
                elif line.startswith(b'["k"'):
                    if keyframe is not None:
                        raise ValueError("a second keyframe in a gzip member")
                    keyframe = self._keyframe(line, member.offset, lines_before)
                elif line[:3] in _SHORT:
                    self._take_short(check.short_line(parse(line)))
        except ValueError as error:
            wrong_line(file, member, lines, error)
        if keyframe is None:
            return
        if not member.whole:
            try:
                read_part(self.path, keyframe)
            except TraceError:
                return  # the keyframe belongs to the damaged end of the file
        self.keyframes.append(keyframe)

    def _check_header(self, line: bytes) -> dict[str, Any]:
        try:
            header = parse(line)
            version = header["minitui_trace"]
        except (ValueError, TypeError, KeyError):
            raise TraceError(f"{self.path} is not a minitui trace: its first line is not a header") from None
        if version != VERSION:
            raise TraceError(
                f"{self.path} is a trace of version {str(version)[:20]}; this minitui reads version {VERSION}: record "
                "it again, or replay it with the minitui that wrote it"
            )
        return check.header(header)

    def _keyframe(self, line: bytes, offset: int, lines_before: int) -> Keyframe:
        found = _KEYFRAME.match(line)
        if found is None:
            raise ValueError("not a keyframe: it must have a record number, a step and a play time")
        seq, step, played = int(found[1]), int(found[2]), float(found[3])
        last = self.keyframes[-1] if self.keyframes else Keyframe(0, -1, 0.0, 0, 0)
        if seq < last.seq or step < last.step or played < last.played:
            raise ValueError(f"its keyframe (record {seq:,}, step {step:,}) does not follow the keyframe before it")
        return Keyframe(seq, step, played, offset, lines_before)

    def _take_short(self, line: list[Any]) -> None:
        kind = line[0]
        if kind == "w":
            self.words.update((token, text.encode("latin-1")) for token, text in line[1])
        elif kind == "n":
            self.names.update(line[1])
        elif kind == "b":
            self.bookmarks.append((line[1], line[2]))
        elif kind == "e":
            self.complete = True


_KEYFRAME = re.compile(rb'\["k",(\d{1,16}),(-1|\d{1,9}),(\d{1,12}(?:\.\d{1,9})?|\d(?:\.\d+)?e-\d\d?),')
_SHORT = frozenset((b'["w', b'["n', b'["b', b'["e'))
