"""The record log: every change of scheduler, allocator, prefix tree and queue, in order, with its reason.

A record is a tuple `(seq, t, kind, *fields)`. `seq` increases by one with each record, `t` is in seconds since the
log began, and `kind` is a class in engine/trace/kinds.py, which names the fields. Records are plain tuples because
these are made in under a microsecond. One `step` record describes all decodes of a step: it lists the requests that
joined and left the decoding set (`joined`, `left`). Each step advances every member of the set by one token.

A snapshot has the sequence number of the last record that it includes. A snapshot and the records after it give the
exact state (engine/trace/state.py). Timings are separate records that name their step, because GPU times arrive later.

Between processes and in queues, records are packed into bytes. With a full pool, a thousand steps per second write
54,000 records per second. Unpacked on arrival, they would be cache-cold when they are applied to a state, and every
garbage collection would visit them.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.trace.kind import Record, kind_of, named, seq_of

PACKET = 512  # the most records in a packet: applying them delays the handling of key presses by a few milliseconds

CLEARED = "cleared"  # reason of an eviction that a user requested


class Packet(NamedTuple):
    """Consecutive records without a gap, as bytes."""

    first: int  # sequence number of the first record
    last: int  # sequence number of the last record
    step: int  # the last step that these records plan; -1: none
    data: bytes  # marshal is twice as fast as pickle; only our own processes exchange packets

    def __len__(self) -> int:
        return self.last - self.first + 1

    def records(self) -> list[Record]:
        return marshal.loads(self.data)


def packets(records: list[Record]) -> list[Packet]:
    """Returns the records in packets; a packet never spans a gap."""
    packed: list[Packet] = []
    for start in range(0, len(records), PACKET):
        batch = records[start : start + PACKET] if len(records) > PACKET else records
        first, last = seq_of(batch[0]), seq_of(batch[-1])
        if last - first + 1 != len(batch):
            cut = next(i for i, record in enumerate(batch) if seq_of(record) != first + i)
            packed += packets(batch[:cut]) + packets(batch[cut:])
            continue
        step = next((named(record).step for record in reversed(batch) if kind_of(record) == "step"), -1)
        packed.append(Packet(first, last, step, marshal.dumps(batch)))
    return packed


class RecordLog:
    """Collects records until they are drained. It has only one reader. A drain returns at most the last `limit`
    records. The reader sees dropped records as a gap in `seq`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, limit: int = 50_000) -> None:
        self.seq = 0  # sequence number of the last record
        self.t = 0.0  # time of the last record
        self.held = 0.0  # seconds in which there was work, but the gate or slow motion delayed it
        self._clock = clock
        self._origin = clock()
        self._records: list[Record] = []
        self.watch: Callable[[Record], None] | None = None  # called with each record, even if not `enabled`
        self._limit = limit
        self.enabled = True  # False: records are counted but not collected

    def now(self) -> float:
        return self._clock() - self._origin

    def worked(self) -> float:
        """Returns the seconds since the log began minus `held`. Durations of work are measured with this clock."""
        return self.now() - self.held

    def append(self, kind: str, *fields: Any) -> int:
        """Add a record and return its sequence number, which is also the tree's clock."""
        self.seq = seq = self.seq + 1
        self.t = t = int((self._clock() - self._origin) * 1e6) / 1e6  # whole microseconds: short in JSON, and exact
        if self.enabled:
            self._records.append((seq, t, kind, *fields))
        if self.watch is not None:
            self.watch((seq, t, kind, *fields))
        return seq

    def drain(self) -> list[Record]:
        """Returns all records since the last drain, oldest first; at most `limit`."""
        records, self._records = self._records, []
        return records[-self._limit :]

    def trim(self) -> None:
        """Drop the oldest records beyond the limit. Call this once per step if nothing drains the log."""
        if len(self._records) > 2 * self._limit:
            del self._records[: -self._limit]

