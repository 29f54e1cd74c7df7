"""The prefix doctor over the running engine: why requests did not find their beginning in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from textual import getters
from textual.binding import Binding, BindingType

from engine.errors import EngineError
from minitui.prefix.diagnose import CAUSES, Finding
from minitui.prefix.recorded import findings_since
from minitui.prefix.report import WELL, heading, summarise, what_costs
from minitui.text import count, duration
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.dialogs import PanelDialog
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, clean, fit, wrapped
from minitui.viewmodel.view import View

COLUMNS = (("request", 8), ("as in", 8), ("prompt", 8), ("shared", 8), ("cached", 8), ("lost", 8), ("time", 9))
WIDE = 90  # cells: a narrower panel leaves out two columns, so that the causes are whole


class PrefixPanel(LinePanel):
    """A line for each request, the newest first; below, the chosen one's difference from its ancestor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "newer", show=False, id="prefix.up"),
        Binding("down,j", "move(1)", "older", show=False, id="prefix.down"),
        Binding("pageup", "move(-10)", "ten newer", show=False, id="prefix.pageup"),
        Binding("pagedown", "move(10)", "ten older", show=False, id="prefix.pagedown"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Finding] | str = "reading the records of this run …"  # or why there are none
        self.chats: dict[int, str] = {}  # request -> the title of its chat
        self.at = 0

    def show(self, found: list[Finding] | str, chats: dict[int, str]) -> None:
        """Show these findings. The newest request that lost something is chosen."""
        self.found, self.chats = found[::-1] if isinstance(found, list) else found, chats
        self.at = next((i for i, one in enumerate(self.found) if isinstance(one, Finding) and one.lost), 0)
        self.repaint()

    def picture(self, view: View, width: int, height: int) -> Picture:
        g = glyphs()
        legend = [(f"up, down choose a request {g.middot} esc closes", "dim")]
        if isinstance(self.found, str):
            return Picture(wrapped(self.found, "dim", width), "Prefix doctor", legend=legend)
        summary = summarise(self.found)
        below = [*self._chosen(self.found[self.at], width), (), *(
            row for line in what_costs(summary) for row in wrapped(line, "dim", width)
        )]
        room = max(1, height - 1 - min(len(below) + 1, height // 2 + 2))
        first = max(0, min(self.at - room // 2, len(self.found) - room))
        rows = [Row(_cells([name for name, _ in COLUMNS], width) + "  cause", "dim").done(width)]
        rows += [self._line(i, width) for i in range(first, min(len(self.found), first + room))]
        return Picture([*rows, (), *below], "Prefix doctor", [(heading(summary), "dim")], legend)

    def _line(self, i: int, width: int) -> Runs:
        one = self.found[i]
        assert isinstance(one, Finding)
        ancestor = f"r{one.ancestor}" if one.ancestor is not None else glyphs().dash
        cached = f"{one.cached:,}" if one.cached is not None else "unknown"
        cost = duration(one.seconds * 1e3) if one.seconds is not None and one.lost else glyphs().dash
        figures = (f"r{one.number}", ancestor, f"{one.prompt:,}", f"{one.could:,}", cached, f"{one.lost:,}", cost)
        row = Row(_cells(figures, width))
        fault = CAUSES[one.cause][0]
        words = f"{one.cause} ({fault})" if fault else "nothing lost" if one.cause == "none" else one.cause
        chat = self.chats.get(one.number, "")
        row.add(f"  {words}", "dim" if one.cause in WELL else "bold bad")
        return row.add(f"  {clean(chat)}" if chat else "", "dim").done(width, "select" if i == self.at else "")

    def _chosen(self, one: Finding, width: int) -> list[Runs]:
        if one.ancestor is None:
            words = "No earlier request begins alike." if one.cause == "first" else f"{one.cause}."
            return wrapped(f"r{one.number}: {words}", "ink", width)
        where = f"; {one.where}" if one.where else ""
        words = f"r{one.number}: {one.could:,} of {count(one.prompt, 'token')} as in r{one.ancestor}{where}"
        rows = wrapped(words, "ink", width)
        for sign, text, style in (("-", one.before, "bad"), ("+", one.after, "good")):
            if one.before or one.after:
                rows.append(Row(fit(f"  {sign} {clean(text)}", width, glyphs().dots), style).done(width))
        return rows

    def action_move(self, lines: int) -> None:
        self.at = max(0, min(len(self.found) - 1, self.at + lines)) if isinstance(self.found, list) else 0


def _cells(texts: Sequence[str], width: int) -> str:
    columns = zip(texts, COLUMNS, strict=True)
    return "".join(f"{text:>{n}}" for text, (name, n) in columns if width >= WIDE or name not in ("shared", "time"))


class PrefixScreen(PanelDialog):
    """The dialog with a PrefixPanel. It shows the records that are kept for time travel."""

    app = getters.app(AppBase)
    panel: PrefixPanel

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "close", show=False, id="prefix.close")]
    DEFAULT_CSS = "PrefixScreen PrefixPanel { max-width: 140; max-height: 44; }"

    def __init__(self) -> None:
        super().__init__(PrefixPanel())

    def on_mount(self) -> None:  # Textual calls the parent's handler too
        self.run_worker(self._look(), group="prefix", exclusive=True)

    async def _look(self) -> None:
        view, info = self.app.view, self.app.source.info
        lanes, found = view.history.lanes.lanes, list[Finding]()
        chats = {id: view.texts.group_name(lane.request.group) for id, lane in lanes.items()}
        try:
            kept = view.history.past.recorded()
            found = await asyncio.to_thread(partial(findings_since, *kept, info, view.texts.decode))
        except (EngineError, ValueError) as error:
            self.panel.show(str(error), chats)
            return
        self.panel.show(found or "No request was admitted since the first record that is kept.", chats)
