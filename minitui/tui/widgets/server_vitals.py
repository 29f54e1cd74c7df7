"""Server: how is a server that tells no more of itself than its Prometheus page? What is not told is called unknown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Protocol, cast

from minitui.sources.server_metrics import POLL_S, Pulse
from minitui.text import duration
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, clean
from minitui.tui.widgets.vitals import spark
from minitui.viewmodel.model import View


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


# The field of Vitals, its label, its figure, its unit, its colour, and the spark's full height (0: its own maximum).
def _whole(value: float) -> str:
    return f"{value:,.0f}"


Figure = tuple[str, str, Callable[[float], str], str, str, float]
FIGURES: tuple[Figure, ...] = (
    ("tokens_per_s", "writes", _whole, "tok/s", "decode", 0.0),
    ("running", "running", _whole, "requests", "running", 0.0),
    ("waiting", "waiting", _whole, "requests", "waiting", 0.0),
    ("cache_use", "KV in use", _percent, "%", "pool", 1.0),
    ("hit_rate", "hit rate", _percent, "% of prompt tokens", "hit", 1.0),
    ("ttft_mean_s", "first", lambda seconds: duration(seconds * 1e3), "mean of all", "step", 0.0),
)


class Watches(Protocol):
    """An application over such a server."""

    def beside(self) -> tuple[str, Pulse | None]:
        """The name of the server that stands beside the chat, and its pulse."""


class ServerVitals(LinePanel, can_focus=False):
    """Six figures, each with its last polls as a spark."""

    TITLE = "Server"

    def picture(self, view: View, width: int, height: int) -> Picture:
        name, pulse = cast(Watches, self.app).beside()
        rows: list[Runs] = [Row(name, "ink").done(width)]
        told, tone = ("it has not answered yet" if pulse is None else pulse.trouble), "bad"
        if not told and pulse is not None and pulse.mute:
            told, tone = f"{pulse.mute}: it tells nothing of itself (SGLang does so with --enable-metrics)", "dim"
        rows += [Row(line, tone).done(width) for line in textwrap.wrap(clean(told), width)]
        history = list(pulse.history)[-width:] if pulse is not None else []
        tall = height >= len(rows) + 2 * len(FIGURES)
        for field, label, figure, unit, style, top in FIGURES:
            value = getattr(pulse.vitals, field) if pulse is not None else None
            row = Row(label, "dim").to(10)
            if value is None:
                row.add("unknown", "dim")
            else:
                row.add(figure(value), "bold ink").add(f" {unit}", "dim")
            rows.append(row.done(width))
            if tall:
                rows.append(Row(spark([getattr(then, field) or 0.0 for then in history], top), style).done(width))
        return Picture(rows, note=[(f"a bar is {POLL_S:g} s", "dim")], legend=[("as its /metrics tells", "dim")])
