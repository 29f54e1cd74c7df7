"""A driver that tells when it has read a key.

The event loop handles a key in several turns. Between two of them, it runs whatever else is due. What is noted in the
thread that reads the terminal is known to all of this work at once.
"""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.driver import Driver
from textual.message import Message


def noting_keys(driver: type[Driver], note: Callable[[], None]) -> type[Driver]:
    """Returns a driver that calls `note` for each key, in the thread that reads the terminal."""

    class NotingKeys(driver):  # type: ignore[valid-type, misc]
        def send_message(self, message: Message) -> None:
            if isinstance(message, events.Key):
                note()
            super().send_message(message)

    return NotingKeys
