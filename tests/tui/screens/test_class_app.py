"""`minitui class`: the bundled run sheet is played whole, with no other key than that of the next scene."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.screen import ModalScreen
from textual.widgets import TextArea

from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.options import engine_config
from minitui.settings import Settings
from minitui.sources.local import LocalSource
from minitui.sources.recording import RecordingSource
from minitui.teaching.class_file import ClassFile
from minitui.teaching.class_told import told_scenes
from minitui.teaching.lesson_progress import LessonProgress
from minitui.teaching.lessons import lesson
from minitui.teaching.run_sheet import ENGINE, read_run_sheet
from minitui.trace.reader import TraceReader
from minitui.tui.apps import class_app
from minitui.tui.apps.class_app import ClassApp
from minitui.tui.screens.lesson import LessonScreen
from minitui.tui.widgets.bars import StatusBar, TopBar
from tests.support.app.driving import until
from tests.tui.keys.test_keys import live


def test_a_lesson_s_screen_that_is_being_made_has_no_experiment_and_no_question(tmp_path: Path) -> None:
    screen = LessonScreen(lesson(1), LessonProgress(tmp_path / "lessons"), lambda: None, lambda *_: None)
    assert not screen.runs and screen.poll is None and screen.answered is None


def on_disk(folder: Path) -> list[dict[str, Any]]:
    """Returns the answers of the last scene, as a program that was killed now would leave them."""
    scene: dict[str, Any] = ClassFile(folder, "paging").scenes[-1]
    return list(scene["answers"])


async def test_the_run_sheet_is_played_whole_with_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_app, "KEEP_S", 0.02)
    sheet, choice = read_run_sheet(), choose_model(None)
    base = {"kv_blocks": None, "no_prefix_caching": False}
    local = LocalSource(engine_config(choice.name, **(base | ENGINE)), tmp_path / "log")
    source = RecordingSource(local, tmp_path / "class.trace")
    minute = [0.0]

    async def restart(options: dict[str, Any]) -> None:
        await source.reconfigure(engine_config(choice.name, **(base | options)))

    file = ClassFile(tmp_path, "paging")
    app = ClassApp(
        source, Chats(source, sampling=Sampling(temperature=0.0)), Settings(), system=choice.system,
        load_codec=load_codec, sheet=sheet, file=file, restart=restart, beat=0.001, clock=lambda: minute[0] * 60,
    )
    polls: list[str] = []
    with_runs: list[str] = []
    async with app.run_test(size=(120, 40)) as pilot:
        for number, scene in enumerate(sheet.scenes):
            await until(pilot, lambda number=number: app.number == number)
            mine = app.scene_for_lecturer()
            assert (mine["number"], mine["begins"] * 60) == (number + 1, mine["elapsed_s"]), "the class is late"
            assert mine["notes"] == scene.notes and app.scene_for_phones()["title"] == sheet.title
            await until(pilot, lambda: not app.playing or app.poll is not None)
            if app.poll is not None:  # the phones answer, and the key shows the answer
                ballot = app.audience.open
                assert ballot is not None and ballot.poll == app.poll
                polls.append(scene.title)
                assert app.class_keys == [("f8", "answer"), ("f9", "scenes")]
                app.audience.counted(ballot.number, [5, 30, *[0] * (len(ballot.counts) - 2)], 60)
                assert "35 of 60 have answered" in app.told and app.audience.state()["all"]["ask"]
                await until(pilot, lambda: any(asked["phones"] == 60 for asked in on_disk(tmp_path)))
                await pilot.press("f8")
                if scene.kind == "demo":  # the answer stays until the key is pressed again
                    await until(pilot, lambda: app.class_keys[0] == ("f8", "go on"))
                    assert app.number == number and app.playing
                    await pilot.press("f8")
                await until(pilot, lambda: app.poll is None and not app.playing)
                await until(pilot, lambda: "✓" in app.told)  # the counts stay, with a mark at the right choice
            if scene.kind == "lesson":
                screen = app.screen
                assert isinstance(screen, LessonScreen) and screen.reading.page is scene.lesson.pages[scene.at]
                run = scene.lesson.pages[scene.at].run
                if run is not None:
                    with_runs.append(scene.title)
                    await until(pilot, lambda s=screen: s.reading.at in s.reading.seen | s.reading.failed)
                assert not screen.reading.failed and app.stage is not None
                told = app.audience.state()["all"]["say"]
                if "The answer is" in told:
                    await until(pilot, lambda: app.audience.ballots[-1].right is not None)
                    assert f"The answer is {'abcd'[app.audience.ballots[-1].right]}: " in told
                assert ("The answer is" in told) == (scene.lesson.pages[scene.at].predict is not None), told
                screen.reading.running = True
                await until(pilot, lambda: app.class_keys[0] == ("f8", "to the end") and app._ran == app.clock())
                await pilot.press("f8")
                assert screen.reading.hurried and app.number == number, "the scene is left before its answer is shown"
                screen.reading.running = app.stage.hurried = screen.reading.hurried = False
                await pilot.press("f8")
                assert app.number == number, "a press just after the end of an experiment leaves its result"
            elif scene.kind == "recording":
                assert app.view.moment.horizon == scene.at and "H200" in app.source.info.device
            assert "stopped" not in app.story, app.story
            for step in range(scene.steps):
                await until(pilot, lambda: "f8 next step" in app.screen.query_one(StatusBar).text)
                assert app.scene_for_lecturer()["steps"] == scene.steps - step, "the page says another scene is next"
                await pilot.press("f8")
                await until(pilot, lambda step=step: app.view.history.steps.last == step)
            which = "next" if number + 1 < len(sheet.scenes) else "last"
            keys = f"f8 {which} scene  f9 scenes"
            await until(pilot, lambda keys=keys: keys in app.screen.query_one(StatusBar).text)
            if scene.kind in ("question", "chat"):
                await until(pilot, lambda scene=scene: app.pace == scene.slow)
                assert not isinstance(app.focused, TextArea), "the keys of the notes are typed into the prompt"
            assert app.scene_name == f"scene {number + 1}: {scene.title}"
            minute[0] += scene.minutes
            if number + 1 < len(sheet.scenes):
                await pilot.press("f9")
                assert isinstance(app.screen, ModalScreen)
                await pilot.press("f8")
                await until(pilot, lambda: not isinstance(app.screen, ModalScreen))
        assert minute == [50.0]
        await pilot.press("f8")
        assert app.number == len(sheet.scenes) - 1, "the last scene stays"
        app.lecturer_says("scene", 1)
        await until(pilot, lambda: app.number == 0 and not app.playing)
        mode = app.current_mode
        await pilot.press("f9")
        app.switch_mode("lecture")  # as a demo does
        app.switch_mode(mode)
        await pilot.pause()
        assert not isinstance(app.screen, ModalScreen)
    assert len(polls) >= 6
    kept = ClassFile(tmp_path, "paging")
    assert [scene["number"] for scene in kept.scenes] == [*range(1, len(sheet.scenes) + 1), 1]
    answered = [scene["title"] for scene in kept.scenes if scene["answers"]]
    assert any(answer["right"] is not None for scene in kept.scenes for answer in scene["answers"])
    assert answered == polls and all(s["answers"][0]["counts"][:2] == [5, 30] for s in kept.scenes if s["answers"])
    recordings = [name for scene in kept.scenes for name in (scene["recording"], *scene["more"])]
    assert recordings == sorted(set(recordings), key=lambda name: (len(name), name)), "in their order, each once"
    readers = {str(path): TraceReader(path) for path in tmp_path.glob("class*.trace")}
    assert {name for name, trace in readers.items() if trace.last_step > trace.step_before} <= {*recordings}
    assert any(scene["more"] and scene["told"] and scene["title"] in with_runs for scene in told_scenes(kept, 1000))
    for scene in kept.scenes:
        marks = TraceReader(Path(scene["recording"])).bookmarks
        assert any(text == f"scene {scene['number']}: {scene['title']}" for _, text in marks)


async def test_phones_name_requests_as_the_projector_does() -> None:
    async with live((120, 36)) as (app, pilot):
        app.story = "r2 waits for blocks of “r1”."
        await until(pilot, lambda: app.view.texts.request(2) == "#2·r2")
        rows = [row for step in range(200) if (row := app.view.history.steps.get(step)) is not None]
        step = next(row.step for row in rows if [chunk[0] for chunk in row.chunks] == [2])
        assert app.travel_to(step)
        await until(pilot, lambda: app.view.shown_step().step == step)
        shown = app.audience.state()["all"]
        assert shown["say"] == "#2·r2 waits for blocks of “r1”." and shown["bar"]["chunks"][0][0] == "#2·r2"
        app.story = ""
        assert app.audience.state()["all"]["say"].startswith("#2·r2 ")


async def test_a_scene_can_be_the_closing_questions_of_a_lesson(tmp_path: Path) -> None:
    sheet = tmp_path / "run.toml"
    sheet.write_text('title = "End"\n[[scene]]\ntitle = "Questions"\nminutes = 3\nlesson = 1\npage = 5\n')
    base, choice = {"kv_blocks": None, "no_prefix_caching": False}, choose_model(None)
    source = LocalSource(engine_config(choice.name, **(base | ENGINE)), tmp_path / "log")

    async def restart(options: dict[str, Any]) -> None:
        await source.reconfigure(engine_config(choice.name, **(base | options)))

    app = ClassApp(
        source, Chats(source, sampling=Sampling(temperature=0.0)), Settings(), system=choice.system,
        load_codec=load_codec, sheet=read_run_sheet(sheet), restart=restart,
    )
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, LessonScreen) and app.screen.reading.prepared)
        await until(pilot, lambda: not app.playing)
        assert isinstance(app.screen, LessonScreen) and app.screen.reading.page is None
        assert len(lesson(1).pages) == app.screen.reading.at == 4
        await until(pilot, lambda: app.gated and app.view.moment.horizon > 2)
        app.view.travel(-2)
        moment, bar = app.view.moment, app.screen.query_one(TopBar)
        await until(pilot, lambda: bar.text.endswith(f" {moment.travel_text}  {moment.gate_text}"))
        assert bar.text.startswith(" 0 Lesson  1  2  3  9 "), "the keys of the screens are enough"
