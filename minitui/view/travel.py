"""Going back: the records of the last while, and copies of the board from which they can be folded again.

The span is bounded by RECORDS_KEPT. A board of the past is exact: it is the nearest copy before the moment, and the
records from there on.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from engine.records import Record
from minitui.view.board import Board

RECORDS_KEPT = 120_000
KEYFRAME_EVERY = 12_000


class Past:
    """A ring of records with keyframes."""

    def __init__(self, kept: int = RECORDS_KEPT, every: int = KEYFRAME_EVERY) -> None:
        self.kept = kept
        self.every = every
        self._records: deque[Record] = deque()
        self._keyframes: deque[Board] = deque()
        self._walk: Board | None = None  # the board last made, to go on from

    def begin(self, board: Board) -> None:
        """Forget everything: history starts with this board."""
        self._records.clear()
        self._keyframes = deque([board.copy()])
        self._walk = None

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

    def board_at(self, seq: int) -> Board:
        """The board as it was just after record `seq`. ValueError if that is no longer kept."""
        if not self._keyframes or seq < self.first_seq:
            raise ValueError(f"record {seq:,} is gone: the history begins at {self.first_seq:,}")
        start = self._walk if self._walk is not None and self._walk.state.seq <= seq else None
        for keyframe in self._keyframes:
            if keyframe.state.seq > seq:
                break
            if start is None or keyframe.state.seq > start.state.seq:
                start = keyframe
        assert start is not None
        board = start if start is self._walk else start.copy()
        offset = board.state.seq - self._records[0][0] + 1 if self._records else 0
        count = seq - board.state.seq
        board.fold(islice(self._records, offset, offset + count))
        self._walk = board
        return board
