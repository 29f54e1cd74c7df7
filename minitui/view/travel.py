"""Going back: the records of the last while, and copies of the board from which they can be folded again.

The span is bounded by RECORDS_KEPT. A board of the past is exact: it is the nearest copy before the moment, and the
records from there on. Records are kept as bytes (about 70 each), so that no garbage collection has to look at them.
"""

from __future__ import annotations

import marshal
from collections import deque

from engine.records import Record
from minitui.view.board import Board

RECORDS_KEPT = 400_000
KEYFRAME_EVERY = 40_000  # records, and
KEYFRAME_SECONDS = 4.0  # seconds: a copy of a large board takes tens of milliseconds
STRIDE = 4_000  # records between the copies made on the way to a moment, so that the next one is near
LEAD = 400  # and one so shortly before it


class Past:
    """A ring of records with keyframes."""

    def __init__(self, kept: int = RECORDS_KEPT, every: int = KEYFRAME_EVERY) -> None:
        self.kept = kept
        self.every = every
        self._chunks: deque[tuple[int, int, bytes]] = deque()  # first and last sequence number, the records
        self._keyframes: deque[Board] = deque()
        self._on_the_way: list[Board] = []  # copies made while travelling, in order

    def begin(self, board: Board) -> None:
        """Forget everything: history starts with this board."""
        self._chunks.clear()
        self._keyframes = deque([board.copy()])
        self._on_the_way.clear()

    def keep(self, records: list[Record], board: Board, packed: bytes | None = None) -> None:
        """Remember records that have just been folded into `board`, as the bytes they came in if those are told."""
        self._chunks.append((records[0][0], records[-1][0], packed or marshal.dumps(records)))
        newest = self._keyframes[-1].state
        if board.state.seq - newest.seq >= self.every and board.state.t - newest.t >= KEYFRAME_SECONDS:
            self._keyframes.append(board.copy())
        while len(self._keyframes) > 1 and board.state.seq - self._keyframes[1].state.seq > self.kept:
            self._keyframes.popleft()
            while self._chunks and self._chunks[0][1] <= self._keyframes[0].state.seq:
                self._chunks.popleft()

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
        for first, last, chunk in self._chunks:
            if last <= board.state.seq:
                continue
            if first > seq:
                break
            board.fold(record for record in marshal.loads(chunk) if board.state.seq < record[0] <= seq)
            left = seq - board.state.seq
            if left and (board.state.seq - copied_at >= STRIDE or (left <= LEAD and not near)):
                copied_at, near = board.state.seq, left <= LEAD
                self._on_the_way.append(board.copy())
        del self._on_the_way[:-16]
        return board
