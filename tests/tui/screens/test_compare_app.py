"""`minitui compare` in the application: two recordings, and two runs of a live engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.recording import RecordingSource
from minitui.teaching.compare import TracesOfRuns
from minitui.teaching.contrasts import CONTRASTS
from minitui.teaching.scenarios import DEMOS
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.apps.compare_app import CompareApp, DemoApp, RecordingsApp, TwoRecordings, compare_in_app
from minitui.tui.apps.demo import play_in_app
from minitui.tui.screens.compare import CompareScreen
from minitui.tui.widgets.bars import TopBar
from minitui.viewmodel.compare.comparison import Comparison
from minitui.viewmodel.compare.runs import recorded_view
from tests.support.app.driving import press, type_text, until
from tests.support.app.fake_client import ByteCodec, FakeSource, sampling


def recordings_app() -> RecordingsApp:
    paths = bundled()
    source = TwoRecordings((TraceReader(paths["small-pool"]), TraceReader(paths["h200-8b"])), ("small", "large"))
    return RecordingsApp(source, Chats(source), Settings(), system="")


@pytest.mark.parametrize(("size", "both"), [((80, 24), False), ((240, 70), True)])
async def test_two_recordings_are_shown_with_their_figures(size: tuple[int, int], both: bool) -> None:
    app = recordings_app()
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.view.earlier is not None)
        await press(pilot, "left")
        screen = app.screen
        assert isinstance(screen, CompareScreen)
        assert app.story.startswith("With large, compared with small, the ") and "did not do the same work" in app.story
        small, large = (run.figures for run in Comparison.of(app.view).runs)
        assert screen.runs.display and screen.figures.display == both
        heads = f"small · {small.time:,.0f} ms · {small.steps} steps", f"large · {large.time:,.0f} ms"
        assert all(head in screen.runs.text for head in heads)
        await press(pilot, "tab")
        assert screen.figures.display and screen.runs.display == both
        text = screen.figures.text
        assert re.search(rf"steps +{small.steps} +{large.steps} +×{large.steps / small.steps:.1f}", text)
        for _ in range(24):
            await pilot.press("down")
        assert "The engines differ in: model tutor and Qwen3-8B," in screen.figures.text
        assert ("S", "save") not in screen.hints(), "they are recordings already"
        await press(pilot, "2")
        assert app.current_mode == "inspect"
        app.story = "Which?\n   a) " + "block " * 60
        await until(pilot, lambda: "a) block" in app.screen.query_one(TopBar).text)
        rows = [line for line in app.screen.query_one(TopBar).text.splitlines() if "block block" in line]
        assert len(rows) > 1 and {line.index("block") for line in rows} == {8}, "the choice is indented"


class Changeable(FakeSource):
    """An engine that can be replaced, and reports the progress of its start as a real engine does."""

    report: Any = None

    async def start(self, on_progress: Any) -> None:
        self.report = on_progress
        await super().start(on_progress)

    async def reconfigure(self, config: Any) -> None:
        report = self.report
        report({"text": "loading the weights"})
        await self.restart(report)


async def test_a_contrast_runs_in_the_application_is_saved_and_opens_again(tmp_path: Path) -> None:
    contrast = CONTRASTS["pool"]
    traces = TracesOfRuns()
    source = traces.source = RecordingSource(Changeable(num_blocks=400), traces.path)

    def script(app: Any) -> Any:
        return compare_in_app(contrast, app, source.reconfigure, lambda prefix: traces.save(contrast, prefix))

    app = CompareApp(
        source, Chats(source, sampling=sampling(8)), Settings(), system="Answer.", load_codec=lambda info: ByteCodec(),
        script=script,
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.save is not None or "stopped" in app.story)
        shown = Comparison.of(app.view)
        assert [run.name for run in shown.runs] == ["24 blocks", "64 blocks"]
        assert [run.figures.replies for run in shown.runs] == [480, 480]
        assert app.view.notes == ("The replies were the same.",)
        await press(pilot, "S")
        for _ in range(len("compare")):
            await pilot.press("backspace")
        await type_text(pilot, str(tmp_path / "run"))
        await press(pilot, "enter")
        files = [tmp_path / "run.24-blocks.trace", tmp_path / "run.64-blocks.trace"]
        await until(pilot, lambda: all(file.exists() for file in files))
    first, second = (recorded_view(TraceReader(file)) for file in files)
    second.earlier = first
    again = Comparison.of(second)
    assert [run.figures for run in again.runs] == [run.figures for run in shown.runs], "the saved runs are others"
    with pytest.raises(EngineError, match="cannot be written"):
        traces.save(contrast, tmp_path / "no such directory" / "run")
    traces.close()
    assert not traces.path.parent.exists()


async def test_a_demo_of_two_settings_ends_with_both_runs_side_by_side() -> None:
    source = Changeable(num_blocks=400)

    def script(app: Any) -> Any:
        return play_in_app(DEMOS["batching"], app, source.reconfigure, 0.0)

    app = DemoApp(
        source, Chats(source, sampling=sampling(30)), Settings(), system="Answer.", load_codec=lambda info: ByteCodec(),
        script=script,
    )
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "X to play" in app.story or "stopped" in app.story)
        await press(pilot, "k")
        screen = app.screen
        assert isinstance(screen, CompareScreen), app.story
        assert app.progress is None, "the second engine is not loading any more"
        assert "X to play again (space pauses)." in screen.query_one(TopBar).text, "in one row: lanes need the rest"
        lines = screen.runs.text.splitlines()
        heads = [line for line in lines if re.search(r"\d steps · ", line) and "clock" not in line]
        assert [head.split(" · ")[0] for head in heads] == ["│ static batching", "│ continuous batching"]
        steps = [re.search(r"(\d+) steps", head)[1] for head in heads]
        assert all(f"{n} steps" in app.story for n in steps), "the text and the picture have the same figures"
        await press(pilot, "tab")
        # The names of the runs are not cut.
        await until(pilot, lambda: " static batching continuous batching " in screen.figures.text)
        await press(pilot, "2", "S", "0")
        assert app.current_mode == "compare"
        await press(pilot, "S")
        assert app.save is None
