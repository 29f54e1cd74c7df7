"""Sends the messages of the engine process, in order, from a thread of its own.

If the client reads too slowly, records are dropped, which leaves a gap in their sequence numbers. Text is never
dropped, and steps are never delayed.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

from engine.trace.records import Record, packets

logger = logging.getLogger("engine")

FEW = 12  # up to this many records are pickled as they are; the client packs them
MAX_UNSENT_RECORDS = 100_000
EXIT_GRACE_S = 2.0  # time for this thread or the main thread to end before the process exits

Message = tuple[Any, ...]  # a message to the client: its kind, then its contents


class Writer:
    """Sends messages in order, from its own thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sending = False
        self._unsent_records = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """True if all messages are sent: the next one is sent at once."""
        return not self._sending and self._queue.empty()

    def send(self, *message: Any) -> None:
        self._queue.put(message)

    def send_beat(self, *beat: Any) -> None:
        """Send a heartbeat, but only if no message waits: while the client does not read, heartbeats must not pile
        up."""
        if self._queue.empty():
            self._queue.put(beat)

    def send_news(self, deltas: list[tuple[Any, ...]], records: list[Record]) -> None:
        """Send packed deltas, and also records unless too many records are unsent."""
        with self._lock:
            if self._unsent_records + len(records) > MAX_UNSENT_RECORDS:
                records = []
            self._unsent_records += len(records)
        if deltas or records:
            self._queue.put(("news", deltas, records))

    def close(self) -> None:
        """Send the queued messages, then stop."""
        self._queue.put(None)
        self._thread.join(timeout=EXIT_GRACE_S)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self._sending = True
            with contextlib.suppress(OSError):  # the client has ended: the reader thread ends this process
                self._connection.send_bytes(_packed(message))
            if message[0] == "news":
                with self._lock:
                    self._unsent_records -= len(message[2])
            self._sending = False


def _packed(message: Message) -> bytes:
    """Returns a message as bytes. If packing fails, returns the news without records, or a message with the error."""
    try:
        return on_the_wire(message)
    except Exception as error:
        logger.exception("a message could not be packed")
        if message[0] == "news":
            return on_the_wire(("news", message[1], []))
        sentence = f"the engine's answer could not be sent ({type(error).__name__}: {error})"
        return on_the_wire(("answer", message[1], False, sentence) if message[0] == "answer" else ("failed", sentence))


def on_the_wire(message: Message) -> bytes:
    """Returns a message as bytes. Many records are sent as packets, which the client keeps packed. For a few records,
    pickling is faster."""
    if message[0] == "news" and len(message[2]) > FEW:
        message = ("packed", message[1], packets(message[2]))
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
