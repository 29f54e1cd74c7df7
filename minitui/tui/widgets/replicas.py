"""Replicas: which servers answer, which of them is up, how busy, and how much of the prompts is in their caches?"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, ClassVar, cast

from textual.binding import Binding
from textual.message import Message

from minitui.sources.replicas import LOADING, UNDECIDED, UNKNOWN, Replica, ReplicaSource
from minitui.text import duration, short
from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, clean
from minitui.viewmodel.model import View

if TYPE_CHECKING:
    from minitui.tui.replica_app import ReplicaApp

# Columns from the right: what is told, and its cells. The address and the model share what is left.
COLUMNS = (("state", 7), ("run", 5), ("wait", 5), ("KV", 6), ("hits", 6), ("tok/s", 7), ("first", 8), ("ours", 5))
LEAD = 5  # mark and number
WITH_MODEL = 92  # narrower, the model stands under the table only


class Replicas(LinePanel):
    """A row for each replica, what there is to say about the chosen one, and where each chat goes."""

    TITLE = "Replicas"
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "replica above", show=False, id="replicas.up"),
        Binding("down", "move(1)", "replica below", show=False, id="replicas.down"),
        Binding("enter", "show", "show its panels", show=False, id="replicas.show"),
    ]

    class Chosen(Message):
        """The panels are to follow this replica."""

        def __init__(self, replica: Replica) -> None:
            super().__init__()
            self.replica = replica

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.at = 0

    @property
    def _app(self) -> ReplicaApp:
        return cast("ReplicaApp", self.app)

    @property
    def chosen(self) -> Replica:
        """The replica that the mark stands on."""
        return self._app.replicas.replicas[self.at]

    def picture(self, view: View, width: int, height: int) -> Picture:
        source = self._app.replicas
        rows = [self._head(width)]
        rows += [self._row(source, replica, index == self.at, width) for index, replica in enumerate(source.replicas)]
        rows.append(Row().done(width))
        rows += self._about(source, self.chosen, width)
        rows.append(Row().done(width))
        rows += self._chats(source, width)
        legend: list[Run] = [
            (glyphs().active, "hit"), (" its panels are shown  ", "dim"), ("ours", "ink"),
            (" being written for us  ", "dim"), (glyphs().dash, "ink"), (" not told", "dim"),
        ]  # fmt: skip
        note: list[Run] = [(f"{len(source.usable)} of {len(source.replicas)} can answer", "dim")]
        return Picture(rows, note=note, legend=legend)

    def _head(self, width: int) -> Runs:
        row = Row(" " * LEAD + "replica", "dim")
        if width >= WITH_MODEL:
            row.to(self._names(width)[0]).add("model", "dim")
        row.to(width - sum(cells for _, cells in COLUMNS))
        for name, cells in COLUMNS:
            row.add(name.rjust(cells), "dim")
        return row.done(width)

    def _row(self, source: ReplicaSource, replica: Replica, chosen: bool, width: int) -> Runs:
        ground = " on select" if chosen else ""
        shown = replica is source.shown
        row = Row(f" {glyphs().active if shown else ' '} ", "hit" + ground)
        row.add(f"{replica.number} ", "bold ink" + ground)
        model_at, model_room = self._names(width)
        end = width - sum(cells for _, cells in COLUMNS)
        row.add(_shortened(replica.name, model_at - LEAD - 1), ("bold ink" if chosen else "ink") + ground)
        if model_room:
            row.to(model_at, style="ink" + ground)
            row.add(_shortened(replica.model or glyphs().dash, model_room - 1), "dim" + ground)
        row.to(end, style="ink" + ground)
        state, tone = self._state(source, replica)
        vitals = replica.vitals
        first = None if vitals.ttft_mean_s is None else vitals.ttft_mean_s * 1e3
        told = (
            (state, tone), (_count(vitals.running), "ink"), (_count(vitals.waiting), "ink"),
            (_share(vitals.cache_use), "pool"), (_share(vitals.hit_rate), "hit"),
            (_count(vitals.tokens_per_s), "decode"), (glyphs().dash if first is None else duration(first), "ink"),
            (str(len(replica.streams)), "ink"),
        )  # fmt: skip
        for (text, style), (_, cells) in zip(told, COLUMNS, strict=True):
            row.add(text.rjust(cells), ("dim" if text == glyphs().dash else style) + ground)
        return row.done(width)

    def _names(self, width: int) -> tuple[int, int]:
        """Where the model's column begins, and its cells; none where it is narrow."""
        end = width - sum(cells for _, cells in COLUMNS)
        if width < WITH_MODEL:
            return end, 0
        longest = max(len(replica.name) for replica in self._app.replicas.replicas)
        at = LEAD + min(longest + 2, (end - LEAD) // 2)
        return at, end - at

    def _state(self, source: ReplicaSource, replica: Replica) -> tuple[str, str]:
        if source.reason_against(replica) in ("", UNDECIDED):
            return "up", "good"
        if replica.trouble in (LOADING, UNKNOWN):
            return ("loads" if replica.trouble == LOADING else "asked"), "waiting"
        return ("down", "bad") if replica.trouble else ("other", "waiting")

    def _about(self, source: ReplicaSource, replica: Replica, width: int) -> list[Runs]:
        """Whatever is to be said about one replica."""
        maker = {"minitui": "a minitui server", "openai": "a server with OpenAI's endpoints"}.get(replica.kind, "")
        head = Row(f"{replica.number} {replica.url}", "bold ink")
        head.add("  " + ", ".join(filter(None, (maker, replica.model))), "dim")
        rows = [head.done(width)]
        against = source.reason_against(replica)
        if replica.trouble not in ("", UNKNOWN):
            against += f". It is tried again in {replica.again_in:.0f} s."
        rows += [Row(line, "bad").done(width) for line in textwrap.wrap(clean(against), width)]
        if replica.telemetry is None and not replica.trouble:
            rows.append(Row("It does not tell what its engine does: the panels cannot follow it.", "dim").done(width))
        return rows

    def _chats(self, source: ReplicaSource, width: int) -> list[Runs]:
        """Where each chat's next question goes, and why."""
        chats = self._app.chats
        rows = [Row("where the next question of each chat goes", "dim").done(width)]
        for session in chats.sessions:
            to, why = self._app.whither(session)
            ground = " on empty-chip" if session is self._app.session else ""
            row = Row(f" {chats.number(session)} ", "bold ink" + ground)
            row.add(_shortened(session.title, max(12, width // 3)), "ink" + ground).to(width // 3 + 5)
            row.add(to, "bold ink" if to[:1].isdigit() else "bad").add(f"  {why}", "dim")
            rows.append(row.done(width))
        return rows

    def clicked(self, view: View, column: int, row: int) -> None:
        if 1 <= row <= len(self._app.replicas.replicas):
            self.at = row - 1

    def action_move(self, by: int) -> None:
        self.at = max(0, min(len(self._app.replicas.replicas) - 1, self.at + by))
        self.repaint()

    def action_show(self) -> None:
        self.post_message(self.Chosen(self.chosen))


def _shortened(text: str, room: int) -> str:
    text = clean(text)
    return text if len(text) <= room else text[: max(0, room - 1)] + glyphs().dots


def _count(value: float | None) -> str:
    return glyphs().dash if value is None else short(value)


def _share(value: float | None) -> str:
    return glyphs().dash if value is None else f"{value:.0%}"
