"""From the source's records to the one View that every panel shows: drained once a frame, folded in slices.

Records wait as packets of bytes and are unpacked just before they are folded, so that a long queue of them costs no
more than a short one. What does not fit into the slice of a frame is folded between frames, in slices after each of
which the event loop has its turn, so that keys echo while a backlog is worked off.

`python -m minitui.dev.simulator_app --measure --load large --size 200x60` on two slow cores that others used as well:
with all records unpickled on arrival and one slice a frame 363 to 453 steps a second were folded, 5 to 7 s late; so 774
to 917, and in the calmest run 916 (some 49,000 records) never more than 0.17 s late, keys seen after 32 ms (p50) and 86
ms (p95). Of the 22,000 instructions of a record unpacking takes 2,500, the state 10,300, what blocks and nodes have
done 2,600, and steps, lanes and events 6,900. What keys wait for now is the picture: 35 to 50 ms without a pause.

Freezing stops the fold, not the engine: records pile up here and are counted. Nothing of Textual is known here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.trace.records import Packet, packets
from minitui.sources.base import Source

if TYPE_CHECKING:
    from minitui.viewmodel.model import View

SLICE = 0.008  # seconds of folding at a time
REST = 0.002  # seconds between two slices, for all else
GIVE_WAY = 0.030  # seconds of such a rest after a key: what it changes is drawn first
KEEP = 400_000  # records that wait; beyond, a snapshot replaces them and they are told as dropped


class Feed:
    """Drains a source into a view."""

    def __init__(self, source: Source, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self.view = view
        self.live = False  # a snapshot has been taken
        self._clock = clock
        self._held: deque[Packet] = deque()
        self._backlog = 0  # records in them
        self._newest = -1  # the last step that any record told
        self._syncing = False
        self._goes_on: asyncio.TimerHandle | None = None

    @property
    def frozen(self) -> bool:
        """Does the picture stand, by the reader's wish?"""
        return self.view.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.view.frozen = frozen

    @property
    def backlog(self) -> int:
        """Records drained and not folded yet."""
        return self._backlog

    @property
    def dropped(self) -> int:
        """Records that were never folded: lost on the way, or given up because too many waited."""
        return self.view.dropped

    @property
    def steps_behind(self) -> int:
        """Engine steps between the picture and the engine."""
        return max(0, self._newest - self.view.live.state.step)

    def pump(self) -> bool:
        """Drain, and fold what fits into a slice of time. True when a snapshot is needed: then await `sync`."""
        for packet in self._drain():
            self._held.append(packet)
            self._backlog += len(packet)
            self._newest = max(self._newest, packet.step)
        if not self.live:
            return False
        if self._backlog > KEEP:
            self._drop()  # the view counts what it misses when it sees the gap, and a snapshot ends that
        if self.frozen:
            return False
        self._fold()
        return self.view.gap and not self._syncing

    def keep_up(self) -> None:
        """Let the event loop fold, a slice now and then, what `pump` has left over."""
        if self._held and self._goes_on is None:
            self._goes_on = asyncio.get_running_loop().call_later(REST, self._go_on)

    def give_way(self) -> None:
        """A key has been pressed: what is folded between frames waits until its echo has been drawn."""
        if self._goes_on is not None:
            self._goes_on.cancel()
            self._goes_on = asyncio.get_running_loop().call_later(GIVE_WAY, self._go_on)

    def _go_on(self) -> None:
        self._goes_on = None
        if self.live and not self.frozen and not self.view.gap:
            self._fold()
            self.keep_up()

    def _drain(self) -> list[Packet]:
        if hasattr(self.source, "drain_packets"):
            return self.source.drain_packets()
        return packets(self.source.drain_records())

    def _fold(self) -> None:
        """As much as fits into a slice."""
        end = self._clock() + SLICE
        while self._held:
            packet = self._held.popleft()
            self._backlog -= len(packet)
            self.view.fold(packet.records(), self._clock(), packet.data)
            if self._clock() >= end:
                break

    def _drop(self) -> None:
        self._held.clear()
        self._backlog = 0

    async def sync(self) -> None:
        """Start from a snapshot: at first, after a gap, and after a restart. Later records are folded on top."""
        self._syncing = True
        try:
            self.view.reset(await self.source.snapshot())
            self.view.caching = bool(self.source.info.get("prefix_caching", True))
            self.live = True
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
        self._drop()
        self._newest = -1

    def replaced(self) -> None:
        """Another engine stands in the place of the one that was: forget what that still sent. Before `sync`."""
        self._drain()
        self.restart()
