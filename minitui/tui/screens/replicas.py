"""The replicas screen: the table of servers, and where each chat goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import getters
from textual.app import ComposeResult

from minitui.tui.screens.one_size import OneSize
from minitui.tui.widgets.chrome import Bar, SessionStrip, StatusBar, TopBar
from minitui.tui.widgets.replicas import Replicas

if TYPE_CHECKING:
    from minitui.viewmodel.model import View


class ReplicaScreen(OneSize[None]):
    """Composes; the replicas are in the application's source."""

    DEFAULT_CSS = """
    ReplicaScreen { layout: vertical; background: $ground; & Replicas { height: 1fr; } }
    """
    table = getters.query_one(Replicas)

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield SessionStrip()
        yield Replicas(id="table")
        yield StatusBar()

    def on_mount(self) -> None:
        self.table.focus()

    def paint(self, view: View) -> None:
        """Show everything as it stands; called once a frame while this screen is visible."""
        for bar in self.query(Bar):
            bar.paint(view)
        self.table.paint(view)
