"""Time travel: recent records and keyframes (copies of the state), from which past states are rebuilt.

The history is limited to about RECORDS_KEPT records. Records older than KEPT_SECONDS are dropped earlier, but the
newest KEYFRAME_EVERY records are always kept. To rebuild a state exactly, the nearest earlier keyframe is copied, and
the later records are folded into the copy. Records are kept as bytes, which the garbage collector does not visit: about
70 bytes each.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Iterator

from engine.trace.kind import Record, seq_of
from minitui.viewmodel.state.annotated_state import AnnotatedState

RECORDS_KEPT = 400_000
KEPT_SECONDS = 600.0  # older records are dropped, except the newest KEYFRAME_EVERY records
KEYFRAME_EVERY = 40_000  # records between two keyframes
KEYFRAME_SECONDS = 4.0  # minimum time between two keyframes: copying a large state takes tens of milliseconds
STRIDE = 4_000  # records between two copies made while travelling: the next move can start from a nearby copy
LEAD = 400  # one more copy is made when at most this many records remain to the destination

Packet = tuple[int, int, bytes]  # first and last sequence number, the records


class PastStates:
    """A ring of records with keyframes. `kept`: records to keep; `every`: records between two keyframes."""

    def __init__(self, kept: int = RECORDS_KEPT, every: int = KEYFRAME_EVERY) -> None:
        self.kept = kept
        self.every = every
        self._packets: deque[Packet] = deque()
        self._keyframes: deque[AnnotatedState] = deque()
        self._stops: list[AnnotatedState] = []  # copies made while travelling, oldest first

    def begin(self, annotated: AnnotatedState) -> None:
        """Clear the history; it starts with this state."""
        self._packets.clear()
        self._keyframes = deque([annotated.copy()])
        self._stops.clear()

    def keep(self, records: list[Record], annotated: AnnotatedState, packed: bytes | None = None) -> None:
        """Store records already folded into `annotated`. `packed`: these records as marshal bytes, if known."""
        first, last = seq_of(records[0]), seq_of(records[-1])
        self._packets.append((first, last, packed or marshal.dumps(records)))
        newest = self._keyframes[-1].state
        if annotated.state.seq - newest.seq >= self.every and annotated.state.t - newest.t >= KEYFRAME_SECONDS:
            self._keyframes.append(annotated.copy())
        while len(self._keyframes) > 1:
            second = self._keyframes[1].state
            since, old = annotated.state.seq - second.seq, annotated.state.t - second.t > KEPT_SECONDS
            if not (since > self.kept or (since > self.every and old)):
                break  # the records before the second keyframe are still kept
            self._keyframes.popleft()
            seq = self._keyframes[0].state.seq
            while self._packets and self._packets[0][1] <= seq:
                self._packets.popleft()

    def __len__(self) -> int:
        """Number of records kept."""
        return sum(last - first + 1 for first, last, _ in self._packets)

    def _after(self, seq: int) -> Iterator[tuple[int, list[Record]]]:
        """Returns (number of the first record, records) of the packets that may contain records after `seq`. Any thread
        may iterate."""
        packets = list(self._packets)
        return ((first, marshal.loads(data)) for first, last, data in packets if last > seq)

    def recorded(self) -> tuple[AnnotatedState, Iterator[Record]]:
        """Returns the earliest state that is kept, and all records after it. Raises ValueError if none is kept."""
        if not self._keyframes:
            raise ValueError("the records of this run are not kept")
        first = self._keyframes[0]
        after = self._after(first.state.seq)
        return first, (record for _, records in after for record in records if seq_of(record) > first.state.seq)

    @property
    def first_seq(self) -> int:
        """The number of the earliest record after which the state can be rebuilt."""
        return self._keyframes[0].state.seq if self._keyframes else 0

    def back_to_present(self) -> None:
        """Drop the copies made while travelling."""
        self._stops.clear()

    def state_at(self, seq: int) -> AnnotatedState:
        """Returns the state just after record `seq`. Raises ValueError if the record is no longer kept."""
        if not self._keyframes or seq < self.first_seq:
            raise ValueError(f"record {seq:,} is no longer kept: the history begins at record {self.first_seq:,}")
        known = [annotated for annotated in (*self._keyframes, *self._stops) if annotated.state.seq <= seq]
        annotated = max(known, key=lambda copy: copy.state.seq).copy()
        copied_at, near = annotated.state.seq, False
        for first, records in self._after(annotated.state.seq):
            if first > seq:
                break
            annotated.fold(record for record in records if annotated.state.seq < seq_of(record) <= seq)
            left = seq - annotated.state.seq
            if left and (annotated.state.seq - copied_at >= STRIDE or (left <= LEAD and not near)):
                copied_at, near = annotated.state.seq, left <= LEAD
                self._stops.append(annotated.copy())
        del self._stops[:-16]
        return annotated
