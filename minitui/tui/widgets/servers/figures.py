"""The panels over a server's /metrics and its KV events: figures, cached texts, the pool, and what is not told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual import getters

from engine.trace.views import NodeView
from minitui.sources.openai import OpenAISource
from minitui.sources.replicas import ReplicaSource
from minitui.sources.server_metrics import POLL_S
from minitui.text import count, duration
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.inspect.vitals import spark
from minitui.tui.widgets.rows import Row, Runs, legend, wrapped
from minitui.viewmodel.view import View

if TYPE_CHECKING:
    from minitui.vllm.kv_source import KvSource


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# (field of ServerMetrics, label, formatter, unit, colour, value at the sparkline's full height; 0: the largest value)
Figure = tuple[str, str, Callable[[float], str], str, str, float]
FIGURES: tuple[Figure, ...] = (
    ("tokens_per_s", "output", _whole, "tok/s", "decode", 0.0),
    ("running", "running", _whole, "requests", "running", 0.0),
    ("waiting", "waiting", _whole, "requests", "waiting", 0.0),
    ("cache_use", "KV in use", _percent, "%", "pool", 1.0),
    ("hit_rate", "hit rate", _percent, "% of prompt tokens", "hit", 1.0),
    ("ttft_mean_s", "TTFT", lambda seconds: duration(seconds * 1e3), "mean of all requests", "step", 0.0),
)


class ServerVitals(LinePanel, can_focus=False):
    """Six figures. If there is room, each has a sparkline with the values of the last polls."""

    TITLE = "Server"
    app = getters.app(AppBase)

    def picture(self, view: View, width: int, height: int) -> Picture:
        source = self.app.source
        assert isinstance(source, OpenAISource | ReplicaSource)
        name, poller = source.server_of(self.app.session.id)
        rows: list[Runs] = [Row(name, "ink").done(width)]
        notice, tone = ("no server has answered yet" if poller is None else poller.trouble), "bad"
        if not notice and poller is not None and poller.no_metrics:
            notice, tone = f"{poller.no_metrics}: no metrics (SGLang needs --enable-metrics)", "dim"
        rows += wrapped(notice, tone, width)
        history = list(poller.history)[-width:] if poller is not None else []
        tall = height >= len(rows) + 2 * len(FIGURES)
        for field, label, formatter, unit, style, top in FIGURES:
            value = getattr(poller.metrics, field) if poller is not None else None
            row = Row(label, "dim").to(10)
            if value is None:
                row.add("unknown", "dim")
            else:
                row.add(formatter(value), "bold ink").add(f" {unit}", "dim")
            rows.append(row.done(width))
            if tall:
                rows.append(Row(spark([getattr(polled, field) or 0.0 for polled in history], top), style).done(width))
        return Picture(rows, note=[(f"1 bar = {POLL_S:g} s", "dim")], legend=[("from the server's /metrics", "dim")])


MISSING = (
    "KV events do not name requests, steps or blocks in memory, so lanes, steps, users and the order of eviction are "
    "unknown. To see them, start vLLM with --scheduler-cls minitui.vllm.RecordingScheduler."
)


class CachedTexts(RadixTree):
    """The tree of cached texts. Its figures are only those that the events contain."""

    TITLE = "Cached texts"
    NEEDS_STATE = False
    BARS = False
    EMPTY = "no event has named a text yet"

    def _columns(self, width: int) -> tuple[tuple[str, int], ...]:
        return (("tokens", 7),)

    def _figures(self, view: View, node: NodeView) -> str:
        return count(len(node.ids), "token")

    def _below(self, view: View, width: int, height: int) -> list[Runs]:
        self.below = []
        return []

    def _foot(self, view: View, hidden: int, evictable: int, width: int) -> Runs:
        return Row(f"+{count(hidden, 'node')}" if hidden else "", "dim").done(width)

    def picture(self, view: View, width: int, height: int) -> Picture:
        picture = super().picture(view, width, height)
        picture.title = picture.title.replace("Radix tree", self.TITLE)
        picture.legend = legend((glyphs().evictable, "hit", "cached"))
        return picture


class CachePool(LinePanel, can_focus=False):
    """The size of the pool, its use and the cached blocks; below, what the tree does not show."""

    TITLE = "Pool"

    def __init__(self, source: KvSource, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._source = source

    def picture(self, view: View, width: int, height: int) -> Picture:
        source = self._source
        tree, dash = source.tree, glyphs().dash
        size = f"{source.num_blocks:,} blocks of {tree.size} tokens" if source.num_blocks else dash
        use = source.metrics.cache_use
        copies = f", {tree.copies:,} more are copies" if tree.copies else ""
        figures = [
            ("pool", size),
            ("in use", f"{100 * use:.0f} %" if use is not None else dash),
            ("cached", f"{count(len(tree), 'block')}{copies}"),
            ("stored", f"{count(tree.stored, 'block')}, {tree.removed:,} removed"),
        ]
        rows: list[Runs] = [Row(label, "dim").to(10).add(text, "ink").done(width) for label, text in figures]
        for sentence in self._sentences():
            rows += wrapped(sentence, "waiting", width)
        return Picture(rows[:height], legend=[(f"{source.events} · {count(source.messages, 'message')}", "dim")])

    def _sentences(self) -> list[str]:
        """Returns what the tree does not show, and why."""
        source = self._source
        sentences = []
        if source.joined is None:
            sentences.append(f"Nothing publishes KV events at {source.events}, or it is not reached yet.")
        elif not source.joined:
            sentences.append(f"The connection to {source.events} is lost; minitui tries again.")
        elif not source.messages:
            sentences.append(f"No message has arrived from {source.events}. " + (
                "" if source.replay else "Texts that were cached before are not shown: give the replay endpoint, too."
            ))
        if source.began_again:
            sentences.append(f"The tree began again: {source.began_again}.")
        if source.refused:
            sentences.append(f"{count(source.refused, 'message')} refused; the last one because {source.why_refused}.")
        if source.late:
            why = "the server keeps no older ones" if source.replay else "no replay endpoint is given"
            sentences.append(f"{source.late:,} earlier messages are unknown ({why}): older texts are not shown.")
        sentences += [f"Not shown: {what} ({count(n, 'event')})." for what, n in source.tree.left_out.most_common()]
        return [*sentences, *filter(None, [source.note, source.no_texts])]


class Missing(LinePanel, can_focus=False):
    """What KV events do not tell, and how to see it."""

    TITLE = "Lanes, steps"

    def picture(self, view: View, width: int, height: int) -> Picture:
        return Picture(wrapped(MISSING, "dim", width)[:height])
