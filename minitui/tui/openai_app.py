"""The application over a server of another make: chats, and its vitals beside them. It tells no more than that."""

from __future__ import annotations

from typing import Any, ClassVar

from minitui.sources.openai import ForeignSource
from minitui.sources.server_metrics import Pulse
from minitui.tui.app import MinituiApp
from minitui.tui.screens.chat import RAIL_FROM, ChatScreen
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.server_vitals import ServerVitals

EVERY_S = 0.5


class ForeignChatScreen(ChatScreen):
    """There is no engine to be seen: the rail shows what the server's own page tells."""

    RAIL: ClassVar[tuple[type[LinePanel], ...]] = (ServerVitals,)
    HEADLINE = "Several chats, one server."
    LEAD = "Ask something. Beside the answer stands what the server tells of itself."
    HINTS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("r", "the same first question again, in a second chat"),
        ("?", "what everything here means, and every key"),
    )
    DEFAULT_CSS = "ForeignChatScreen #rail ServerVitals { height: 16; }"

    def on_mount(self) -> None:  # Textual calls the parent's handler, too
        self.query_one("#glance").display = False


class ForeignApp(MinituiApp):
    """Where there is no room for the rail, what the server tells stands in a line under the top bar."""

    TABS = (("chat", "1 Chat"),)
    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "chat": ForeignChatScreen}

    def __init__(self, source: ForeignSource, *args: Any, **options: Any) -> None:
        options["load_codec"] = lambda info: source.codec
        super().__init__(source, *args, **options)
        self._foreign = source

    def on_mount(self) -> None:  # Textual calls the parent's handler, too
        self.set_interval(EVERY_S, self._tell)

    def _tell(self) -> None:
        if self._foreign.info:
            self.story = self._foreign.vitals.describe() if self.size.width < RAIL_FROM else ""

    def beside(self) -> tuple[str, Pulse | None]:
        """See ServerVitals."""
        return self._foreign.url, self._foreign.pulse

    def switch_mode(self, mode: str) -> Any:
        """There is nothing to inspect."""
        if mode != "chat":
            self.say("this server does not tell what its engine does: only a minitui server does", error=True)
            mode = "chat"
        return super().switch_mode(mode)
