"""Every second frame is left out while the application takes more of a core than it should.

The engine needs the cores, and on a slow machine, or one that does other things besides, twenty frames a second can
cost a quarter of one. Ten cost a third less (Inspect over 64 decoding requests, 160 × 48: 24 % of a core became 16 %),
and the eye hardly sees it. Keys echo as before: the prompt draws itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MOST = 0.18  # share of a core beyond which frames are left out
LITTLE = 0.08  # share below which, with half the frames, all are drawn again
WINDOW = 1.0  # seconds over which the share is measured


class Thrift:
    """Ask `draws` once a frame. `clock` and `spent` are seconds: of the wall, and of processor time used so far."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.process_time
    ) -> None:
        self.sparing = False
        self._clock, self._spent = clock, spent
        self._since = (clock(), spent())
        self._odd = False

    def draws(self) -> bool:
        """Is this frame drawn?"""
        now, spent = self._clock(), self._spent()
        began, before = self._since
        if now - began >= WINDOW:
            share = (spent - before) / (now - began)
            self.sparing = share > (LITTLE if self.sparing else MOST)
            self._since = (now, spent)
        self._odd = not self._odd
        return self._odd or not self.sparing
