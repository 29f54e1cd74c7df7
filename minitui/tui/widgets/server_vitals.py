"""Server: figures from a server's Prometheus page. A figure that is not on the page is shown as unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from minitui.sources.server_metrics import POLL_S, MetricsPoller
from minitui.text import duration
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, wrapped
from minitui.tui.widgets.vitals import spark
from minitui.viewmodel.view import View


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


class HasServer(Protocol):
    """The part of the application (ForeignApp, ForeignReplicaApp) that this panel uses."""

    def current_server(self) -> tuple[str, MetricsPoller | None]:
        """Returns (name, poller of the metrics) of the server that answers the current chat."""


class ServerVitals(LinePanel, can_focus=False):
    """Six figures. If there is room, each has a sparkline with the values of the last polls."""

    TITLE = "Server"

    def picture(self, view: View, width: int, height: int) -> Picture:
        name, poller = cast(HasServer, self.app).current_server()
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
