"""The replicas screen: the table of servers, and the server of each chat."""

from __future__ import annotations

from textual import getters
from textual.app import ComposeResult

from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bars import Bar, StatusBar, TopBar
from minitui.tui.widgets.chat.session_tabs import SessionTabs
from minitui.tui.widgets.servers.replicas import Replicas
from minitui.viewmodel.view import View


class ReplicaScreen(BaseScreen[None]):
    """Arranges the widgets; the replicas are in the application's source."""

    DEFAULT_CSS = "ReplicaScreen { layout: vertical; background: $ground; & Replicas { height: 1fr; } }"
    table = getters.query_one(Replicas)

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield SessionTabs()
        yield Replicas(id="table")
        yield StatusBar()

    def on_mount(self) -> None:
        self.table.focus()

    def hints(self) -> list[Hint]:
        """Returns the keys of the table, then the most useful actions."""
        table = [("up, down", "choose"), ("enter", "show its panels"), ("P", "pin"), ("U", "unpin")]
        return table + [h for h in super().hints() if h[1] in ("write", "new", "chats", "help", "commands")]

    def paint(self, view: View) -> None:
        """Show the view; called once a frame while this screen is visible."""
        for bar in self.query(Bar):
            bar.paint(view)
        self.table.paint(view)
