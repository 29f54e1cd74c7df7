"""The base class of the bars: a bar is a panel as wide as the screen, without a frame, that cannot have the focus."""

from __future__ import annotations

from textual import getters

from minitui.tui.app_base import AppBase
from minitui.tui.widgets.base import LinePanel


class Bar(LinePanel, can_focus=False):
    """A bar of one line, unless its CSS says otherwise."""

    app = getters.app(AppBase)
    FRAME = "none"
    DEFAULT_CSS = "Bar { height: 1; }"
