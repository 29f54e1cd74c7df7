"""Replicas: which servers are up, how busy are they, and how many prompt tokens do they find in their caches?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import getters
from textual.binding import Binding
from textual.message import Message

from minitui.sources.replica import LOADING, UNKNOWN, Replica
from minitui.sources.replicas import UNDECIDED, ReplicaSource
from minitui.text import duration, short
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, clean, clip, legend, wrapped
from minitui.viewmodel.view import View

# (name, width in cells) of the columns on the right. The address and the model share the rest.
COLUMNS = (("state", 11), ("run", 5), ("wait", 5), ("KV", 6), ("hits", 6), ("tok/s", 7), ("first", 8), ("ours", 5))
LEAD = 5  # cells before the name, for the mark and the number
KINDS = {
    "minitui": "a minitui server", "vllm": "vLLM with minitui's recorder", "openai": "a server with OpenAI's endpoints",
}
WITH_MODEL = 92  # cells; a narrower table has no column for the model


class Replicas(LinePanel):
    """A table with a row for each replica, then details of the chosen replica, then the replica of each chat."""

    TITLE = "Replicas"
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "replica above", show=False, id="replicas.up"),
        Binding("down", "move(1)", "replica below", show=False, id="replicas.down"),
        Binding("enter", "show", "show its panels", show=False, id="replicas.show"),
    ]

    @dataclass
    class Chosen(Message):
        """Asks the application to show this replica in the panels."""

        replica: Replica

    at = 0  # index of the chosen replica

    app = getters.app(AppBase)

    @property
    def _source(self) -> ReplicaSource:
        assert isinstance(self.app.source, ReplicaSource)
        return self.app.source

    @property
    def chosen(self) -> Replica:
        """The chosen replica."""
        return self._source.replicas[self.at]

    def picture(self, view: View, width: int, height: int) -> Picture:
        source = self._source
        rows = [self._head(width)]
        rows += [self._row(source, replica, index == self.at, width) for index, replica in enumerate(source.replicas)]
        rows.append(Row().done(width))
        rows += self._about(source, self.chosen, width)
        rows.append(Row().done(width))
        rows += self._chats(source, width)
        key = legend(
            (glyphs().active, "hit", "shown in the panels"), ("ours", "ink", "requests of this app"),
            (glyphs().dash, "ink", "not reported"),
        )
        note: list[Run] = [(f"{len(source.usable)} of {len(source.replicas)} can answer", "dim")]
        return Picture(rows, note=note, legend=key)

    def _head(self, width: int) -> Runs:
        row = Row(" " * LEAD + "replica", "dim")
        if width >= WITH_MODEL:
            row.to(self._model_column(width)[0]).add("model", "dim")
        row.to(width - sum(cells for _, cells in COLUMNS))
        for name, cells in COLUMNS:
            row.add(name.rjust(cells), "dim")
        return row.done(width)

    def _row(self, source: ReplicaSource, replica: Replica, chosen: bool, width: int) -> Runs:
        shown = replica is source.shown
        row = Row(f" {glyphs().active if shown else ' '} ", "hit").add(f"{replica.number} ", "bold ink")
        model_at, model_room = self._model_column(width)
        end = width - sum(cells for _, cells in COLUMNS)
        row.add(clip(clean(replica.name), model_at - LEAD - 1), "bold ink" if chosen else "ink")
        if model_room:
            row.to(model_at).add(clip(clean(replica.model or glyphs().dash), model_room - 1), "dim")
        row.to(end)
        state, tone = self._state(source, replica)
        vitals = replica.metrics
        first = None if vitals.ttft_mean_s is None else vitals.ttft_mean_s * 1e3
        figures = (
            (state, tone), (_count(vitals.running), "ink"), (_count(vitals.waiting), "ink"),
            (_share(vitals.cache_use), "pool"), (_share(vitals.hit_rate), "hit"),
            (_count(vitals.tokens_per_s), "decode"), (glyphs().dash if first is None else duration(first), "ink"),
            (str(len(replica.streams)), "ink"),
        )
        for (text, style), (_, cells) in zip(figures, COLUMNS, strict=True):
            row.add(text.rjust(cells), "dim" if text == glyphs().dash else style)
        return row.done(width, "select" if chosen else "")

    def _model_column(self, width: int) -> tuple[int, int]:
        """Returns (first cell, number of cells) of the model's column; a narrow table has 0 cells for it."""
        end = width - sum(cells for _, cells in COLUMNS)
        if width < WITH_MODEL:
            return end, 0
        longest = max(len(replica.name) for replica in self._source.replicas)
        at = LEAD + min(longest + 2, (end - LEAD) // 2)
        return at, end - at

    def _state(self, source: ReplicaSource, replica: Replica) -> tuple[str, str]:
        """Returns (state, style)."""
        if source.reason_against(replica) in ("", UNDECIDED):
            return "up", "good"
        if replica.trouble in (LOADING, UNKNOWN):
            return ("loading" if replica.trouble == LOADING else "unknown"), "waiting"
        return ("down", "bad") if replica.trouble else ("other model", "waiting")

    def _about(self, source: ReplicaSource, replica: Replica, width: int) -> list[Runs]:
        """Returns details of one replica: its address, its model and, if it cannot answer, the reason."""
        server = KINDS.get(replica.kind, "")
        head = Row(f"{replica.number} {replica.url}", "bold ink")
        head.add("  " + ", ".join(filter(None, (server, replica.model))), "dim")
        rows = [head.done(width)]
        reason = source.reason_against(replica)
        if replica.trouble not in ("", UNKNOWN):
            reason += f". Next try in {replica.retry_in:.0f} s."
        rows += wrapped(reason, "bad", width)
        if replica.telemetry is None and not replica.trouble:
            silent = "This server does not report the work of its engine, so the panels cannot show that work."
            rows.append(Row(silent, "dim").done(width))
        return rows

    def _chats(self, source: ReplicaSource, width: int) -> list[Runs]:
        """Returns the replica for each chat's next question, and why."""
        chats = self.app.chats
        rows = [Row("the replica for the next question of each chat", "dim").done(width)]
        for session in chats.sessions:
            number, why = source.route(session.id)
            row = Row(f" {chats.number(session)} ", "bold ink").add(clip(clean(session.title), max(12, width // 3)))
            row.to(width // 3 + 5).add(*(("none", "bad") if number is None else (str(number), "bold ink")))
            row.add(f"  {why}", "dim")
            rows.append(row.done(width, "empty-chip" if session is self.app.session else ""))
        return rows

    def clicked(self, view: View, column: int, row: int) -> None:
        if 1 <= row <= len(self._source.replicas):
            self.at = row - 1

    def action_move(self, by: int) -> None:
        self.at = max(0, min(len(self._source.replicas) - 1, self.at + by))

    def action_show(self) -> None:
        self.post_message(self.Chosen(self.chosen))


def _count(value: float | None) -> str:
    return glyphs().dash if value is None else short(value)


def _share(value: float | None) -> str:
    return glyphs().dash if value is None else f"{value:.0%}"
