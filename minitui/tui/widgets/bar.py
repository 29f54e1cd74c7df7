"""The base class of the bars. A bar is a panel without a frame, as wide as the screen. It cannot have the focus."""

from __future__ import annotations

from textual import getters

from minitui.tui.app_base import AppBase
from minitui.tui.widgets.base import LinePanel


class Bar(LinePanel, can_focus=False):
    """A bar. Its height is one line, unless its own CSS sets another height."""

    app = getters.app(AppBase)
    FRAME = "none"
    DEFAULT_CSS = "Bar { height: 1; }"
