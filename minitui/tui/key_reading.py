"""How keys are read and passed on: each key is noted when it is read, and takes effect before the next key is handled.

The event loop handles a key in several turns. Between two of them, it runs whatever else is due. What is noted in the
thread that reads the terminal is known to all of this work at once.

Textual passes a key from widget to widget, and each of these has its own queue. A binding takes effect at the end of
this path. So of two keys in one packet, the second could be handled before the binding of the first: tab and enter sent
the text as it was before the completion. KeyOrder lets a key wait until the key before it has reached the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from textual import events
from textual._xterm_parser import XTermParser
from textual.driver import Driver
from textual.message import Message
from textual.message_pump import MessagePump

ESC = "\x1b"
ROUNDS = 2  # a key may post a message, which takes the same path: the second round comes after this message
LOST_S = 0.1  # a key whose path has ended (its screen was closed) delays the next keys by this time at most
_key_events = XTermParser._sequence_to_key_events


class KeyDone(Message):
    """Follows a key on its path, from the widget with the focus up to the application."""

    def __init__(self, target: MessagePump, rounds: int = ROUNDS) -> None:
        super().__init__()
        self.target, self.rounds = target, rounds


class KeyOrder:
    """Tells when the next key can be handled."""

    def __init__(self) -> None:
        self.waiting: deque[events.Event] = deque()  # keys and pasted texts
        self.open: KeyDone | None = None  # follows the key that is being handled
        self.number = 0  # of this key
        self.limited = 0  # the last key for which others wait LOST_S at most

    @property
    def pending(self) -> bool:
        """True until the key has taken effect, or its widget is gone."""
        return self.open is not None and self.open.target.is_attached

    def follow(self, target: MessagePump) -> None:
        """Begin to follow a key that was passed to `target`."""
        self.number += 1
        self._send(KeyDone(target))

    def came(self, done: KeyDone) -> None:
        """Note that `done` has reached the application. If `open` is then None, the next key can be handled."""
        if done is self.open:
            self.open = None
            if done.rounds > 1:
                self._send(KeyDone(done.target, done.rounds - 1))

    def _send(self, done: KeyDone) -> None:
        self.open = done if done.target.post_message(done) else None


def escape_and_keys() -> None:
    """Let Textual read an escape and a letter or digit in one packet as two keys, not as "alt+r" or "™"."""
    XTermParser._sequence_to_key_events = _escape_and_key  # type: ignore[method-assign]


def _escape_and_key(self: XTermParser, sequence: str, alt: bool = False) -> Iterable[events.Key]:
    if len(sequence) == 2 and sequence[0] == ESC and sequence[1].isdigit():
        alt, sequence = True, sequence[1]
    if alt and sequence not in "[O":  # these begin the sequences of other keys
        yield events.Key("escape", ESC)
        alt = False
    yield from _key_events(self, sequence, alt)


def noting_keys(driver: type[Driver], note: Callable[[], None]) -> type[Driver]:
    """Returns a driver that calls `note` for each key, in the thread that reads the terminal."""

    class NotingKeys(driver):  # type: ignore[valid-type, misc]
        def send_message(self, message: Message) -> None:
            if isinstance(message, events.Key):
                note()
            super().send_message(message)

    return NotingKeys
