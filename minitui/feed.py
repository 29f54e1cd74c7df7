"""From the source's records to the one View that every panel shows: drained once a frame, folded in slices.

Freezing stops the fold, not the engine: records pile up here and are counted. Nothing of Textual is known here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.records import Record
from minitui.source import Source

if TYPE_CHECKING:
    from minitui.view import View

SLICE = 0.010  # seconds of folding a frame: a backlog is worked off over frames, and keys still echo meanwhile
LONG_SLICE = 0.030  # when the backlog has grown long: rather a slower picture than one of the past
LONG_BACKLOG = 5_000  # records
KEEP = 400_000  # records that wait; beyond, a snapshot replaces them and they are told as dropped


class Feed:
    """Drains a source into a view."""

    def __init__(self, source: Source, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self.view = view
        self.frozen = False
        self.live = False  # a snapshot has been taken
        self._clock = clock
        self._held: deque[Record] = deque()
        self._steps_held = 0
        self._syncing = False

    @property
    def backlog(self) -> int:
        """Records drained and not folded yet."""
        return len(self._held)

    @property
    def dropped(self) -> int:
        """Records that were never folded: lost on the way, or given up because too many waited."""
        return self.view.dropped

    @property
    def steps_behind(self) -> int:
        """Engine steps between the picture and the engine."""
        return self._steps_held

    def pump(self) -> bool:
        """Drain, and fold what fits into a slice of time. True when a snapshot is needed: then await `sync`."""
        drained = self.source.drain_records()
        self._held.extend(drained)
        self._steps_held += sum(1 for record in drained if record[2] == "step")
        if not self.live:
            return False
        if len(self._held) > KEEP:
            self._held.clear()  # the view counts what it misses when it sees the gap, and a snapshot ends that
        if self.frozen:
            return False
        end = self._clock() + (LONG_SLICE if len(self._held) > LONG_BACKLOG else SLICE)
        while self._held:
            batch = [self._held.popleft() for _ in range(min(512, len(self._held)))]
            self._steps_held -= sum(1 for record in batch if record[2] == "step")
            self.view.fold(batch, self._clock())
            if self._clock() >= end:
                break
        return self.view.gap and not self._syncing

    async def sync(self) -> None:
        """Start from a snapshot: at first, after a gap, and after a restart. Later records are folded on top."""
        self._syncing = True
        try:
            self.view.reset(await self.source.snapshot())
            self.view.caching = bool(self.source.info.get("prefix_caching", True))
            self.live = True
            self._steps_held = sum(1 for record in self._held if record[2] == "step")
        except EngineError:
            self.live = False  # it died meanwhile; its restart syncs again
        finally:
            self._syncing = False

    def restart(self) -> None:
        """Forget everything: another engine begins."""
        self.forget()
        self.live = False

    def forget(self) -> None:
        """Forget what has not been folded; what the source has still to say is kept, and folded on the next `sync`."""
        self._held.clear()
        self._steps_held = 0

    def replaced(self) -> None:
        """Another engine stands in the place of the one that was: forget what that still sent. Before `sync`."""
        self.source.drain_records()
        self.restart()
