"""Recording: writes traces. minitui/trace/reader.py describes the format. A thread of its own writes the file: the
engine does not wait for compression or for the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import queue
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from engine.errors import EngineError
from engine.info import EngineInfo
from engine.trace.kind import Reader, Record, seq_of
from engine.trace.records import CLEARED
from engine.trace.state import State
from minitui.text import count
from minitui.trace.lines import GZIP, LONGEST_LINE, MOST_VALUES, TraceError, snapshot_json
from minitui.trace.play_clock import PlayClock
from minitui.trace.reader import VERSION

LEVEL = 2  # zlib's level: a third of the default level's time, but a fifth more bytes
MAX_WAITING = 4000  # the most items queued for the writer thread
FLUSH, _CLOSE = object(), object()


class TraceWriter:
    """A thread that writes queued items: a line, a list of records, (played, state), or (decode, ids). FLUSH writes
    what is queued to the file, so that it survives if the process is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        try:
            self._file = _open_locked(path)
        except BlockingIOError:
            raise TraceError(f"{path} is being written by another recording; name another file with --record") from None
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --record") from None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._member: Any = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue an item. Raises TraceError if an earlier item could not be written."""
        self._check()
        if self._queue.qsize() > MAX_WAITING:
            raise TraceError(f"{self.path} cannot be written as fast as the engine runs: the recording ends here")
        self._queue.put(item)

    def close(self) -> None:
        """Write everything and close the file."""
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
            self._file.close()  # writes the buffered rest, which may fail
        except OSError as error:
            self._failure = error
            with contextlib.suppress(OSError):
                self._file.close()

    def _take(self, item: Any) -> None:
        if item is FLUSH:
            if self._member is not None:
                self._file.write(self._member.flush(zlib.Z_SYNC_FLUSH))
                self._file.flush()
        elif isinstance(item, str):
            self._line(item)
        elif isinstance(item, list):
            rows = [[round(t, 6), *rest] for _seq, t, *rest in item]
            self._line(json.dumps(["r", seq_of(item[0]), rows], separators=(",", ":")))
        elif isinstance(item[1], State):
            self._keyframe(*item)
        else:
            decode, ids = item
            self._line(json.dumps(["w", [[token, decode(token).decode("latin-1")] for token in ids]]))

    def _keyframe(self, played: float, state: State) -> None:
        """Start a new gzip member with a keyframe."""
        self._end_member()
        snapshot = "".join(snapshot_json(state.snapshot()))  # piece by piece, so that other threads can run
        self._line(f'["k",{state.seq},{state.step},{round(played, 6)},{snapshot}]')

    def _line(self, line: str) -> None:
        data = line.encode() + b"\n"
        if len(data) > LONGEST_LINE:
            sizes = f"a line of {len(data) >> 20} MiB; readers accept {LONGEST_LINE >> 20} MiB"
            raise OSError(errno.EFBIG, f"the engine's state needs {sizes}; the recording ends here")
        if self._member is None:
            self._member = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        self._file.write(self._member.compress(data))

    def _end_member(self) -> None:
        if self._member is not None:
            self._file.write(self._member.flush())
            self._member = None


def _open_locked(path: Path) -> BinaryIO:
    """Returns an empty file. Raises BlockingIOError if another recording writes it, or OSError."""
    # Without O_NONBLOCK, `open` of a FIFO would wait for a reader.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        os.set_blocking(descriptor, True)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise  # else: this file system has no locks
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "wb")


logger = logging.getLogger("minitui")
KEYFRAME_EVERY = 12_000  # records
MOST_IDS = MOST_VALUES // 4  # the most token ids between two keyframes: readers limit the values in a part
BATCH = 512  # records in a line
FLUSH_S = 1.0  # seconds between two flushes: if the process is killed, at most this much of the end is lost
LAST_RECORDS_S = 2.0  # longest wait for the engine's last records when a recording ends
Decode = Callable[[int], bytes]
Result = TypeVar("Result")


class Recorder(Reader):
    """Writes a trace. Call `begin` with the engine's info and a snapshot, `feed` with the records, and then `close`.

    Records up to the snapshot are skipped. After a gap nothing is written until `begin` or `resume` gets a new
    snapshot. `decode` returns a token's bytes; without `decode`, the trace has no texts. A thread compresses and
    writes; if a write fails, the next call raises a TraceError.
    """

    def __init__(self, path: str | Path, decode: Decode | None = None, keyframe_every: int = KEYFRAME_EVERY) -> None:
        self.path = Path(path)
        self.decode = decode
        self.records = self.steps = 0
        self.waits_for_snapshot = True
        self._every = keyframe_every
        self._state: State | None = None
        self._clock: PlayClock | None = None
        self._since_keyframe = self._ids_since_keyframe = 0
        self._until_keyframe = keyframe_every  # number of records from the last keyframe to the next
        self._played = 0.0
        self._known: set[int] = set()  # token ids whose bytes are in the file
        self._unknown: set[int] = set()  # token ids whose bytes must still be written
        self._bookmarked: set[str] = set()  # kinds of event that have a bookmark
        self._flushed = 0.0
        self._writer = TraceWriter(self.path)

    def begin(self, info: EngineInfo, snapshot: dict[str, Any], t: float = 0.0) -> None:
        """Write the header and the first keyframe. `t`: the engine's clock at the snapshot, 0 if unknown."""
        header = {
            "minitui_trace": VERSION,
            "info": info.public(),
            "recorded": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "random_text": bool(info.dummy_weights or info.random_text),
        }
        self._writer.put(json.dumps(header, default=str))
        self.resume(snapshot, t)

    def resume(self, snapshot: dict[str, Any], t: float = 0.0) -> None:
        """Continue from a snapshot after a gap."""
        self._played = self._clock.now if self._clock is not None else 0.0
        self._state = State.from_snapshot(snapshot)
        self._state.t = t = t or self._state.t
        self._clock = PlayClock(t, self._played, self._state) if t else None
        self._unknown.update(token for node in self._state.nodes.values() for token in node.ids)
        self.waits_for_snapshot = False
        self._keyframe()

    def feed(self, records: Iterable[Record]) -> None:
        """Write the next records."""
        state = self._state
        if state is None or self.waits_for_snapshot:
            return
        batch: list[Record] = []
        for record in records:
            seq, t, kind, *_ = record
            if seq <= state.seq:
                continue
            if seq != state.seq + 1:
                self.waits_for_snapshot = True
                break
            if self._clock is None:  # the snapshot had no time: the clock starts at the first record
                self._clock = PlayClock(t, self._played, state)
            self._clock.advance(record)
            if (notice := self.READS.get(kind)) is not None:
                notice(self, record)
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
            self._writer.put(FLUSH)
            self._flushed = time.monotonic()

    def name(self, names: dict[str, str]) -> None:
        """Write the names of chats."""
        if names and self._state is not None:
            self._writer.put(json.dumps(["n", names]))

    def bookmark(self, text: str, step: int | None = None) -> int:
        """Write a bookmark for `step`; None: for the last step. Returns the step; -1 before the first one."""
        if self._state is None:
            return -1
        step = self._state.step if step is None else step
        self._writer.put(json.dumps(["b", step, text]))
        return step

    def close(self) -> None:
        """Write the last line. Returns when everything is in the file. A second call does nothing."""
        if self._state is not None and not self._writer.closed:
            self._put_words()
            self._writer.put(json.dumps(["e", {"records": self.records, "steps": self.steps}]))
        self._writer.close()

    # The handlers count steps, collect token ids to decode, and bookmark the first event of each kind.

    def on_step(self) -> None:
        self.steps += 1

    def on_insert(self, ids: list[int]) -> None:
        self._unknown.update(ids)
        self._ids_since_keyframe += len(ids)

    on_extend = on_store = on_insert

    def on_evict(self, blocks: int, reason: str) -> None:
        if reason != CLEARED:
            self._bookmark_first("eviction", f"first eviction: {count(blocks, 'block')}")

    def on_preempt(self, request: int, blocks: int) -> None:
        self._bookmark_first("preemption", f"first preemption: r{request} releases {count(blocks, 'block')}")

    def on_match(self, request: int, tokens: int) -> None:
        assert self._state is not None
        # What a preempted request takes again is no hit, as in all figures.
        if tokens > 0 and not self._state.requests[request].preemptions:
            self._bookmark_first("hit", f"first hit: r{request} takes {tokens} tokens from the tree")

    def on_fail(self, step: int) -> None:
        self._bookmark_first("failure", f"step {step} failed")

    def _bookmark_first(self, kind: str, text: str) -> None:
        """Write a bookmark for the first event of a kind."""
        assert self._state is not None
        if kind not in self._bookmarked:
            self._bookmarked.add(kind)
            # The event's record comes before the `step` record of its step, so `state.step` is still the previous step.
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
        # A keyframe of a large tree is as long as many records: write keyframes less often.
        self._until_keyframe = max(self._every, sum(len(node.ids) for node in state.nodes.values()) // 4)

    def _put_words(self) -> None:
        unknown, self._unknown = self._unknown - self._known, set()
        if unknown and self.decode is not None:
            self._known |= unknown
            self._writer.put((self.decode, sorted(unknown)))


class Recording:
    """Records an engine. Each restart of the engine begins a new file ("run.trace", "run.2.trace", …). If writing
    fails, the recording stops and `error` has the reason; the engine continues."""

    def __init__(self, path: str | Path) -> None:
        """Opens the first file; raises TraceError if it cannot be written."""
        self.path = Path(path)
        self.error = ""
        self._starts = 0
        self._names: dict[str, str] = {}
        self._recorder: Recorder | None = Recorder(self.path)

    @property
    def waits_for_snapshot(self) -> bool:
        """True after a gap in the records, until `resume`."""
        return self._recorder is not None and self._recorder.waits_for_snapshot

    def begin(self, info: EngineInfo, snapshot: dict[str, Any], texts: bool = True) -> None:
        """Start recording an engine. Without `texts`, tokens are recorded as ids only."""
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
            self._guard(lambda recorder: recorder.name(self._names))  # chats keep their names after a restart

    def feed(self, records: Iterable[Record]) -> None:
        """Write the next records."""
        self._guard(lambda recorder: recorder.feed(records))

    @property
    def file(self) -> Path | None:
        """The file that is being written; None after a failure, and after the end."""
        return self._recorder.path if self._recorder is not None else None

    def bookmark(self, text: str) -> int:
        """Write a bookmark for the last step; returns the step. Raises TraceError if the recording has failed."""
        step = self._guard(lambda recorder: recorder.bookmark(text))
        if self.error:
            raise TraceError(self.error)
        return -1 if step is None else step

    def resume(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot after a gap."""
        self._guard(lambda recorder: recorder.resume(snapshot))

    def name(self, names: dict[str, str]) -> None:
        """Write the names of chats that are new or have changed."""
        changed = {group: name for group, name in names.items() if self._names.get(group) != name}
        if changed:
            self._names |= changed
            self._guard(lambda recorder: recorder.name(changed))

    def close(self) -> None:
        """Write the last line and close the file. A second call does nothing."""
        self._guard(lambda recorder: recorder.close())
        self._recorder = None

    def _guard(self, write: Callable[[Recorder], Result]) -> Result | None:
        """Call `write` with the recorder, if there is one. If it fails, stop the recording."""
        if (recorder := self._recorder) is None:
            return None
        try:
            return write(recorder)
        except TraceError as error:
            self._failed(error)
            self._recorder = None
            with contextlib.suppress(TraceError):
                recorder.close()
            return None

    def _failed(self, error: TraceError) -> None:
        self.error = str(error)
        # Not a warning: without a log file, Python prints warnings on stderr, and the command prints the error anyway.
        logger.info("%s", error)


def _decoder(info: EngineInfo) -> Decode | None:
    """Returns a function from token id to bytes; None if the checkpoint's tokenizer cannot be loaded."""
    if not info.model_dir or info.dummy_weights:
        return None
    from engine.text.tokenizer import Tokenizer

    try:
        return Tokenizer(Path(info.model_dir)).token_bytes
    except EngineError:
        return None
