"""Moves records from the source into the View: drained once per frame, folded in short slices of time.

Queued records stay packed as bytes and are unpacked just before folding: unpacked on arrival, a long backlog would be
cache-cold. A backlog is folded between frames, in slices that let the event loop handle keys. On two slow cores this
folds some 900 steps per second (49,000 records) at most 0.2 s late; `python -m minitui.dev.simulator_app --measure
--load large --size 200x60` measures it.

While the picture is frozen the engine continues: records queue up here. No Textual.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.trace.records import Packet
from minitui.sources.base import Source

if TYPE_CHECKING:
    from minitui.viewmodel.model import View

SLICE = 0.008  # seconds of folding at a time
REST = 0.002  # seconds between two slices, for the event loop
GIVE_WAY = 0.030  # seconds without folding after a key: its effect is drawn first
KEEP = 400_000  # queued records at most; beyond, they are dropped and a snapshot replaces them


class Updater:
    """Folds the records of a source into a view."""

    def __init__(self, source: Source, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self.view = view
        self.live = False  # the view holds a snapshot
        self._clock = clock
        self._held: deque[Packet] = deque()
        self.backlog = 0  # records drained and not folded yet
        self._newest = -1  # the last step in any record
        self._syncing = False
        self._next_slice: asyncio.TimerHandle | None = None

    @property
    def frozen(self) -> bool:
        """True if the user froze the picture."""
        return self.view.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.view.frozen = frozen

    @property
    def dropped(self) -> int:
        """Number of records never folded: lost on the way, or dropped because the backlog was too long."""
        return self.view.dropped

    @property
    def steps_behind(self) -> int:
        """Steps by which the picture is behind the engine."""
        return max(0, self._newest - self.view.live.state.step)

    def pump(self) -> bool:
        """Drain the source and fold for one slice. Returns True if a snapshot is needed: then await `sync`."""
        for packet in self.source.drain_packets():
            self._held.append(packet)
            self.backlog += len(packet)
            self._newest = max(self._newest, packet.step)
        if not self.live:
            return False
        if self.backlog > KEEP:
            self._drop()  # the view notices the gap, and a snapshot closes it
        if self.frozen:
            return False
        self._fold()
        return self.view.gap and not self._syncing

    def keep_up(self) -> None:
        """Fold the rest of the backlog between frames, slice by slice."""
        if self._held and self._next_slice is None:
            self._next_slice = asyncio.get_running_loop().call_later(REST, self._continue)

    def give_way(self) -> None:
        """Delay the next slice after a key press, until its effect has been drawn."""
        if self._next_slice is not None:
            self._next_slice.cancel()
            self._next_slice = asyncio.get_running_loop().call_later(GIVE_WAY, self._continue)

    def _continue(self) -> None:
        self._next_slice = None
        if self.live and not self.frozen and not self.view.gap:
            self._fold()
            self.keep_up()

    def _fold(self) -> None:
        """Fold for one slice of time."""
        end = self._clock() + SLICE
        while self._held:
            packet = self._held.popleft()
            self.backlog -= len(packet)
            self.view.fold(packet.records(), self._clock(), packet.data)
            if self._clock() >= end:
                break

    def _drop(self) -> None:
        self._held.clear()
        self.backlog = 0

    async def sync(self) -> None:
        """Start from a snapshot: at the beginning, after a gap, after a restart. Later records follow it."""
        self._syncing = True
        try:
            self.view.reset(await self.source.snapshot())
            self.view.caching = bool(self.source.info.get("prefix_caching", True))
            self.live = True
        except EngineError:
            self.live = False  # the engine died; its restart calls sync again
        finally:
            self._syncing = False

    def restart(self) -> None:
        """Clear everything for a new engine."""
        self.forget()
        self.live = False

    def forget(self) -> None:
        """Drop the backlog. Records still in the source are kept."""
        self._drop()
        self._newest = -1

    def replaced(self) -> None:
        """Drop everything from the previous engine; call before `sync` with a new one."""
        self.source.drain_packets()
        self.restart()
