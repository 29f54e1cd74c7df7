"""Says which frames are drawn: all, every second one while the application uses too much of a core, because the engine
needs the cores, or two a second while nothing happens, because laptops run on batteries.

With half the frames the application uses about a third less CPU time. The difference is hardly visible: every figure
is still painted at least five times a second. Typed characters appear as fast as before: the prompt draws itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HIGH = 0.13  # share of a core above which frames are skipped
LOW = 0.09  # share of a core, at half the frames, below which all frames are drawn again
WINDOW_S = 1.0  # the share is measured over this time
IDLE_S = 2.0  # after this time without records, keys and pointer, few frames are drawn
IDLE_STRIDE = 10  # frames from one drawn frame to the next then; some figures move with the time alone


class FrameLimiter:
    """Decides which frames are drawn: call `draws` once a frame. `clock` returns the wall time, `spent` the processor
    time used so far; both in seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.process_time
    ) -> None:
        self.skipping = False
        self.stride = 1  # frames from one drawn frame to the next
        self._clock, self._spent = clock, spent
        self._since = (clock(), spent())
        self._woken = clock()
        self._undrawn = 0  # frames since the last drawn one

    def wake(self) -> None:
        """Note that something happened: records, a key, the pointer."""
        self._woken = self._clock()

    def draws(self) -> bool:
        """Returns True if this frame is to be drawn."""
        now, spent = self._clock(), self._spent()
        began, spent_before = self._since
        if now - began >= WINDOW_S:
            share = (spent - spent_before) / (now - began)
            self.skipping = share > (LOW if self.skipping else HIGH)
            self._since = (now, spent)
        self.stride = IDLE_STRIDE if now - self._woken > IDLE_S else 2 if self.skipping else 1
        self._undrawn += 1
        if self._undrawn < self.stride:
            return False
        self._undrawn = 0
        return True

    def put_off(self) -> None:
        """Draw the next frame, because this frame was not drawn."""
        self._undrawn = self.stride
