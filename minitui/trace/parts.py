"""The parts of a trace: each begins with a keyframe, and has the records up to the next keyframe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.trace.kind import Record, time_of
from engine.trace.state import State
from minitui.trace import check
from minitui.trace.follow import Follower
from minitui.trace.lines import LineFile, parse, wrong_line
from minitui.trace.play_clock import PlayClock


@dataclass(frozen=True, slots=True)
class Keyframe:
    """The start of a part: the state after record `seq` and step `step`, at `played` seconds of play time."""

    seq: int
    step: int
    played: float
    offset: int  # position of the keyframe's gzip member in the file
    line: int  # number of lines before that member


@dataclass(slots=True)
class Part:
    """The records between two keyframes, with the play time of each."""

    keyframe: Keyframe
    snapshot: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    values: int = 0  # number of JSON values: a measure of the memory that the part takes

    @property
    def state(self) -> State:
        """The state at the beginning of the part, as a new object."""
        return State.from_snapshot(self.snapshot)


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
                    clock: PlayClock | None = None
                elif line.startswith(b'["r"') and part is not None:
                    for record in _records(part, parse(line)):
                        follower.take(record)
                        clock = clock or PlayClock(part.snapshot["t"] or time_of(record), keyframe.played, part.state)
                        part.due.append(clock.advance(record))
                        part.records.append(record)
        except ValueError as error:
            wrong_line(file, member, lines, error)
        if part is None:
            file.fail("its keyframe is missing")
        part.values = member.values
    if following is not None and following.seq == follower.state.seq:  # else: records are missing
        _check_end(path, following, follower.state)
    return part


def _check_end(path: Path, following: Keyframe, state: State) -> None:
    """Check that a keyframe has this state."""
    with LineFile(path, following.line) as file:
        for line in next(file.members(following.offset)):
            if line.startswith(b'["k"'):
                try:
                    written = _begin(following, parse(line)).snapshot
                    same = _timeless(written) == _timeless(_older(state.snapshot(), written))
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


def _timeless(snapshot: dict[str, Any]) -> dict[str, Any]:
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
