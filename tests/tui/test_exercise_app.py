"""`minitui exercise` in the application: the file runs when it is saved, and the panels show the step of a fault."""

from __future__ import annotations

from pathlib import Path

from minitui.chat.sessions import Chats
from minitui.exercises.attempt import Attempts
from minitui.exercises.table import EXERCISES
from minitui.settings import Settings
from minitui.tui.exercise_app import ExerciseApp, ExerciseSource
from minitui.tui.screens.exercise import ExerciseCompareScreen, ExerciseScreen
from minitui.tui.widgets.inspect.tree import RadixTree
from tests.exercises.planted import GOOD, PLANTED, source
from tests.support.driving import press, until


def exercise_app(tmp_path: Path, text: str) -> ExerciseApp:
    path = tmp_path / "exercise_evict.py"
    path.write_text(text, encoding="utf-8")
    exercise = ExerciseSource(Attempts(EXERCISES["evict"], tmp_path, cpu=2.0), path)
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


async def test_a_small_terminal_shows_the_function_and_not_only_its_explanation(tmp_path) -> None:
    app = exercise_app(tmp_path, EXERCISES["evict"].start)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, ExerciseScreen)
        await until(pilot, lambda: screen.is_mounted and "def evict(nodes: list[Node])" in screen.file.text)
        assert "return nodes[-1]" in screen.file.text


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
