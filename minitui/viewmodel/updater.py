"""Moves records from the source into the View: drains them once per frame, folds them in short slices of time.

Queued records stay packed as bytes and are unpacked just before folding: records unpacked on arrival would be
cache-cold after a long wait. A backlog is folded between frames, in slices short enough for the event loop to handle
keys. A key ends the slice, and until its effect is drawn, folding, frames and panels wait: without this, each of the
event loop's turns from the key to its effect waited for a slice, a frame or a panel. On two busy cores, with 900 steps
(50,000 records) per second, 44,000 blocks and 250 requests, the picture is at most 0.2 s behind the engine, and the
effect of a key is on the screen after 15 ms (95 %: within 34 ms).

While the picture is frozen, the engine continues, and its records queue up here. Does not import Textual.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.trace.records import Packet
from minitui.sources.base import Source
from minitui.viewmodel.explain.cost_models import Fitted, first_model

if TYPE_CHECKING:
    from minitui.viewmodel.view import View

SLICE_S = 0.004  # length of a slice of folding
SLICES_COLLECTED = 8  # slices whose objects the garbage collector visits once more
KEY_POLL_S = 0.002  # while folding waits for a key, it tries again after this time
AFTER_KEY_S = 0.050  # no folding and no frame for this time after a key press, so that its effect is drawn first
AFTER_EFFECT_S = 0.020  # the same after the screen was drawn: a key may change it in two pictures
LONGEST_DELAY_S = 0.1  # keys that follow each other delay folding, a frame or the panels by this time at most
RETRY_S = 0.5  # pause before a snapshot is asked for again
MAX_BACKLOG = 400_000  # if more records are queued, all are dropped and a snapshot replaces them


class Updater:
    """Folds the records of a source into a view."""

    def __init__(self, source: Source, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self.view = view
        self.live = False  # True: the view holds a snapshot
        self._clock = clock
        self._queue: deque[Packet] = deque()
        self.backlog = 0  # number of records drained but not folded yet
        self._newest = -1  # the last step in any drained record
        self._syncing = False
        self._retry_at = math.inf  # when a snapshot is asked for again after an error
        self._next_slice: asyncio.TimerHandle | None = None
        self._key_at, self._key_handled = -math.inf, False  # time of the last key press; the application has the key
        self._put_off: dict[str, float] = {}  # work that waits for a key -> when it was put off first
        self._slices = 0  # slices so far
        self._first: Fitted | None = None  # of the recording that is played; a jump does not fit the model again

    @property
    def frozen(self) -> bool:
        """True if the user froze the picture."""
        return self.view.moment.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.view.moment.frozen = frozen

    @property
    def dropped(self) -> int:
        """Number of records never folded: lost on the way, or dropped because the backlog was too long."""
        return self.view.history.dropped

    @property
    def steps_behind(self) -> int:
        """The number of steps by which the picture is behind the engine."""
        return max(0, self._newest - self.view.history.live.state.step)

    def pump(self) -> bool:
        """Drain the source and fold for one slice. Returns True if the caller must await `sync` for a snapshot."""
        for packet in self.source.drain_packets():
            self._queue.append(packet)
            self.backlog += len(packet)
            self._newest = max(self._newest, packet.step)
        if not self.live:
            return self._clock() >= self._retry_at and self.source.error is None and not self._syncing
        if self.backlog > MAX_BACKLOG:
            self._drop()  # the view then finds a gap, and a snapshot closes it
        if self.frozen:
            return False
        self._fold()
        return self.view.history.gap and not self._syncing

    def keep_up(self) -> None:
        """Fold the rest of the backlog between frames. Between two slices, the event loop does what is due."""
        if self._queue and self._next_slice is None:
            pause = KEY_POLL_S if "fold" in self._put_off else 0.0
            self._next_slice = asyncio.get_running_loop().call_later(pause, self._continue)

    def note_key(self) -> None:
        """Note that a key was pressed: its effect is drawn first. Any thread may call this: the thread that reads the
        terminal calls it before the event loop has the key, because the loop may be busy with slices and panels."""
        self._key_at, self._key_handled = self._clock(), False

    def note_handled(self) -> None:
        """Note that the application has the key now, and passes it on."""
        self._key_at, self._key_handled = self._clock(), True

    def note_drawn(self) -> None:
        """Note that the screen was drawn: after a key was handled, work need not wait much longer."""
        if self._key_handled:
            self._key_at = min(self._key_at, self._clock() - AFTER_KEY_S + AFTER_EFFECT_S)

    def key_waits(self, work: str) -> bool:
        """True just after a key press: this work then waits, but keys that follow each other do not put it off for
        longer than LONGEST_DELAY_S. False: the caller does the work now."""
        now = self._clock()
        if now - self._key_at < AFTER_KEY_S and now - self._put_off.setdefault(work, now) < LONGEST_DELAY_S:
            return True
        self._put_off.pop(work, None)
        return False

    def _continue(self) -> None:
        self._next_slice = None
        if self.live and not self.frozen and not self.view.history.gap:
            if not self.key_waits("fold"):
                self._fold()
            self.keep_up()

    def _fold(self) -> None:
        """Fold for one slice of time, or until a key is pressed.

        Garbage is collected after each slice, not within: there the collector would visit all records of the packet,
        which are freed after it. With a thousand requests per second, a collection then takes 0.4 ms, or 1.2 ms if it
        includes the objects of the last slices. By themselves, they took up to 5 and 22 ms, and twice as much in all.
        """
        began = self._clock()
        gc.disable()
        try:
            while self._queue:
                packet = self._queue.popleft()
                self.backlog -= len(packet)
                self.view.fold(packet.records(), self._clock(), packet.data)
                if self._key_at > began or self._clock() >= began + SLICE_S:
                    break
        finally:
            gc.enable()
        self._slices += 1
        gc.collect(1 if self._slices % SLICES_COLLECTED == 0 else 0)

    def _drop(self) -> None:
        self._queue.clear()
        self.backlog = 0

    async def sync(self) -> None:
        """Reset the view with a new snapshot: at the start, after a gap and after a restart of the engine. Later
        records continue from this snapshot."""
        self._syncing, self._retry_at = True, math.inf
        try:
            self.view.reset(await self.source.snapshot())
            if (recorded := self.source.recorded()) is not None:
                self._first = self._first or first_model(*recorded)
                self.view.models.look_ahead(self._first)
            self.view.history.caching = self.source.info.prefix_caching is not False
            self.live = True
        except EngineError:
            self.live = False  # a dead engine is restarted, which calls sync; a server that restarts is asked again
            self._retry_at = self._clock() + RETRY_S
        finally:
            self._syncing = False

    def restart(self) -> None:
        """Clear everything for a new engine."""
        self.forget()
        self.live, self._retry_at, self._first = False, math.inf, None
        self.view.history.origin = 0.0  # a recording of the new engine begins another file

    def forget(self) -> None:
        """Drop the backlog. Records still in the source are kept."""
        self._drop()
        self._newest = -1

    def replaced(self) -> None:
        """Drop everything from the previous engine; call before `sync` with a new engine."""
        self.source.drain_packets()
        self.restart()
