"""A row of minitui/tui/panels.py is all that a new panel needs beside its class: one is added to a copy of minitui."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minitui.tui.panels import Panel, table
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.inspect.waterfall import Waterfall
from minitui.viewmodel.view import View
from tests.support.paths import ROOT

WIDGET = '''
"""The number of the last step."""
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import wrapped


class Odometer(LinePanel):
    TITLE = "Odometer"
    help_text = "The number of the last step."

    def picture(self, view, width, height):
        return Picture(wrapped(f"step {view.moment.horizon:,}", "ink", width))
'''
ROW = """    Panel(name="odometer", widget=Odometer, column="alone", every=3, turn=1, key="8",
        does="Show the number of the last step.", help="the number of the last step"),
"""
TEST = """
from minitui.tui import actions, openai_app
from minitui.tui.screens.help import ABOUT
from tests.support.driving import press, until
from tests.tui.test_keys import recording


async def test_the_panel_is_reached_painted_and_named_wherever_the_others_are():
    assert "Odometer       (8) the number of the last step" in ABOUT["inspect"]
    assert "odometer" in openai_app.need_records("there is no engine")
    async with recording((120, 40)) as (app, pilot):
        await press(pilot, "8")
        panel = app.screen._panels["odometer"]
        await until(pilot, lambda: "step 70" in panel.text)
        assert app.screen.current == "odometer" and panel.size.width == 120
        await press(pilot, "p")
        await until(pilot, lambda: not app.view.moment.still)
        seen = {panel.text}
        await until(pilot, lambda: seen.add(panel.text) or app.view.moment.still or len(seen) > 4)
        assert len(seen) > 4
        await press(pilot, "8")
        assert not panel.display and app.screen.current != "odometer"
        assert actions.BY_ID["odometer"] in app.actions
        app.commands.run_slash("/odometer")
        assert panel.display
"""
TESTS = (
    "tests/tui/test_widgets.py::test_each_panel_runs_alone[odometer]",
    "tests/tui/test_widgets.py::test_every_row_has_exactly_the_width_of_the_panel[small-Odometer]",
    "tests/tui/test_odometer.py",
)
def test_a_new_panel_needs_its_class_and_one_row(tmp_path: Path) -> None:
    for folder in ("minitui/tui", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("engine", *(f"minitui/{path.name}" for path in (ROOT / "minitui").iterdir())):
        if not (tmp_path / folder).exists():
            (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    (tmp_path / "minitui/tui/widgets/inspect/odometer.py").write_text(WIDGET, encoding="utf-8")
    (tmp_path / "tests/tui/test_odometer.py").write_text(TEST, encoding="utf-8")
    path = tmp_path / "minitui/tui/panels.py"
    rows = path.read_text(encoding="utf-8")
    rows = rows.replace("PANELS = table((\n", f"PANELS = table((\n{ROW}")
    rows = rows.replace("\n\n\n", "\nfrom minitui.tui.widgets.inspect.odometer import Odometer\n\n\n", 1)
    path.write_text(rows, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *TESTS],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0 and f"{len(TESTS)} passed" in run.stdout, run.stdout + run.stderr


class Unfinished(LinePanel):
    TITLE = "Unfinished"


class NoHelp(Unfinished):
    def picture(self, view: View, width: int, height: int) -> Picture:
        return Picture([])


WHOLE = {"name": "new", "widget": Waterfall, "column": "left", "every": 2, "help": "what it shows"}


@pytest.mark.parametrize(
    ("wrong", "lacks"),
    [
        ({"name": ""}, "lacks a `name`"),
        ({"widget": Unfinished}, "Unfinished inherits LinePanel.picture"),
        ({"widget": NoHelp}, "write `help_text` into NoHelp"),
        ({"column": "middle"}, "one of top, left, right, alone"),
        ({"every": 0}, "lacks a rate"),
        ({"turn": 2}, "lacks a rate"),
        ({"help": ""}, "lacks a line of `help`"),
        ({"column": "alone"}, "lacks `key` and `does`"),
        ({"key": "8", "does": "Show it."}, 'the column "alone"'),
    ],
)
def test_a_row_that_lacks_something_is_refused_with_a_sentence(wrong: dict, lacks: str) -> None:
    Panel(**WHOLE)
    with pytest.raises(TypeError, match=r"in minitui/tui/panels\.py lacks") as refused:
        Panel(**WHOLE | wrong)
    assert lacks in str(refused.value)


def test_two_panels_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match=r"two panels in minitui/tui/panels\.py are named 'new'"):
        table((Panel(**WHOLE), Panel(**WHOLE | {"widget": Vitals, "column": "top"})))
    with pytest.raises(TypeError, match="there is no such panel"):
        table((Panel(**WHOLE | {"part_of": "old"}),))
