"""Keys beside the ACTIONS: those of a panel, of a screen, of one application. Help and palette list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode

from minitui.tui.actions import BY_ID
from minitui.tui.widgets.base import LinePanel

MOVES = {"up", "down", "left", "right", "pageup", "pagedown", "tab", "shift+tab", "escape"}


@dataclass(frozen=True)
class KeysOf:
    """What `node`, which the reader knows as `name`, understands."""

    name: str
    node: DOMNode
    bindings: tuple[Binding, ...]


def keys_here(app: App[Any]) -> list[KeysOf]:
    """Of the panel that has the focus, of the screen, and of the application."""
    nodes: list[tuple[str, DOMNode]] = [(app.current_mode.capitalize(), app.screen), ("Application", app)]
    if isinstance(app.focused, LinePanel):
        nodes.insert(0, (app.focused.TITLE, app.focused))
    found = (KeysOf(name, node, _bindings(node)) for name, node in nodes)
    return [keys for keys in found if keys.bindings]


def _bindings(node: DOMNode) -> tuple[Binding, ...]:
    """Those that our own classes declare, but for what acts in passing."""
    ours = [kind for kind in type(node).__mro__ if kind.__module__.startswith("minitui")]
    declared = {b.id: b for kind in ours for b in vars(kind).get("BINDINGS", ()) if b.id not in BY_ID and not b.system}
    return tuple(declared.values())
