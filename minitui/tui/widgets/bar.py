"""A bar of one line, without a frame."""

from __future__ import annotations

from textual import getters

from minitui.tui.app_base import AppBase
from minitui.tui.widgets.base import LinePanel


class Bar(LinePanel, can_focus=False):
    """One line across the screen."""

    app = getters.app(AppBase)
    FRAME = "none"
    DEFAULT_CSS = "Bar { height: 1; }"
