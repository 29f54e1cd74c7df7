"""The records of an engine process that its client has received and nobody has read yet."""

from __future__ import annotations

import threading
from collections import deque

from engine.trace.records import Packet

MAX_RECORDS = 200_000  # if more records wait for the reader, the oldest are dropped


class UnreadRecords:
    """A queue of packets, from the thread that reads the socket to the event loop."""

    def __init__(self) -> None:
        self._packets: deque[Packet] = deque()
        self._count = 0  # records in _packets
        self._lock = threading.Lock()

    def add(self, new: list[Packet]) -> None:
        """Add packets; drop the oldest if there are too many, which leaves a gap in the sequence numbers."""
        with self._lock:
            self._packets.extend(new)
            self._count += sum(map(len, new))
            while self._count > MAX_RECORDS:
                self._count -= len(self._packets.popleft())

    def drain(self) -> list[Packet]:
        """Return all packets, and forget them."""
        with self._lock:
            drained, self._count = list(self._packets), 0
            self._packets.clear()
        return drained
