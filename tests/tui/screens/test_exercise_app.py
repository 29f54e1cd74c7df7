"""`minitui exercise` in the application: the file runs when it is saved, and the panels show the step of a fault."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from minitui.chat.sessions import Chats
from minitui.exercises.attempt import Attempt, Attempts
from minitui.exercises.table import EXERCISES
from minitui.settings import Settings
from minitui.tui.apps.exercise_app import ExerciseApp, ExerciseSource
from minitui.tui.screens.exercise import ExerciseCompareScreen, ExerciseScreen, ResultPanel
from minitui.tui.widgets.bars import StatusBar
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.viewmodel.words.narrate import narrate
from tests.exercises.planted import GOOD, PLANTED, source
from tests.support.app.driving import press, until


def exercise_app(tmp_path: Path, text: str, cpu: float = 2.0) -> ExerciseApp:
    path = tmp_path / "exercise_evict.py"
    path.write_text(text, encoding="utf-8")
    exercise = ExerciseSource(Attempts(EXERCISES["evict"], tmp_path, cpu=cpu), path)
    return ExerciseApp(exercise, Chats(exercise), Settings(), system="")


@contextlib.asynccontextmanager
async def shown(
    app: ExerciseApp, size: tuple[int, int], text: str
) -> AsyncIterator[tuple[Pilot[Any], ExerciseScreen]]:
    """Runs the application until the result or the file has this text."""
    async with app.run_test(size=size) as pilot:
        screen = app.screen
        assert isinstance(screen, ExerciseScreen)
        await until(pilot, lambda: screen.is_mounted and text in screen.result.text + screen.file.text)
        yield pilot, screen


async def test_a_file_that_is_saved_runs_and_the_panels_go_to_the_step_of_its_fault(tmp_path) -> None:
    app = exercise_app(tmp_path, source("evict", PLANTED["evict"]["in use"][0]))
    async with shown(app, (150, 44), "`evict` returned node") as (pilot, screen):
        attempt = app.exercise_source.attempt
        assert attempt is not None and attempt.step is not None
        await until(pilot, lambda: app.replay.ended)
        assert app.position == app.replay.trace.last_step == attempt.step, "the panels show the step of the fault"
        assert "def evict(nodes):" in screen.file.text
        await until(pilot, lambda: app.view.selection is not None)
        chosen = app.view.selection
        assert chosen is not None and f"`evict` returned {chosen.kind} {chosen.id}, but r" in attempt.broken
        stops = f"Your function broke a rule here, so the run stops: {attempt.broken.split(', ', 1)[1]}"
        assert stops in narrate(app.view, attempt.step)
        assert "evict " not in screen.query_one("#tree", RadixTree).text, "nothing tells the student's order"
        # A fault of the whole run is shown at its step, and the run goes on after it.
        app.exercise_source.file.write_text(source("evict", PLANTED["evict"]["most recent"][0]), encoding="utf-8")
        await until(pilot, lambda: "needed soon" in " ".join(screen.result.text.split()))
        attempt = app.exercise_source.attempt
        assert attempt is not None and attempt.step is not None
        await until(pilot, lambda: app.replay.paused and app.position == attempt.step)
        assert app.replay.trace.last_step > attempt.step
        app.exercise_source.file.write_text(source("evict", GOOD["evict"]), encoding="utf-8")
        await until(pilot, lambda: "Score 100" in screen.result.text and app.compared is not None)
        await press(pilot, "4")
        assert isinstance(app.screen, ExerciseCompareScreen)
        await until(pilot, lambda: app.story.startswith("All rules are kept. Score 100: prompt tokens computed"))
        await until(pilot, lambda: all(f"{name} ·" in app.screen.runs.text for name in ("reference", "yours")))
        await press(pilot, "0")
        assert app.screen is screen
        app.exercise_source.file.write_text("def evict(nodes)", encoding="utf-8")
        await until(pilot, lambda: "line 1: expected ':'" in screen.result.text)
        await until(pilot, lambda: app.compared is None)
        assert "run of the reference" in " ".join(screen.result.text.split())
        found = re.search(r"Result · evict · run (\d) at \d\d:\d\d:\d\d ", screen.result.text)
        assert found is not None and found[1] == "4", "a run with the same result is seen, too"
        app.exercise_source.file.unlink()
        await until(pilot, lambda: "cannot be read: No such" in " ".join(screen.result.text.replace("│", " ").split()))
        assert "expected" not in screen.result.text


def test_a_score_that_cannot_be_better_says_so() -> None:
    for name, figure, more in (("sample", 5.0, False), ("sample", 5.3, True), ("evict", 14_621.0, True)):
        panel = ResultPanel(EXERCISES[name], id="result")
        words = panel._next(Attempt(EXERCISES[name], "", None, figure, figure, (), ""))
        assert ("try another idea" in words) is more and ("100 is the most here" in words) is not more


async def test_what_the_function_printed_in_the_last_step_is_shown_whole_and_each_node_has_its_name(tmp_path) -> None:
    body = "print('nodes', 'word ' * 30, 'end', len(nodes))\n    " + PLANTED["evict"]["oldest"][0]
    app = exercise_app(tmp_path, source("evict", body))
    async with shown(app, (150, 44), "`evict` returned node") as (pilot, screen):
        attempt = app.exercise_source.attempt
        assert attempt is not None and f"printed in step {attempt.step}:" in screen.result.text
        assert re.search(r"word end \d+ ", " ".join(screen.result.text.split())), "the line is wrapped, not cut"
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: re.search(r"word end \d+ +│\n╰", screen.result.text))
        await pilot.resize_terminal(150, 44)
        await until(pilot, lambda: app.replay.ended)
        tree = screen.query_one("#tree", RadixTree)
        await until(pilot, lambda: "node 11" in tree.text and tree.icicle is not None)
        assert [bar.id for bar in tree.icicle.bars if bar.kind == "node" and f"node {bar.id}" not in tree.text] == []


async def test_the_file_opens_at_the_function_and_says_how_much_more_there_is(tmp_path) -> None:
    app = exercise_app(tmp_path, EXERCISES["evict"].start)
    async with shown(app, (80, 24), "return nodes[-1]") as (pilot, screen):
        above = re.search(r"(\d+) more lines above", screen.file.text)
        assert "def evict(" in screen.file.text and above is not None and "below" not in screen.file.text
        await until(pilot, lambda: "Press 2 to see the engine at step 52" in screen.result.text)  # there are no panels
        await until(pilot, lambda: "q quit" in screen.query_one(StatusBar).text)  # 80 columns have room for it
        await press(pilot, "up")
        assert f"{int(above[1]) - 1} more lines above, 1 more line below" in screen.file.text
        await press(pilot, *["pageup"] * 3)
        assert "    1  \"\"\"Exercise `evict`" in screen.file.text and "above" not in screen.file.text


async def test_a_save_during_a_run_stops_it_and_shows_the_new_file_at_once(tmp_path) -> None:
    app = exercise_app(tmp_path, source("evict", GOOD["evict"]), cpu=20.0)
    async with shown(app, (150, 44), "Score 100") as (pilot, screen):
        app.exercise_source.file.write_text(source("evict", "while True: pass  # for ever"), encoding="utf-8")
        await until(pilot, lambda: "# for ever" in screen.file.text)
        await until(pilot, lambda: "Running … The result before:" in screen.result.text)
        await until(pilot, lambda: "All rules are kept" in screen.result.text)
        began = time.monotonic()
        app.exercise_source.file.write_text(source("evict", PLANTED["evict"]["nothing"][0]), encoding="utf-8")
        await until(pilot, lambda: "returned None" in " ".join(screen.result.text.split()))
        assert time.monotonic() - began < 15 and "stopped" not in screen.result.text, "the first run has 20 s"


async def test_without_an_editor_the_application_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VISUAL", "no-such-editor --wait")
    said: list[str] = []
    app = exercise_app(tmp_path, source("evict", GOOD["evict"]))
    monkeypatch.setattr(app, "say", lambda text, error=False: said.append(text))
    async with shown(app, (80, 24), "Score 100") as (pilot, screen):
        assert "def evict(nodes):" in screen.file.text and not screen.query_one("#map").display
        await press(pilot, "e")
        assert "the editor 'no-such-editor' is not installed" in said[-1] and "exercise_evict.py" in said[-1]
        monkeypatch.setenv("VISUAL", "true")  # a terminal without application mode cannot be given away
        await press(pilot, "enter")
        assert "cannot be given to true" in said[-1]
