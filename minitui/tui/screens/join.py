"""The address for the phones of a class, with a QR code."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Static

from minitui.tui.screens.dialogs import Overlay

QUIET = 2  # modules of white around the code


def qr_rows(link: str) -> list[str]:
    """Returns a QR code as rows of text, two modules in a cell, dark on light; empty without the package segno."""
    try:
        import segno
    except ImportError:
        return []
    code = segno.make(link, error="m", micro=False)
    modules = [[bool(dark) for dark in row] for row in code.matrix_iter(border=QUIET)]
    if len(modules) % 2:
        modules.append([False] * len(modules[0]))
    cells = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    pairs = zip(modules[::2], modules[1::2], strict=True)
    return ["".join(cells[both] for both in zip(upper, lower, strict=True)) for upper, lower in pairs]


class JoinScreen(Overlay[None]):
    """Any of its keys closes it."""

    BINDINGS: ClassVar = [Binding("escape,J,enter,space,q", "dismiss", "Close", show=False)]
    DEFAULT_CSS = """
    JoinScreen {
        align: center middle;
        & > Vertical { width: auto; height: auto; border: round $accent; background: $ground; padding: 1 2; }
        & Static { width: auto; }
    }
    """

    def __init__(self, link: str) -> None:
        super().__init__()
        self.link = link

    def compose(self) -> ComposeResult:
        code = qr_rows(self.link)
        without = "" if code else "\n\nThe package segno draws a QR code here: pip install segno"
        with Vertical():
            yield Static(Text("\n".join(code), style="black on white", no_wrap=True), markup=False)
            yield Static(Text(f"\nAnswer on your phone: {self.link}{without}", style="bold"), markup=False)
