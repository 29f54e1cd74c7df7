"""Going back: the records of the last while, and copies of the board from which they can be folded again.

The span is bounded by RECORDS_KEPT. A board of the past is exact: it is the nearest copy before the moment, and the
records from there on.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from engine.records import Record
from minitui.view.board import Board

RECORDS_KEPT = 200_000
KEYFRAME_EVERY = 40_000  # records; a copy of a large board takes tens of milliseconds
STRIDE = 4_000  # between the copies made on the way to a moment, so that the next one is near
LEAD = 400  # and one so shortly before it


class Past:
    """A ring of records with keyframes."""

    def __init__(self, kept: int = RECORDS_KEPT, every: int = KEYFRAME_EVERY) -> None:
        self.kept = kept
        self.every = every
        self._records: deque[Record] = deque()
        self._keyframes: deque[Board] = deque()
        self._on_the_way: list[Board] = []  # copies made while travelling, in order

    def begin(self, board: Board) -> None:
        """Forget everything: history starts with this board."""
        self._records.clear()
        self._keyframes = deque([board.copy()])
        self._on_the_way.clear()

    def keep(self, records: list[Record], board: Board) -> None:
        """Remember records that have just been folded into `board`."""
        self._records.extend(records)
        if board.state.seq - self._keyframes[-1].state.seq >= self.every:
            self._keyframes.append(board.copy())
        while len(self._records) > self.kept and len(self._keyframes) > 1:
            oldest = self._keyframes[1].state.seq
            while self._records and self._records[0][0] <= oldest:
                self._records.popleft()
            self._keyframes.popleft()

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
        start = max(
            (b for b in (*self._keyframes, *self._on_the_way) if b.state.seq <= seq), key=lambda b: b.state.seq
        )
        board = start.copy()
        while board.state.seq < seq:
            rest = seq - board.state.seq
            n = min(STRIDE, rest - LEAD) if rest > LEAD else rest
            offset = board.state.seq + 1 - self._records[0][0]
            board.fold(islice(self._records, offset, offset + n))
            if board.state.seq < seq:
                self._on_the_way.append(board.copy())
        del self._on_the_way[:-16]
        return board
