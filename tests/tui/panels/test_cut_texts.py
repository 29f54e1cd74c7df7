"""No panel of Inspect cuts a row that it made itself: where it is narrow, it has a shorter text."""

from __future__ import annotations

from typing import Any

import pytest

from minitui.text import ms
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.panels import PANELS
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.rows import Row, plain
from minitui.viewmodel.view import View
from tests.viewmodel.test_spans import folded_view

SIZES = ((50, 10), (60, 11), (80, 12), (80, 17), (120, 12), (240, 30))  # of panels on terminals from 80x24 to 240x70


@pytest.fixture(scope="module", params=["h200-8b", "small-pool", "vllm-8b"])
def view(request: Any) -> View:
    return folded_view(TraceReader(find_trace(request.param)))


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_has_words_that_fit(name: str, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[tuple[int, int, str]] = []
    done, size = Row.done, (0, 0)

    def watched(self: Row, width: int, ground: str = "") -> Any:
        row = done(self, width, ground)
        whole = plain(tuple(self.runs)).rstrip()
        if len(whole) > width > 0:
            cut.append((*size, whole))
        return row

    monkeypatch.setattr(Row, "done", watched)
    drawn = 0
    for size in SIZES:
        if PANELS[name].column == "top" and size[0] < 80:
            continue  # they are always as wide as the terminal
        drawn += len(PANELS[name].widget(frame="box").framed(view, *size))
    assert drawn and not cut


@pytest.mark.parametrize("height", [8, 9, 10])
def test_small_timings_keep_the_times_of_the_host(view: View, height: int) -> None:
    """Lesson 10 reads the host's mean time in a panel of 8 rows, also beside several rows about what limits."""
    rows = [plain(row) for row in StepTimings().picture(view, 76, height).rows]
    mean = f"{ms(view.timings.host_ms)} ms"
    assert len(rows) <= height and any("host" in row and mean in row for row in rows), rows
