"""Commands for the engine process, and the client's thread that sends them."""

from __future__ import annotations

import pickle
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

MAX_UNSENT = 256 << 20  # bytes


class Command(NamedTuple):
    """A client's command: submit, abort, call, start or close; or "lost", which the engine process sends to itself."""

    kind: str
    tag: int  # the client's number for the stream or the call
    arguments: tuple[Any, ...] = ()
    problem: BaseException | None = None  # why the arguments could not be read

    def packed(self) -> bytes:
        """Returns the command as bytes. Kind and tag can be read without the arguments, which are packed separately."""
        return pickle.dumps((self.kind, self.tag, pickle.dumps(self.arguments, pickle.HIGHEST_PROTOCOL)))

    @classmethod
    def read(cls, data: bytes) -> Command:
        """Returns the command in `data`, with a `problem` if its arguments are unreadable."""
        kind, tag = "unreadable", 0
        try:
            kind, tag, arguments = pickle.loads(data)
            return cls(kind, tag, tuple(pickle.loads(arguments)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return cls(kind, tag, problem=error)


class Outbox:
    """Sends byte strings in order, from its own thread, so a peer that does not read cannot block the event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent = 0  # bytes
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="engine outbox", daemon=True).start()

    def put(self, message: bytes) -> bool:
        """Queue a message without waiting. Returns False and does not queue the message if others are queued and all
        together exceed MAX_UNSENT bytes."""
        with self._lock:
            if self._unsent and self._unsent + len(message) > MAX_UNSENT:
                return False
            self._unsent += len(message)
        self._queue.put(message)
        return True

    def close(self) -> None:
        """Stop after the queued messages are sent."""
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:  # the peer has ended; the thread that reads its messages reports this
                return
            with self._lock:
                self._unsent -= len(message)
