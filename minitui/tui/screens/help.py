"""The help: what the current screen shows, then every key and command. The palette has the same keys."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from textual import events, getters
from textual.actions import parse
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static

from minitui.text import match_reasons
from minitui.tui.actions import BY_ID, key_label
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.help import PANELS as HELP_OF_PANELS
from minitui.tui.help import SCREENS
from minitui.tui.panels import PANELS
from minitui.tui.screens.base import BaseScreen
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.widgets.base import LinePanel

MAX_WIDTH = 104  # columns, as in DEFAULT_CSS


def about(screen: str) -> str:
    """Returns the text of a screen, with a line for each panel where it has {panels}."""
    keys = {name: f"({key_label(panel.key)}) " if panel.key else "" for name, panel in PANELS.items()}
    panels = "\n".join(f"  {panel.title:<13}  {keys[name]}{panel.help}" for name, panel in PANELS.items())
    return SCREENS[screen].format(panels=panels, saved=SCREENS["saved"], reasons=match_reasons())


def _signs() -> str:
    """Returns the meaning of the signs in the tabs of the chats."""
    g = glyphs()
    signs = f"{g.folded} is being answered   {g.middot} waits   {g.right} answered   {g.preempted} cancelled   ! failed"
    return f"In the tabs:  {signs}"


def panel_help(widget: object) -> list[tuple[str, str]]:
    """Returns a (title, text) pair for the panel with the focus, in a list; empty if it has no help text."""
    title = getattr(widget, "TITLE", "")
    return [(f"The panel with the focus: {title}", HELP_OF_PANELS[title])] if title in HELP_OF_PANELS else []


def reflow(text: str, width: int) -> str:
    """Returns the text in lines of at most `width` cells. A two-column entry is wrapped within its second column."""
    return "\n\n".join("\n".join(_reflowed(part.split("\n"), width)) for part in text.split("\n\n"))


def name_of_text(screen: Screen[Any], mode: str) -> str:
    """Returns the name of the text for a screen that is shown in `mode`."""
    name = (screen.ABOUT if isinstance(screen, BaseScreen) else "") or mode
    return name if name in SCREENS else "chat"


def _reflowed(lines: list[str], width: int) -> list[str]:
    if not lines[0].startswith(" "):
        return textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
    entries: list[str] = []
    for line in lines:
        if entries and line.startswith(" " * 8):  # continues the entry above
            entries[-1] += " " + line.strip()
        else:
            entries.append(line)
    rows = []
    for entry in entries:
        column = re.match(r" +\S.*? {2,}", entry)
        hang = " " * (column.end() if column else 2)
        rows += textwrap.wrap(entry, width, subsequent_indent=hang, break_on_hyphens=False)
    return rows


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
    actions = {binding: parse(binding.action) for binding in declared.values()}
    return tuple(b for b, (_, name, given) in actions.items() if node.check_action(name, given) is not False)


class HelpScreen(Overlay[None]):
    """Shows `before` ((title, text) pairs), then the text `about`, then the keys `here`, then all actions."""

    app = getters.app(AppBase)

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > Vertical { width: 104; max-width: 96%; height: 92%; border: round $accent; background: $ground;
            border-title-color: $ink; border-title-style: bold; }
        & VerticalScroll { padding: 1 2; scrollbar-size-vertical: 1; }
        & .head { color: $hit; text-style: bold; margin-top: 1; }
        & .foot { color: $dim; padding: 0 2; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "Close", id="help.close", show=False)
    ]

    def __init__(self, about: str, before: Sequence[tuple[str, str]], here: Sequence[BindingGroup]) -> None:
        super().__init__()
        self._about, self._before, self._here = about, before, here
        self._texts: list[tuple[Static, Callable[[int], Content]]] = []

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = "Help"
            with VerticalScroll():
                if not self.app.HELP_FIRST:  # which begins with keys, too
                    yield Static(f"Keys: {self.app.current_mode}", classes="head", markup=False)
                    yield Static(self._keys(), markup=False)
                for title, text in self._before:
                    yield Static(title, classes="head", markup=False)
                    yield self._fitted(partial(_text, text))
                yield Static("The whole screen", classes="head")
                yield self._fitted(partial(_text, about(self._about)))
                if self.app.current_mode == "chat":
                    yield Static(Content(_signs()))
                for group in self._here:
                    yield Static(f"Keys here: {group.name}", classes="head", markup=False)
                    rows = [
                        (b.id or "", b.key, "", ": ".join(filter(None, (b.description, b.tooltip))))
                        for b in group.bindings
                    ]
                    yield self._fitted(partial(self._rows, rows))
                if self.app.has_chats:
                    yield Static("The prompt", classes="head")
                    yield Static(PROMPT_HELP)
                outside = " (keys act outside the prompt; esc leaves it)" if self.app.has_chats else ""
                for name in dict.fromkeys(a.group for a in self.app.actions):
                    yield Static(f"{name}{outside}", classes="head", markup=False)
                    yield self._fitted(partial(self._table, name))
                names = "The first column is the name for the table [keys] of settings.toml."
                yield Static(names, classes="foot", markup=False)
            yield Static("up, down, page keys scroll · esc closes · other keys close the help and act", classes="foot")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def on_key(self, event: events.Key) -> None:
        """Close the help at another key of the screen below, and let the key act there."""
        if not self.is_current or event.key in self.active_bindings:
            return
        if event.key in self.app.screen_stack[-2].active_bindings:
            event.stop()
            self.dismiss()
            self.app.call_later(self.app.simulate_key, event.key)

    def _keys(self) -> Content:
        """Returns the hints of the screen below, all of them."""
        below = self.app.screen_stack[-1 if self.app.screen is not self else -2]
        hints = below.hints() if isinstance(below, BaseScreen) else []
        return Content(" · ").join([Content.assemble((key, "bold"), f" {what}") for key, what in hints])

    def _fitted(self, text: Callable[[int], Content]) -> Static:
        """Returns a widget whose text is made again for each width."""
        made = Static(text(self._width))
        self._texts.append((made, text))
        return made

    @property
    def _width(self) -> int:
        """The cells of a line, without border, padding and scrollbar."""
        return max(20, min(MAX_WIDTH, self.app.size.width * 96 // 100) - 7)

    def on_resize(self) -> None:
        for made, text in self._texts:
            made.update(text(self._width))

    def _table(self, group: str, width: int) -> Content:
        actions = (a for a in self.app.actions if a.group == group)
        prompt = self.app.has_chats  # without a prompt, no slash command can be typed
        return self._rows(
            [(a.id, a.key, f"/{a.slash} {a.takes}".rstrip() if a.slash and prompt else "", a.help) for a in actions],
            width,
        )

    def _rows(self, entries: Sequence[tuple[str, str, str, str]], width: int) -> Content:
        """Returns the lines for (id, key, slash command, explanation) entries."""
        rows: list[Content | str | tuple[str, str]] = []
        for id, key, slash, words in entries:
            key = key_label(self.app.settings.keys.get(id, key)) if key else ""
            lead = f"{id:<10}", f"{key:<7}", f"{slash:<19}" if slash or "." not in id else ""
            rows += [(lead[0], "dim"), " ", (lead[1], "bold"), " ", lead[2]]
            indent = "\n" + " " * (2 + sum(map(len, lead)))
            rows += [indent.join(textwrap.wrap(words, max(20, width - len(indent) + 1))), "\n"]
        return Content.assemble(*rows)


def _text(text: str, width: int) -> Content:
    return Content(reflow(text, width))


PROMPT_HELP = Content(
    "enter sends · ctrl+j breaks the line · tab or right accepts the completion · up and down move in the list, or "
    "recall earlier questions · page keys scroll the chat · esc closes the list, else cancels the answer, else leaves "
    "the prompt; while an answer waits or the engine is paused, esc leaves the prompt, and esc again cancels · "
    "ctrl+g leaves the prompt while the answer continues; alt and a letter do this, too, and the letter acts as a key"
)
