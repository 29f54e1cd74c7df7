"""The application over a server of another make: chats, and its vitals in one line. It tells no more than that."""

from __future__ import annotations

from typing import Any, ClassVar

from minitui.app import MinituiApp
from minitui.foreign import ForeignSource
from minitui.screens.chat import ChatScreen

EVERY_S = 1.0


class ForeignChatScreen(ChatScreen):
    """Chats alone: the panels of the rail show an engine, and there is none to be seen."""

    def on_mount(self) -> None:  # Textual calls the parent's handler, too
        for name in ("#rail", "#glance"):
            self.query_one(name).display = False


class ForeignApp(MinituiApp):
    """What the server tells of itself stands under the top bar; what it does not tell is called unknown."""

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
            self.story = self._foreign.vitals.describe()

    def switch_mode(self, mode: str) -> Any:
        """There is nothing to inspect."""
        if mode != "chat":
            self.say("this server does not tell what its engine does: only a minitui server does", error=True)
            mode = "chat"
        return super().switch_mode(mode)
