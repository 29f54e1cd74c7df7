"""The application for a foreign OpenAI-compatible server: chats, and the server's metrics beside them."""

from __future__ import annotations

from typing import Any, ClassVar

from minitui.sources.openai import OpenAISource
from minitui.sources.server_metrics import MetricsPoller
from minitui.sources.vllm import HOW
from minitui.tui.app import MinituiApp
from minitui.tui.screens.chat import RAIL_FROM, ChatScreen
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.server_vitals import ServerVitals

EVERY_S = 0.5  # seconds between two updates of the line of figures


class ForeignChatScreen(ChatScreen):
    """The chats of a foreign server. Its engine is not visible, so the rail shows figures from its metrics page."""

    RAIL: ClassVar[tuple[type[LinePanel], ...]] = (ServerVitals,)
    HEADLINE = "Several chats, one server."
    LEAD = "Ask something. The panel beside the answer shows the server's own figures."
    WELCOME_KEYS: ClassVar[tuple[tuple[str, str], ...]] = (("r", "the same first question in a second chat"),)
    DEFAULT_CSS = "ForeignChatScreen #rail ServerVitals { height: 16; }"

    def on_mount(self) -> None:  # Textual calls the parent's handler too
        self.query_one("#glance").display = False


class ForeignApp(MinituiApp):
    """The application. The server's figures are in the rail; on a narrow terminal, in a line under the top bar."""

    TABS = (("chat", "1 Chat"),)
    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "chat": ForeignChatScreen}

    def __init__(self, source: OpenAISource, *args: Any, **options: Any) -> None:
        options["load_codec"] = lambda info: source.codec
        super().__init__(source, *args, **options)
        self._foreign = source

    def on_mount(self) -> None:  # Textual calls the parent's handler too
        self.set_interval(EVERY_S, self._update_story)

    def _update_story(self) -> None:
        if self._foreign.info:
            self.story = self._foreign.metrics.describe() if self.size.width < RAIL_FROM else ""

    def current_server(self) -> tuple[str, MetricsPoller | None]:
        """Returns the server's address and the poller of its metrics, as HasServer requires."""
        return self._foreign.url, self._foreign.poller

    def switch_mode(self, mode: str) -> Any:
        """Refuse all screens except the chats: the server does not report what its engine does."""
        if mode != "chat":
            self.say(
                f"this server does not report what its engine does; for vLLM, {HOW}, or watch its KV events: "
                "minitui inspect --connect",
                error=True,
            )
            mode = "chat"
        return super().switch_mode(mode)
