"""Recording: what writes a trace (its format stands in minitui/trace.py), from any Source or by hand."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDead, EngineError
from engine.records import Record
from engine.state import State
from engine.types import SamplingParams
from minitui.trace import GZIP, VERSION, PlayClock, TraceError

if TYPE_CHECKING:
    from minitui.source import Progress, Source, Stream

KEYFRAME_EVERY = 12_000  # records
BATCH = 512  # records in a line
FLUSH_S = 1.0  # a killed writer loses at most this much

Decode = Callable[[int], bytes]


class Recorder:
    """Writes a trace. `begin` with the engine's info and a snapshot, `feed` records as they come, `close`.

    Records at or before the snapshot's number are skipped. After a gap nothing is written until `begin` or `resume`
    brings another snapshot. `decode` tells a token's bytes; None leaves the texts out.
    """

    def __init__(self, path: str | Path, decode: Decode | None = None, keyframe_every: int = KEYFRAME_EVERY) -> None:
        self.path = Path(path)
        self.decode = decode
        self.records = 0
        self.steps = 0
        self.waits_for_snapshot = True
        self._every = keyframe_every
        self._state: State | None = None
        self._clock: PlayClock | None = None
        self._since_keyframe = 0
        self._played = 0.0
        self._known: set[int] = set()
        self._unknown: set[int] = set()
        self._told: set[str] = set()  # moments that have their bookmark
        self._flushed = 0.0
        self._member: Any = None
        try:
            self._file = self.path.open("wb")
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be written: {error.strerror}; name another file with --record"
            ) from None

    def begin(self, info: dict[str, Any], snapshot: dict[str, Any], t: float = 0.0) -> None:
        """Write the header and the first keyframe. `t`: the engine's clock at the snapshot, 0 if not known."""
        header = {
            "minitui_trace": VERSION,
            "info": info,
            "recorded": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "random_text": bool(info.get("dummy_weights")),
        }
        self._member = zlib.compressobj(6, zlib.DEFLATED, GZIP)
        self._write(json.dumps(header, default=str))
        self.resume(snapshot, t)

    def resume(self, snapshot: dict[str, Any], t: float = 0.0) -> None:
        """Go on from a snapshot, after a gap."""
        played = self._clock.now if self._clock is not None else 0.0
        self._state = State.from_snapshot(snapshot)
        self._state.t = t
        self._clock = PlayClock(t, played, self._state) if t else None
        self._played = played
        self._unknown.update(token for node in self._state.nodes.values() for token in node.ids)
        self.waits_for_snapshot = False
        self._keyframe()

    def feed(self, records: Iterable[Record]) -> None:
        """Write what has happened since."""
        state = self._state
        if state is None or self.waits_for_snapshot:
            return
        batch: list[Record] = []
        for record in records:
            if record[0] <= state.seq:
                continue
            if record[0] != state.seq + 1:
                self.waits_for_snapshot = True
                break
            if self._clock is None:  # the clock stands at the first record that comes
                self._clock = PlayClock(record[1], self._played, state)
            self._clock.tell(record)
            self._notice(record)
            state.apply(record)
            batch.append(record)
            if len(batch) == BATCH:
                self._write_records(batch)
                batch = []
            if self._since_keyframe + len(batch) >= self._every:
                self._write_records(batch)
                batch = []
                self._keyframe()
        self._write_records(batch)
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def name(self, names: dict[str, str]) -> None:
        """Tell what chats are called."""
        if names and self._member is not None:
            self._write(json.dumps(["n", names]))

    def bookmark(self, text: str) -> None:
        """Mark the last step."""
        if self._state is not None and self._member is not None:
            self._write(json.dumps(["b", self._state.step, text]))

    def close(self) -> None:
        """Write the end. Idempotent."""
        if self._file.closed:
            return
        if self._member is not None:
            self._write_words()
            self._write(json.dumps(["e", {"records": self.records, "steps": self.steps}]))
            self._end_member()
        self._file.close()

    def _notice(self, record: Record) -> None:
        """Count, collect tokens to spell, and bookmark the first of each kind of moment."""
        kind = record[2]
        if kind == "step":
            self.steps += 1
        elif kind == "insert":
            self._unknown.update(record[6])
        elif kind == "extend":
            self._unknown.update(record[5])
        elif kind == "evict":
            self._first("eviction", f"first eviction: {record[4]} blocks leave the tree")
        elif kind == "preempt":
            self._first("preemption", f"first preemption: r{record[3]} gives back {record[5]} blocks")
        elif kind == "match" and record[4] > 0:
            self._first("hit", f"first hit: r{record[3]} takes {record[4]} tokens from the tree")
        elif kind == "fail":
            self._first("failure", f"step {record[3]} failed")

    def _first(self, moment: str, text: str) -> None:
        assert self._state is not None
        if moment not in self._told:
            self._told.add(moment)
            # What decides a step is recorded while it is planned, before its number is.
            self._write(json.dumps(["b", self._state.step + 1, text]))

    def _write_records(self, batch: list[Record]) -> None:
        if batch:
            lines = [[round(record[1], 6), *record[2:]] for record in batch]
            self._write(json.dumps(["r", batch[0][0], lines], separators=(",", ":")))
            self.records += len(batch)
            self._since_keyframe += len(batch)

    def _keyframe(self) -> None:
        assert self._state is not None
        self._write_words()
        self._end_member()
        self._member = zlib.compressobj(6, zlib.DEFLATED, GZIP)
        state = self._state
        played = self._clock.now if self._clock is not None else self._played
        snapshot = {**state.snapshot(), "t": state.t}
        self._write(json.dumps(["k", state.seq, state.step, round(played, 6), snapshot], separators=(",", ":")))
        self._since_keyframe = 0

    def _write_words(self) -> None:
        unknown = sorted(self._unknown - self._known)
        self._unknown.clear()
        if unknown and self.decode is not None:
            self._known.update(unknown)
            self._write(json.dumps(["w", [[token, self.decode(token).decode("latin-1")] for token in unknown]]))

    def _write(self, line: str) -> None:
        self._put(self._member.compress(line.encode() + b"\n"))

    def _end_member(self) -> None:
        if self._member is not None:
            self._put(self._member.flush())
            self._member = None

    def _flush(self) -> None:
        self._write_words()
        self._put(self._member.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()
        self._flushed = time.monotonic()

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise TraceError(f"{self.path} cannot be written: {error.strerror}") from None


class RecordingSource:
    """Any Source, with everything that passes through it written to a trace.

    When the disk fails, recording stops and `recording_error` says why; the source goes on. When the engine is started
    again its records begin anew, and go to a file of their own ("run.mtr", "run.2.mtr", …).
    """

    def __init__(self, source: Source, path: str | Path) -> None:
        self.source = source
        self.path = Path(path)
        self.recording_error = ""
        self._starts = 0
        self._recorder: Recorder | None = Recorder(self.path)  # now: a path that cannot be written is told at once

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    @property
    def info(self) -> dict[str, Any]:
        return self.source.info

    @property
    def error(self) -> str | None:
        return self.source.error

    async def start(self, on_progress: Progress) -> None:
        await self.source.start(on_progress)
        await self._begin()

    async def restart(self, on_progress: Progress) -> None:
        await self.source.restart(on_progress)
        await self._begin()

    async def reconfigure(self, config: Any) -> None:
        """See LiveSource.reconfigure; the other engine is recorded in a file of its own."""
        self.drain_records()
        await self.source.reconfigure(config)  # type: ignore[attr-defined]
        await self._begin()

    async def _begin(self) -> None:
        self._starts += 1
        if self._starts > 1:
            self._close()
            self._recorder = Recorder(self.path.with_suffix(f".{self._starts}{self.path.suffix}"))
        snapshot = await self.source.snapshot()
        decode = _decoder(self.source.info)
        if self._recorder is not None:
            self._recorder.decode = decode
            self._guard(lambda recorder: recorder.begin(self.source.info, snapshot))

    def _guard(self, write: Callable[[Recorder], None]) -> None:
        if self._recorder is None:
            return
        try:
            write(self._recorder)
        except TraceError as error:
            self.recording_error = str(error)
            self._recorder = None

    async def ready(self) -> None:
        await self.source.ready()

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        return self.source.submit(ids, params, group)

    async def control(self, verb: str, **arguments: Any) -> Any:
        return await self.source.control(verb, **arguments)

    async def snapshot(self) -> dict[str, Any]:
        snapshot = await self.source.snapshot()
        if self._recorder is not None and self._recorder.waits_for_snapshot:
            self._guard(lambda recorder: recorder.resume(snapshot))
        return snapshot

    def drain_records(self) -> list[Record]:
        records = self.source.drain_records()
        self._guard(lambda recorder: recorder.feed(records))
        return records

    def name_groups(self, names: dict[str, str]) -> None:
        """Tell the trace what chats are called."""
        self._guard(lambda recorder: recorder.name(names))

    def on_death(self, callback: Callable[[str], None]) -> None:
        self.source.on_death(callback)

    async def close(self) -> None:
        with contextlib.suppress(EngineDead):  # what came before its death is recorded all the same
            if self.source.error is None and self.source.info:
                await self.source.snapshot()  # its records have come before its answer
        self.drain_records()
        await self.source.close()
        self._close()

    def _close(self) -> None:
        self._guard(lambda recorder: recorder.close())
        self._recorder = None


def _decoder(info: dict[str, Any]) -> Decode | None:
    """The bytes of a token of the engine's checkpoint; None where its tokenizer cannot be loaded."""
    if not info.get("model_dir") or info.get("dummy_weights"):
        return None
    from engine.tokenizer import Tokenizer

    try:
        return Tokenizer(Path(info["model_dir"])).token_bytes
    except EngineError:
        return None
