"""`minitui exercise` in the application: the file runs when it is saved, and the panels show the step of a fault."""

from __future__ import annotations

import re
import time
from pathlib import Path

from minitui.chat.sessions import Chats
from minitui.exercises.attempt import Attempts
from minitui.exercises.table import EXERCISES
from minitui.settings import Settings
from minitui.tui.apps.exercise_app import ExerciseApp, ExerciseSource
from minitui.tui.screens.exercise import ExerciseCompareScreen, ExerciseScreen
from minitui.tui.widgets.bars import StatusBar
from minitui.tui.widgets.inspect.tree import RadixTree
from tests.exercises.planted import GOOD, PLANTED, source
from tests.support.app.driving import press, until


def exercise_app(tmp_path: Path, text: str, cpu: float = 2.0) -> ExerciseApp:
    path = tmp_path / "exercise_evict.py"
    path.write_text(text, encoding="utf-8")
    exercise = ExerciseSource(Attempts(EXERCISES["evict"], tmp_path, cpu=cpu), path)
    return ExerciseApp(exercise, Chats(exercise), Settings(), system="")


async def test_a_file_that_is_saved_runs_and_the_panels_go_to_the_step_of_its_fault(tmp_path) -> None:
    app = exercise_app(tmp_path, source("evict", PLANTED["evict"]["in use"][0]))
    async with app.run_test(size=(150, 44)) as pilot:
        screen = app.screen
        assert isinstance(screen, ExerciseScreen)
        await until(pilot, lambda: screen.is_mounted and ", block" in screen.result.text)
        attempt = app.exercise_source.attempt
        assert attempt is not None and attempt.step is not None
        await until(pilot, lambda: app.replay.ended)
        assert app.position == app.replay.trace.last_step == attempt.step, "the panels show the step of the fault"
        assert "def evict(nodes):" in screen.file.text
        await until(pilot, lambda: app.view.selection is not None)
        chosen = app.view.selection
        assert chosen is not None and f"{chosen.kind} {chosen.id} was evicted while" in attempt.broken
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


async def test_the_file_opens_at_its_beginning_and_says_how_much_more_there_is(tmp_path) -> None:
    app = exercise_app(tmp_path, EXERCISES["evict"].start)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, ExerciseScreen)
        await until(pilot, lambda: screen.is_mounted and "    1  \"\"\"Exercise `evict`" in screen.file.text)
        below = re.search(r"(\d+) more lines below", screen.file.text)
        assert below is not None and "above" not in screen.file.text
        assert "q quit" in screen.query_one(StatusBar).text, "80 columns have room for it"
        await press(pilot, "down")
        assert f"1 more line above, {int(below[1]) - 1} more lines below" in screen.file.text
        await press(pilot, *["pagedown"] * 3)
        assert "return nodes[-1]" in screen.file.text and "below" not in screen.file.text


async def test_a_save_during_a_run_stops_it_and_shows_the_new_file_at_once(tmp_path) -> None:
    app = exercise_app(tmp_path, source("evict", GOOD["evict"]), cpu=20.0)
    async with app.run_test(size=(150, 44)) as pilot:
        screen = app.screen
        assert isinstance(screen, ExerciseScreen)
        await until(pilot, lambda: screen.is_mounted and "Score 100" in screen.result.text)
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
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, ExerciseScreen)
        await until(pilot, lambda: screen.is_mounted and "Score 100" in screen.result.text)
        assert "def evict(nodes):" in screen.file.text and not screen.query_one("#map").display
        await press(pilot, "e")
        assert "the editor 'no-such-editor' is not installed" in said[-1] and "exercise_evict.py" in said[-1]
        monkeypatch.setenv("VISUAL", "true")  # a terminal without application mode cannot be given away
        await press(pilot, "e")
        assert "cannot be given to true" in said[-1]
