"""The panel of a mixture's experts: each cell against the records, from the engine's to the screen's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.params import SamplingParams
from minitui.dev.panel import stress_view
from minitui.dev.simulator import SMALL
from minitui.tui.glyphs import UNICODE, use_ascii
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.widgets.inspect.experts import ExpertMap
from minitui.viewmodel.history.experts import SUMMED, ExpertLoads
from minitui.viewmodel.view import View
from tests.support.models import make_runner, reference, save
from tests.support.records.panels import body
from tests.support.records.simulated import LiveStress, StressApp


def told(view: View, log: Any, step: int, load: list[tuple[int, list[int]]]) -> None:
    log.append("experts", step, load)
    view.fold(log.drain())


def rows_of(view: View, panel: ExpertMap, width: int = 40, height: int = 6) -> list[str]:
    return body(panel, view, width, height)


def test_the_engine_tells_what_its_experts_got(tmp_path: Path) -> None:
    runner = make_runner(save(reference("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1]), tmp_path))
    engine = Engine(runner, SchedulerConfig(64, 4, max_model_len=64), eos_ids=frozenset())
    engine.add_request(list(range(3, 23)), SamplingParams(max_tokens=4, temperature=0))
    while engine.has_work:
        runner.loaded._expert_load_due = 0.0
        engine.step()
    found = [record for record in engine.log.drain() if record[2] == "experts"]
    assert [record[3] for record in found] == [0, 1, 2, 3], "the step it stands at"
    sums = [[(layer, sum(tokens)) for layer, tokens in record[4]] for record in found]
    # Two experts for each of 20 tokens, then of one; the last layer sees only what is to be sampled.
    assert sums == [[(0, 40), (2, 2)]] + [[(0, 2), (2, 2)]] * 3


def test_a_model_without_experts_tells_nothing(tmp_path: Path) -> None:
    runner = make_runner(save(reference("qwen3"), tmp_path))
    engine = Engine(runner, SchedulerConfig(64, 4, max_model_len=64), eos_ids=frozenset())
    engine.add_request([3, 4, 5], SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
    assert not [record for record in engine.log.drain() if record[2] == "experts"]
    assert EngineConfig().quantization == "auto"


def test_the_load_is_that_of_the_last_records_before_a_step() -> None:
    loads = ExpertLoads()
    assert loads.at(100) is None
    for n in range(20):
        loads.read((n, n / 4, "experts", 10 * n, [(3, [n, 1])]))
    for step in (0, 55, 190):
        last = step // 10
        first = max(0, last - SUMMED + 1)
        load = loads.at(step)
        assert load is not None
        assert load.tokens.tolist() == [[sum(range(first, last + 1)), last - first + 1]]
        assert load.seconds == (last - max(0, first - 1)) / 4, "from the record before those that are summed"
    assert loads.at(-1) is None
    twice = loads.at(0)
    assert twice is not None
    assert twice.relative.tolist() == [[0.0, 2.0]]


def test_a_cell_is_an_expert_and_its_height_what_it_got() -> None:
    stress, view = stress_view(SMALL, 1.0, 5)
    panel = ExpertMap()
    assert "this model has no experts" in rows_of(view, panel)[0]
    told(view, stress.log, view.moment.horizon, [(0, [10, 10, 10, 10]), (5, [0, 5, 10, 65])])
    first, second, named = rows_of(view, panel, width=21)  # two columns each: 21 - 5 - 6 = 10 for four experts
    assert first == "L0   ▄▄▄▄▄▄▄▄    ×1.0"
    assert second == "L5   ··▁▁▂▂▇▇    ×3.2", "of a mean of 20: none, a quarter, half, 3.25 times"
    assert named.startswith("layer 0: e0 25.0 %")
    panel.action_layer(1)
    assert rows_of(view, panel, width=80)[-1].startswith(
        "layer 5: e3 81.2 %  e2 12.5 %  e1 6.2 %  of 80 tokens; 1 of 4 experts got none"
    )
    panel.action_layer(1)
    panel.action_layer(-1)
    last = rows_of(view, panel, width=90)[-1]
    assert last.startswith("layer 0"), "there is none below the last"
    assert last.rstrip().endswith("of 40 tokens; all 4 experts got some")


def test_more_experts_than_cells_show_the_hottest_of_each_cell_and_more_layers_scroll() -> None:
    stress, view = stress_view(SMALL, 1.0, 5)
    panel = ExpertMap()
    tokens = [1] * 128
    tokens[77] = 129
    told(view, stress.log, view.moment.horizon, [(layer, tokens) for layer in range(48)])
    rows = rows_of(view, panel, width=43, height=10)  # 32 cells of four experts
    assert len(rows) == 10
    assert rows[0][5:37].index(UNICODE.spark[7]) == 77 // 4
    assert [row[:3] for row in rows[:-1]] == [f"L{n} " for n in range(9)]
    for _ in range(20):
        panel.action_layer(1)
    rows = rows_of(view, panel, width=43, height=10)
    assert [row[:3] for row in rows[:-1]] == [f"L{n}" for n in range(12, 21)]
    assert panel.picture(view, 43, 10).note == [("4 experts per cell  13-21 of 48 layers", "dim")]


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 60)])
async def test_inspect_has_the_panel_once_the_model_has_told_of_experts(size: tuple[int, int]) -> None:
    app = StressApp(LiveStress(SMALL, 2.0), clock=lambda: 1000.0)
    async with app.run_test(size=size) as pilot:
        app.tick()
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, InspectScreen)
        panel = screen.query_one(ExpertMap)
        seen = []
        for _ in range(7):
            seen.append(screen.current)
            await pilot.press("tab")
        assert "experts" not in seen
        app.source.stress.log.append("experts", app.view.moment.horizon, [(0, [1, 2, 3, 4]), (1, [4, 4, 4, 4])])
        app.tick()
        while screen.current != "experts":
            await pilot.press("tab")
        app.tick()
        await pilot.pause()
        assert panel.region.area
        assert "L1" in panel.text
        use_ascii(True)
        panel.repaint()
        assert panel.text.isascii()
