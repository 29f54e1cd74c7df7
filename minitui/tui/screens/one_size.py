"""What all screens share: they are as large as the terminal is now, whatever an older message says."""

from __future__ import annotations

from typing import TypeVar

from textual.geometry import Size
from textual.screen import Screen

Result = TypeVar("Result")


class OneSize(Screen[Result]):
    """Laid out in the size of the application.

    Textual 8 lays a screen out in the size that a Resize brings, and each change of size sends the screen another such
    message. Two on their way at once, with another message between them so that the newer does not replace the older
    (in a batch of updates each layout brings one), answer each other for ever: a core burns and no key is read.
    """

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)
