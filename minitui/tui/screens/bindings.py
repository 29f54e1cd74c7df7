"""The key bindings that are not in ACTIONS, because only a panel, a screen or one application has them.

The help and the palette list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from textual.actions import parse
from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode

from minitui.tui.actions import BY_ID
from minitui.tui.widgets.base import LinePanel

CURSOR_KEYS = {"up", "down", "left", "right", "pageup", "pagedown", "tab", "shift+tab", "escape"}


@dataclass(frozen=True)
class BindingGroup:
    """The bindings of one node; `name` is the node's title in the help."""

    name: str
    node: DOMNode
    bindings: tuple[Binding, ...]


def bindings_here(app: App[Any]) -> list[BindingGroup]:
    """Returns the bindings of the panel with the focus, of the screen, and of the application."""
    nodes: list[tuple[str, DOMNode]] = [(app.current_mode.capitalize(), app.screen), ("Application", app)]
    if isinstance(app.focused, LinePanel):
        nodes.insert(0, (app.focused.TITLE, app.focused))
    groups = (BindingGroup(name, node, _bindings(node)) for name, node in nodes)
    return [group for group in groups if group.bindings]


def _bindings(node: DOMNode) -> tuple[Binding, ...]:
    """Returns the bindings that minitui's classes declare for this node, without ACTIONS, system keys, and keys whose
    action the node refuses now."""
    ours = [kind for kind in type(node).__mro__ if kind.__module__.startswith("minitui")]
    declared = {b.id: b for kind in ours for b in vars(kind).get("BINDINGS", ()) if b.id not in BY_ID and not b.system}
    return tuple(binding for binding in declared.values() if _allowed(node, binding.action))


def _allowed(node: DOMNode, action: str) -> bool:
    _, name, parameters = parse(action)
    return node.check_action(name, parameters) is not False
