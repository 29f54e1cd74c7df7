"""The application over a server's KV events and /metrics: one screen, without chats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding

from minitui.sources.vllm import ONLY_WATCHES
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.openai_app import need_records
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bars import StatusBar, TopBar
from minitui.tui.widgets.base import Column, Columns
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.servers.figures import MISSING, CachedTexts, CachePool, Missing, ServerVitals

if TYPE_CHECKING:
    from minitui.vllm.kv_source import KvSource

WIDE, TALL = 100, 32  # a smaller terminal shows the tree and the events


class CacheScreen(BaseScreen[None]):
    """Arranges the panels."""

    BINDINGS: ClassVar = [Binding("z", "maximise", "maximise", show=False, id="cache.maximise",
                                  tooltip="the texts, or all panels")]
    DEFAULT_CSS = """
    CacheScreen {
        layout: vertical; background: $ground;
        & #columns, & #tree { height: 1fr; }
        & #left { width: 44; } & #right { width: 1fr; }
        & #server { height: 16; } & #pool { height: 1fr; } & #missing { height: 8; } & #events { height: 9; }
        &.-small #left, &.-whole #left, &.-whole #events { display: none; }
    }
    """

    def __init__(self, source: KvSource) -> None:
        super().__init__()
        self._source = source

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Columns(id="columns"):
            with Column(id="left"):
                yield ServerVitals(id="server")
                yield CachePool(self._source, id="pool")
                yield Missing(id="missing")
            with Column(id="right"):
                yield CachedTexts(id="tree")
                yield Events(id="events")
        yield StatusBar()

    def on_mount(self) -> None:
        self.query_one("#tree").focus()

    def on_resize(self) -> None:
        self.set_class(self.size.width < WIDE or self.size.height < TALL, "-small")

    def action_maximise(self) -> None:
        self.toggle_class("-whole")

    def hints(self) -> list[Hint]:
        return [("up, down", "choose"), ("/", "search"), ("z", "maximise"), *super().hints()]


class CacheApp(MinituiApp):
    """The application: one screen."""

    MODES: ClassVar[dict[str, Any]] = {}
    DEFAULT_MODE = "cached"
    NOT_OFFERED: ClassVar[dict[str, str]] = {
        **MinituiApp.NOT_OFFERED, **need_records(MISSING), **dict.fromkeys(("Chats", "chat", "slash"), ONLY_WATCHES),
        "inspect": "",
    }
    TABS = (("cached", "2 Inspect"),)

    def __init__(self, source: KvSource, *args: Any, **options: Any) -> None:
        options["load_codec"] = lambda info: source.texts
        super().__init__(source, *args, **options)
        self.add_mode("cached", lambda: CacheScreen(source))

    def switch_mode(self, mode: str) -> Any:
        """Show the only screen; "inspect" is its name on other servers."""
        return super().switch_mode("cached")
