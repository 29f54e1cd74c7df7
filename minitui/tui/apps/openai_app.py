"""The application for a foreign OpenAI-compatible server: chats, and the server's metrics beside them."""

from __future__ import annotations

from typing import Any, ClassVar

from minitui.sources.openai import OpenAISource
from minitui.sources.vllm import HOW
from minitui.tui.apps.app import MinituiApp
from minitui.tui.panels import BY_KEY
from minitui.tui.screens.chat import RAIL_FROM, ChatScreen
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.servers.figures import ServerVitals

NO_RECORDS = (
    "this server does not report what its engine does, and its engine cannot be controlled from here; for vLLM, "
    f"{HOW}, or watch its KV events: minitui inspect --connect"
)
EVERY_S = 0.5  # seconds between two updates of the line of figures


def need_records(reason: str) -> dict[str, str]:
    """Returns NOT_OFFERED with `reason` for the actions that need an engine's records or control the engine. "restart"
    is offered: it connects to the server again."""
    return {**dict.fromkeys(("Engine", "inspect", *BY_KEY, "lecture", "prefix", "goto"), reason), "restart": ""}


class ForeignChatScreen(ChatScreen):
    """The chats of a foreign server. Its engine is not visible, so the rail shows figures from its metrics page."""

    RAIL: ClassVar[tuple[type[LinePanel], ...]] = (ServerVitals,)
    ABOUT = "foreign"
    HEADLINE = "Several chats, one server."
    LEAD = "Ask something. The panel beside the answer shows the server's own figures."
    WELCOME_KEYS: ClassVar[tuple[tuple[str, str], ...]] = (("r", "the same first question in a second chat"),)
    DEFAULT_CSS = "ForeignChatScreen #rail ServerVitals { height: 16; }"

    def on_mount(self) -> None:  # Textual calls the parent's handler too
        self.query_one("#glance").display = False


class ForeignApp(MinituiApp):
    """The application. The server's figures are in the rail; on a narrow terminal, in a line under the top bar."""

    NOT_OFFERED: ClassVar[dict[str, str]] = {**MinituiApp.NOT_OFFERED, **need_records(NO_RECORDS)}
    TABS = (("chat", "1 Chat"),)
    MODES: ClassVar[dict[str, Any]] = {"chat": ForeignChatScreen}

    def __init__(self, source: OpenAISource, *args: Any, **options: Any) -> None:
        options["load_codec"] = lambda info: source.codec
        super().__init__(source, *args, **options)
        self._foreign = source

    def on_mount(self) -> None:  # Textual calls the parent's handler too
        self.set_interval(EVERY_S, self._update_story)

    def _update_story(self) -> None:
        if self._foreign.info:
            self.story = self._foreign.metrics.describe() if self.size.width < RAIL_FROM else ""
