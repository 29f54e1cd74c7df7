"""Skips every second frame while the application uses too much of a core, because the engine needs the cores.

With half the frames the application uses a third less: 16 % of a core instead of 24 % (Inspect over 64 decoding
requests, 160 × 48). The difference is hardly visible. Keys echo as fast as before, because the prompt draws itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HIGH = 0.18  # share of a core above which frames are skipped
LOW = 0.08  # share of a core below which, with half the frames, all are drawn again
WINDOW_S = 1.0  # over which the share is measured


class FrameLimiter:
    """Ask `draws` once a frame. `clock` and `spent` return seconds: wall time, and processor time used so far."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.process_time
    ) -> None:
        self.skipping = False
        self._clock, self._spent = clock, spent
        self._since = (clock(), spent())
        self._odd = False

    def draws(self) -> bool:
        """Returns True if this frame is to be drawn."""
        now, spent = self._clock(), self._spent()
        began, spent_before = self._since
        if now - began >= WINDOW_S:
            share = (spent - spent_before) / (now - began)
            self.skipping = share > (LOW if self.skipping else HIGH)
            self._since = (now, spent)
        self._odd = not self._odd
        return self._odd or not self.skipping
