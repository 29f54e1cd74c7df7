"""At a moment of a recording, the panels show the figures of its exported JSON: some forty of them, counted anew."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine.trace.state import State
from engine.trace.views import CACHED, FREE
from minitui.export import export
from minitui.text import ms
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.occupancy import Occupancy
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.inspect.trends import TrendCharts
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.history.steps import KINDS
from minitui.viewmodel.view import View
from tests.support.records.views import percentiles

NUMBER = r"(\d+(?:,\d{3})*(?:\.\d+)?)"


class Panels:
    """What the panels show at a moment, and how many of their figures were compared."""

    def __init__(self, view: View) -> None:
        self._view, self.compared = view, 0

    def shows(self, panel: LinePanel, size: tuple[int, int], pattern: str, *figures: object) -> None:
        """Compare the numbers at the groups of `pattern` with these, as the panels write them."""
        picture = panel.picture(self._view, *size)
        rows = [picture.title, plain([*picture.note]), *map(plain, picture.rows), plain([*picture.legend])]
        text = "\n".join(row.rstrip() for row in rows)
        found = re.search(pattern.replace("#", NUMBER), text)
        assert found is not None, f"{pattern} is not in:\n{text}"
        said = [f"{figure:,}" if isinstance(figure, int) else str(figure) for figure in figures]
        assert list(found.groups()) == said, (pattern, text)
        self.compared += len(said)


@pytest.mark.parametrize(("name", "step"), [("h200-8b", 265), ("small-pool", 60)])
def test_some_forty_figures_of_a_moment_are_those_of_the_exported_json(name: str, step: int, tmp_path: Path) -> None:
    reader = TraceReader(bundled()[name])
    view = recorded_view(reader)
    assert view.travel_to(step)
    view.frame(0.0)
    data = json.loads(export(reader.path, "json", tmp_path / "a.json").read_text(encoding="utf-8"))
    records = [record for record in data["records"] if record["seq"] <= view.moment.shown.state.seq]
    state = State.from_snapshot(data["start"])
    for record in records:
        state.apply(tuple(value for field, value in record.items() if field != "took_ms"))

    def of(kind: str) -> list[dict[str, Any]]:
        return [record for record in records if record["kind"] == kind]

    panels, (bar, timings) = Panels(view), (StepBar(frame="box"), StepTimings())

    # The step: its plan and its time.
    plan = next(record for record in of("step") if record["step"] == step)
    time = next(record for record in of("time") if record["step"] == step)
    chunks = [chunk[2] for chunk in plan["prefills"]]
    wide, decodes = (200, 2), plan["tokens"] - sum(chunks)
    panels.shows(bar, wide, "step #  # of # tokens  # decodes?", step, plan["tokens"], state.budget, decodes)
    for chunk in plan["prefills"]:
        panels.shows(bar, wide, f"r{chunk[0]} prefill #", chunk[2])
    took, device = ms(time["took_ms"]), time["device_ms"]
    if device is not None and device > 1.3 * time["took_ms"]:
        panels.shows(bar, wide, "  # ms on the device, ready # ms after step #", ms(device), took, step - 1)
    else:
        panels.shows(bar, wide, "  # ms", took)

    # The pool and the tree.
    free, active, shared, cached = state.counts
    total, percent = sum(state.counts), f"{100 * (1 - free / sum(state.counts)):.0f}"
    counts = active, shared, cached, free, total
    panels.shows(Occupancy(), (160, 2), "active #.*shared #.*cached #.*free # +of #", *counts)
    panels.shows(Occupancy(), (160, 2), "KV pool # %", percent)
    held = f"{100 * (active + shared) / total:.0f}"
    panels.shows(Vitals(), (200, 2), "pool +# % used, # % held", percent, held)
    nodes = [node for node in state.nodes.values() if node.id]
    panels.shows(RadixTree(), (120, 30), "· # nodes?, # tokens", len(nodes), sum(len(node.ids) for node in nodes))
    panels.shows(RadixTree(), (120, 30), "# tokens evictable", state.counts[CACHED] * state.block_size)

    # The requests and the cache.
    waiting, every = len(state.queue), len(data["start"]["requests"]) + len(of("submit"))
    panels.shows(Vitals(), (200, 2), r"running +# +\+# wait", len(state.requests) - waiting, waiting)
    panels.shows(RequestTable(), (120, 30), "# live", len(state.requests))
    panels.shows(RequestTable(), (120, 30), "# finished", every - len(state.requests))
    resumed = {record["request"] for record in of("admit") if record["reason"] == "resumed"}
    new = [record for record in of("match") if record["request"] not in resumed]
    saved = sum(record["tokens"] for record in new)
    prompts = sum(int(record["detail"].split(" of ")[1].split()[0].replace(",", "")) for record in new)
    rate = f"{100 * saved / prompts:.1f}"
    panels.shows(Vitals(), (200, 2), "hit rate +# %", rate)
    panels.shows(TrendCharts(), (120, 40), "hit of a prompt  p50 .*  hit rate of all # %", rate)
    panels.shows(RadixTree(), (120, 30), "# (?:prompt tokens )?saved", saved)

    # The times. Where steps overlap, the table has the times of the device.
    timed = [record for record in of("time") if "took_ms" in record]
    panels.shows(timings, (120, 12), "# steps in", len(timed))
    clock = "device_ms" if view.timings.by_device else "took_ms"
    decodes_took = [record["took_ms"] for record in timed if record["work"] == "decode"]
    panels.shows(Vitals(), (200, 2), "step +# ms median", ms(median(decodes_took)))
    assert sum(getattr(view.timings, kind).share for kind in KINDS) == pytest.approx(1.0)
    for kind, label in (("decode", "decode only"), ("mixed", "mixed"), ("prefill", "prefill only")):
        times = [record[clock] for record in timed if record["work"] == kind]
        figures = [len(times), *([ms(value) for value in (*percentiles(times), max(times))] if times else ["–"] * 3)]
        panels.shows(timings, (120, 12), f"{label} +# +([^ ]+) +([^ ]+) +([^ ]+)", *figures)
    slowest = max(timed, key=lambda record: record["took_ms"])
    panels.shows(timings, (100, 9), "slowest +# ms step #", ms(slowest["took_ms"]), slowest["step"])
    first = of("first")[-1]
    parts = ms(first["queue_ms"]), ms(first["prefill_ms"])
    panels.shows(timings, (100, 9), f"r{first['request']} = queue # \\+ prefill #", *parts)
    host = [(record["plan_us"] + record["launch_us"] + record["commit_us"]) / 1e3 for record in timed]
    panels.shows(timings, (100, 9), r"\n(?:host|per step) .*?# ms", ms(sum(host) / len(host)))
    assert panels.compared >= 40 and state.counts[FREE] == free
