"""Going back: the records of the last while, and copies of the board from which they can be folded again.

The span is bounded by RECORDS_KEPT, and by KEPT_SECONDS if the records are few, so that it reaches its size within
minutes at any speed of the engine. A board of the past is exact: it is the nearest copy before the moment, and the
records from there on. Records are kept as compressed bytes (about 30 each), which no garbage collection looks at.
"""

from __future__ import annotations

import marshal
import zlib
from collections import deque
from collections.abc import Iterator

from engine.trace.records import Record
from minitui.viewmodel.annotated_state import Board

RECORDS_KEPT = 400_000
KEPT_SECONDS = 600.0  # older records are forgotten, except the last KEYFRAME_EVERY
KEYFRAME_EVERY = 40_000  # records, and
KEYFRAME_SECONDS = 4.0  # seconds: a copy of a large board takes tens of milliseconds
SEGMENT = 1_024  # records compressed at once: about a millisecond
STRIDE = 4_000  # records between the copies made on the way to a moment, so that the next one is near
LEAD = 400  # and one so shortly before it

Chunk = tuple[int, int, bytes]  # first and last sequence number, the records


class Past:
    """A ring of records with keyframes."""

    def __init__(self, kept: int = RECORDS_KEPT, every: int = KEYFRAME_EVERY) -> None:
        self.kept = kept
        self.every = every
        self._segments: deque[Chunk] = deque()  # several packets each, compressed
        self._packets: deque[Chunk] = deque()  # the youngest, as they came
        self._keyframes: deque[Board] = deque()
        self._on_the_way: list[Board] = []  # copies made while travelling, in order

    def begin(self, board: Board) -> None:
        """Forget everything: history starts with this board."""
        self._segments.clear()
        self._packets.clear()
        self._keyframes = deque([board.copy()])
        self._on_the_way.clear()

    def keep(self, records: list[Record], board: Board, packed: bytes | None = None) -> None:
        """Remember records that have just been folded into `board`, as the bytes they came in if those are told."""
        self._packets.append((records[0][0], records[-1][0], packed or marshal.dumps(records)))
        if records[-1][0] - self._packets[0][0] >= SEGMENT:
            self._compress()
        newest = self._keyframes[-1].state
        if board.state.seq - newest.seq >= self.every and board.state.t - newest.t >= KEYFRAME_SECONDS:
            self._keyframes.append(board.copy())
        while len(self._keyframes) > 1 and self._outlived(board):
            self._keyframes.popleft()
            for chunks in (self._segments, self._packets):
                while chunks and chunks[0][1] <= self._keyframes[0].state.seq:
                    chunks.popleft()

    def _outlived(self, board: Board) -> bool:
        """May history begin with the second keyframe?"""
        second = self._keyframes[1].state
        since = board.state.seq - second.seq
        return since > self.kept or (since > self.every and board.state.t - second.t > KEPT_SECONDS)

    def _compress(self) -> None:
        data = zlib.compress(marshal.dumps([packet for _, _, packet in self._packets]), 1)
        self._segments.append((self._packets[0][0], self._packets[-1][1], data))
        self._packets.clear()

    def __len__(self) -> int:
        """How many records are kept."""
        return sum(last - first + 1 for first, last, _ in (*self._segments, *self._packets))

    def _after(self, seq: int) -> Iterator[tuple[int, list[Record]]]:
        """(number of the first, records) of the chunks that go beyond record `seq`, in order."""
        for first, last, data in self._segments:
            if last > seq:
                for packet in marshal.loads(zlib.decompress(data)):
                    yield first, marshal.loads(packet)
        for first, last, data in self._packets:
            if last > seq:
                yield first, marshal.loads(data)

    @property
    def first_seq(self) -> int:
        """The earliest sequence number that can be shown."""
        return self._keyframes[0].state.seq if self._keyframes else 0

    def arrived(self) -> None:
        """The traveller is back in the present: forget the copies made for the journey."""
        self._on_the_way.clear()

    def board_at(self, seq: int) -> Board:
        """The board as it was just after record `seq`. ValueError if that is no longer kept."""
        if not self._keyframes or seq < self.first_seq:
            raise ValueError(f"record {seq:,} is gone: the history begins at {self.first_seq:,}")
        known = [board for board in (*self._keyframes, *self._on_the_way) if board.state.seq <= seq]
        board = max(known, key=lambda one: one.state.seq).copy()
        copied_at, near = board.state.seq, False
        for first, records in self._after(board.state.seq):
            if first > seq:
                break
            board.fold(record for record in records if board.state.seq < record[0] <= seq)
            left = seq - board.state.seq
            if left and (board.state.seq - copied_at >= STRIDE or (left <= LEAD and not near)):
                copied_at, near = board.state.seq, left <= LEAD
                self._on_the_way.append(board.copy())
        del self._on_the_way[:-16]
        return board
