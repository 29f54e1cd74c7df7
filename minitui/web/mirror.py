"""One application, watched by many: what it draws is sent to every viewer, and only the presenter's keys reach it.

A viewer begins with a keyframe, the whole screen, and gets what is drawn from then on. For whoever is slow at most
MAX_UNREAD bytes are kept here; then all of it is forgotten, and when his connection has taken what it had, he begins
with another keyframe. So he sees fewer pictures, and nobody waits for him. Keyframes cost the application a full
drawing, so that there is one for all who want one, and at most two a second.

Measured on two cores that others used too, while a chat is being answered, at 20 frames a second: the process that
serves takes 4.2 % of a core and 90 MB with one viewer, 4.3 to 5.0 % and 91 MB with forty; the application 11 to 12 %
and 103 MB either way. A viewer is sent 13 to 19 KB a second; forty who take nothing of it cost 1 MB together. (Forty
tabs with `--web` alone are forty applications.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from minitui.web.process import WebProcess

MAX_UNREAD = 256 << 10  # bytes kept for a viewer; a keyframe of 120x36 has some 20,000
KEYFRAME_S = 0.5  # at least so long between two keyframes
MOUSE = b"\x1b[?1000h\x1b[?1003h\x1b[?1015h\x1b[?1006h\x1b[?2004h"
PRELUDE = b"\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor


class Viewer:
    """One who watches. `run` sends until cancelled, or until `send` raises."""

    def __init__(self, send: Callable[[bytes], Awaitable[object]], presenter: bool = False) -> None:
        self.presenter = presenter
        self.wants_keyframe = asyncio.Event()
        self.lost = 0  # times that he was too slow
        self._send = send
        self._live = False  # he has a keyframe, and everything since
        self._unread: deque[bytes] = deque()
        self._size = 0
        self._wake = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Something was drawn."""
        if not self._live:
            return
        if self._size + len(data) > MAX_UNREAD:
            self._unread.clear()
            self._size = 0
            self._live = False
            self.lost += 1
            return
        self._unread.append(data)
        self._size += len(data)
        self._wake.set()

    def begin(self, keyframe: bytes) -> None:
        """The whole screen, for a viewer who wants it."""
        if self.wants_keyframe.is_set():
            self.wants_keyframe.clear()
            self._live = True
            self.put(keyframe)

    async def run(self, wish: Callable[[], None]) -> None:
        """Send what comes. `wish` asks for a keyframe."""
        await self._send(PRELUDE + (MOUSE if self.presenter else b""))
        while True:
            while self._unread:
                data = b"".join(self._unread)
                self._unread.clear()
                self._size = 0
                await self._send(data)
            if not self._live:
                self.wants_keyframe.set()
                wish()
            self._wake.clear()
            await self._wake.wait()

    @property
    def kept(self) -> int:
        """Bytes kept for him."""
        return self._size


class Mirror:
    """Who watches. `ask` asks the application for a keyframe."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self.viewers: set[Viewer] = set()
        self._ask = ask
        self._asked = False
        self._last = float("-inf")

    async def show(self, viewer: Viewer) -> None:
        """Until cancelled, or until he has gone."""
        self.viewers.add(viewer)
        try:
            await viewer.run(self._wish)
        finally:
            self.viewers.discard(viewer)

    def _wish(self) -> None:
        if self._asked:
            return
        self._asked = True
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._last + KEYFRAME_S), self._ask)

    def drawn(self, data: bytes) -> None:
        """The application has drawn."""
        for viewer in self.viewers:
            viewer.put(data)

    def keyframe(self, data: bytes) -> None:
        """The whole screen has come."""
        self._asked, self._last = False, asyncio.get_running_loop().time()
        for viewer in self.viewers:
            viewer.begin(data)

    def copied(self, data: bytes) -> None:
        """Something for the presenter's clipboard."""
        for viewer in self.viewers:
            if viewer.presenter:
                viewer.put(data)


class Application(WebProcess):
    """The application that all of them watch."""

    driver = "minitui.web.mirror_driver:MirrorDriver"
    fps = 30

    def __init__(self, command: list[str], size: tuple[int, int]) -> None:
        """`size`: columns and rows."""
        super().__init__(command, size)
        self.mirror = Mirror(lambda: self.tell(type="keyframe"))
        self._takers = {b"D": self.mirror.drawn, b"K": self.mirror.keyframe, b"C": self.mirror.copied}

    async def take(self, kind: bytes, data: bytes) -> None:
        if kind in self._takers:
            self._takers[kind](data)
