"""Recording: what writes a trace (its format stands in minitui/trace/reader.py), from any Source or by hand."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.trace.records import CLEARED, Record
from engine.trace.state import State
from minitui.trace.lines import LONGEST_LINE, MOST_VALUES
from minitui.trace.reader import GZIP, VERSION, PlayClock, TraceError

if TYPE_CHECKING:
    pass

logger = logging.getLogger("minitui")
KEYFRAME_EVERY = 12_000  # records
MOST_IDS = MOST_VALUES // 4  # token ids between two keyframes: a reader refuses a part of too many values
BATCH = 512  # records in a line
FLUSH_S = 1.0  # a killed writer loses at most this much
LEVEL = 2  # of compression: a third of the time of the usual one, a fifth more bytes
LAST_RECORDS_S = 2.0  # for the engine to send its last records when a recording ends
MAX_WAITING = 4000  # items that wait to be written
PRIVATE = ("model_dir", "log_file")  # paths of the machine that recorded: they mean nothing elsewhere
Decode = Callable[[int], bytes]


class Recorder:
    """Writes a trace. `begin` with the engine's info and a snapshot, `feed` records as they come, `close`.

    Records at or before the snapshot's number are skipped. After a gap nothing is written until `begin` or `resume`
    brings another snapshot. `decode` tells a token's bytes; None leaves the texts out. What feeds only folds: a thread
    of its own makes lines, compresses and writes. What goes wrong there is raised by the next call, as a TraceError.
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
        self._until_keyframe = keyframe_every
        self._ids_since_keyframe = 0
        self._played = 0.0
        self._known: set[int] = set()
        self._unknown: set[int] = set()
        self._told: set[str] = set()  # moments that have their bookmark
        self._flushed = 0.0
        self._writer = _Writer(self.path)

    def begin(self, info: dict[str, Any], snapshot: dict[str, Any], t: float = 0.0) -> None:
        """Write the header and the first keyframe. `t`: the engine's clock at the snapshot, 0 if not known."""
        header = {
            "minitui_trace": VERSION,
            "info": {name: value for name, value in info.items() if name not in PRIVATE},
            "recorded": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "random_text": bool(info.get("dummy_weights") or info.get("random_text")),
        }
        self._writer.put(json.dumps(header, default=str))
        self.resume(snapshot, t)

    def resume(self, snapshot: dict[str, Any], t: float = 0.0) -> None:
        """Go on from a snapshot, after a gap."""
        self._played = self._clock.now if self._clock is not None else 0.0
        self._state = State.from_snapshot(snapshot)
        self._state.t = t = t or self._state.t
        self._clock = PlayClock(t, self._played, self._state) if t else None
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
            if record[2] in _NOTICED:
                self._notice(record)
            state.apply(record)
            batch.append(record)
            if len(batch) == BATCH:
                self._put_records(batch)
                batch = []
            due = self._since_keyframe + len(batch) >= self._until_keyframe
            if due or self._ids_since_keyframe >= MOST_IDS:
                self._put_records(batch)
                batch = []
                self._keyframe()
        self._put_records(batch)
        if time.monotonic() - self._flushed > FLUSH_S:
            self._put_words()
            self._writer.put(_FLUSH)
            self._flushed = time.monotonic()

    def name(self, names: dict[str, str]) -> None:
        """Tell what chats are called."""
        if names and self._state is not None:
            self._writer.put(json.dumps(["n", names]))

    def bookmark(self, text: str, step: int | None = None) -> None:
        """Mark a step, the last one if it is not named."""
        if self._state is not None:
            self._writer.put(json.dumps(["b", self._state.step if step is None else step, text]))

    def close(self) -> None:
        """Write the end, and return when everything is in the file. Idempotent."""
        if self._state is not None and not self._writer.closed:
            self._put_words()
            self._writer.put(json.dumps(["e", {"records": self.records, "steps": self.steps}]))
        self._writer.close()

    def _notice(self, record: Record) -> None:
        """Count, collect tokens to spell, and bookmark the first of each kind of moment."""
        kind = record[2]
        if kind == "step":
            self.steps += 1
        elif kind in ("insert", "extend"):
            ids = record[6 if kind == "insert" else 5]
            self._unknown.update(ids)
            self._ids_since_keyframe += len(ids)
        elif kind == "evict" and record[5] != CLEARED:
            self._first("eviction", f"first eviction: {_blocks(record[4])} out of the tree")
        elif kind == "preempt":
            self._first("preemption", f"first preemption: r{record[3]} gives back {_blocks(record[5])}")
        elif kind == "match" and record[4] > 0:
            self._first("hit", f"first hit: r{record[3]} takes {record[4]} tokens from the tree")
        elif kind == "fail":
            self._first("failure", f"step {record[3]} failed")

    def _first(self, moment: str, text: str) -> None:
        assert self._state is not None
        if moment not in self._told:
            self._told.add(moment)
            # What decides a step is recorded while it is planned, before its number is.
            self._writer.put(json.dumps(["b", self._state.step + 1, text]))

    def _put_records(self, batch: list[Record]) -> None:
        if batch:
            self._writer.put(batch)
            self.records += len(batch)
            self._since_keyframe += len(batch)

    def _keyframe(self) -> None:
        assert self._state is not None
        self._put_words()
        state = self._state.copy()
        played = self._clock.now if self._clock is not None else self._played
        self._writer.put((played, state))
        self._since_keyframe = self._ids_since_keyframe = 0
        # A keyframe of a large tree is as long as many records: they are as far apart as that is worth.
        self._until_keyframe = max(self._every, sum(len(node.ids) for node in state.nodes.values()) // 4)

    def _put_words(self) -> None:
        unknown, self._unknown = self._unknown - self._known, set()
        if unknown and self.decode is not None:
            self._known |= unknown
            self._writer.put((self.decode, sorted(unknown)))


def _blocks(n: int) -> str:
    return f"{n:,} block" + ("" if n == 1 else "s")


_NOTICED = frozenset({"step", "insert", "extend", "evict", "preempt", "match", "fail"})
_FLUSH, _CLOSE = object(), object()


class _Writer:
    """A thread that turns what is put into lines of the file: a line, records, (played, state), (decode, ids)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        try:
            # Not blocking: a FIFO that nobody reads is an error, and waits for nobody.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
            os.set_blocking(descriptor, True)
            self._file = os.fdopen(descriptor, "wb")
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --record") from None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._member: Any = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Have it written; raises TraceError if an earlier one could not be."""
        self._check()
        if self._queue.qsize() > MAX_WAITING:
            raise TraceError(f"{self.path} cannot be written as fast as the engine runs: the recording ends here")
        self._queue.put(item)

    def close(self) -> None:
        """Return when everything is written."""
        if self.closed:
            return
        self.closed = True
        self._queue.put(_CLOSE)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise TraceError(f"{self.path} cannot be written: {self._failure.strerror}")

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not _CLOSE:
                self._take(item)
            self._end_member()
            self._file.close()  # what was held back until now is written now, or is not
        except OSError as error:
            self._failure = error
            with contextlib.suppress(OSError):
                self._file.close()

    def _take(self, item: Any) -> None:
        if item is _FLUSH:
            if self._member is not None:
                self._file.write(self._member.flush(zlib.Z_SYNC_FLUSH))
                self._file.flush()
        elif isinstance(item, str):
            self._line(item)
        elif isinstance(item, list):
            rows = [[round(record[1], 6), *record[2:]] for record in item]
            self._line(json.dumps(["r", item[0][0], rows], separators=(",", ":")))
        elif isinstance(item[1], State):
            self._keyframe(*item)
        else:
            decode, ids = item
            self._line(json.dumps(["w", [[token, decode(token).decode("latin-1")] for token in ids]]))

    def _keyframe(self, played: float, state: State) -> None:
        """In a member of its own. Encoded node by node: nobody is held up for the length of a whole tree."""
        self._end_member()
        snapshot = {**state.snapshot(), "t": state.t}
        nodes = snapshot.pop("nodes")
        head = json.dumps(["k", state.seq, state.step, round(played, 6), snapshot], separators=(",", ":"))
        parts = [f'"{id}":{json.dumps(node, separators=(",", ":"))}' for id, node in nodes.items()]
        self._line(f'{head[:-2]},"nodes":{{{",".join(parts)}}}}}]')

    def _line(self, line: str) -> None:
        data = line.encode() + b"\n"
        if len(data) > LONGEST_LINE:
            most = f"{len(data) >> 20} MiB in a line, and readers take {LONGEST_LINE >> 20}"
            raise OSError(errno.EFBIG, f"the engine's state would be {most}; the recording ends here")
        if self._member is None:
            self._member = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        self._file.write(self._member.compress(data))

    def _end_member(self) -> None:
        if self._member is not None:
            self._file.write(self._member.flush())
            self._member = None


class Recording:
    """What an engine does, in a trace; after a restart its records begin anew and go to a file of their own
    ("run.trace", "run.2.trace", …). When the disk fails, recording stops and `error` says why; all else goes on.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the first file: TraceError at once for a path that cannot be written."""
        self.path = Path(path)
        self.error = ""
        self._starts = 0
        self._names: dict[str, str] = {}
        self._recorder: Recorder | None = Recorder(self.path)

    @property
    def waits_for_snapshot(self) -> bool:
        """There was a gap: `resume` ends it."""
        return self._recorder is not None and self._recorder.waits_for_snapshot

    def begin(self, info: dict[str, Any], snapshot: dict[str, Any], texts: bool = True) -> None:
        """An engine is up. Without `texts` only the numbers of tokens are kept."""
        self._starts += 1
        if self._starts > 1:
            self.close()
            try:
                self._recorder = Recorder(self.path.with_suffix(f".{self._starts}{self.path.suffix}"))
            except TraceError as error:
                self._failed(error)
        decode = _decoder(info) if texts else None
        if self._recorder is not None:
            self._recorder.decode = decode
            self._guard(lambda recorder: recorder.begin(info, snapshot))
            self._guard(lambda recorder: recorder.name(self._names))  # chats outlive an engine

    def feed(self, records: Iterable[Record]) -> None:
        """Write what has happened since."""
        self._guard(lambda recorder: recorder.feed(records))

    def resume(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot, after a gap."""
        self._guard(lambda recorder: recorder.resume(snapshot))

    def name(self, names: dict[str, str]) -> None:
        """Tell what chats are called; those of earlier calls keep their names."""
        news = {group: name for group, name in names.items() if self._names.get(group) != name}
        if news:
            self._names |= news
            self._guard(lambda recorder: recorder.name(news))

    def close(self) -> None:
        """Write the end. Idempotent."""
        self._guard(lambda recorder: recorder.close())
        self._recorder = None

    def _guard(self, write: Callable[[Recorder], None]) -> None:
        if self._recorder is None:
            return
        try:
            write(self._recorder)
        except TraceError as error:
            self._failed(error)
            failed, self._recorder = self._recorder, None
            with contextlib.suppress(TraceError):
                failed.close()

    def _failed(self, error: TraceError) -> None:
        self.error = str(error)
        # Not a warning: without a log, Python prints those on stderr, where the command itself says it at its end.
        logger.info("%s", error)


def _decoder(info: dict[str, Any]) -> Decode | None:
    """The bytes of a token of the engine's checkpoint; None where its tokenizer cannot be loaded."""
    if not info.get("model_dir") or info.get("dummy_weights"):
        return None
    from engine.text.tokenizer import Tokenizer

    try:
        return Tokenizer(Path(info["model_dir"])).token_bytes
    except EngineError:
        return None
