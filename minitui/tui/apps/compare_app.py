"""The applications that show two runs: of a contrast or a demo, on a live engine, and of two recordings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from engine.errors import EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.records import Record
from minitui.sources.base import Progress, Source, Stream
from minitui.teaching.compare import run_contrast
from minitui.teaching.contrasts import Contrast
from minitui.teaching.stage import Restart
from minitui.trace.reader import TraceReader
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.demo import stage_of
from minitui.tui.apps.replay_app import NEED_CHATS, NO_CHATS, TraceCodec
from minitui.tui.screens.compare import CompareScreen, NewRunsScreen
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.viewmodel.compare.comparison import Comparison, key_of, settings_that_differ
from minitui.viewmodel.compare.runs import recorded_view, scored
from minitui.viewmodel.view import View

Save = Callable[[Path], list[Path]]  # saves the runs under names that begin with a path; returns the files
ONLY_READ = "these are recordings: `minitui replay FILE` plays one of them step by step"
UNLIKE = "The two runs did not do the same work: see the figures (tab)."


class CompareApp(MinituiApp):
    """The application with a screen for two runs of its engine."""

    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "compare": NewRunsScreen}
    DEFAULT_MODE = "compare"
    TABS = (("compare", "0 Compare"), *MinituiApp.TABS)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", "switch_mode('compare')", "Compare", id="compare", tooltip="Two runs on one clock", show=False)
    ]
    save: Save | None = None  # None: the runs have not ended

    def tell(self, infos: Sequence[EngineInfo]) -> None:
        """Show the sentence about the two runs under the top bar. `infos`: facts about their engines."""
        comparison = Comparison.of(self.view, key_of(infos))
        self.story = f"{comparison.sentence} {UNLIKE if comparison.unlike else ''}"

    def action_save_runs(self) -> None:
        if self.save is None:
            self.say("the two runs can be saved when both have ended", error=True)
            return
        self.ask_text("Save both runs as recordings; their names begin with", "compare", self._save)

    def _save(self, text: str) -> None:
        try:
            if self.save is not None and text.strip():
                files = self.save(Path(text.strip()).expanduser())
                self.say(f"saved. Open them with: minitui compare {' '.join(map(str, files))}")
        except EngineError as error:
            self.say(str(error), error=True)


class DemoApp(CompareApp):
    """The application of a demo that compares two settings."""

    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "compare": CompareScreen}
    DEFAULT_MODE = "chat"


async def compare_in_app(contrast: Contrast, app: CompareApp, restart: Restart, save: Save | None) -> None:
    """Run a contrast, and show its runs while they go on. `save` copies their recordings."""
    app.asking = stage = stage_of(app, restart=restart, beat=0.0)
    try:
        outcome = await run_contrast(contrast, stage)
    except EngineError as error:
        app.story = f"The comparison stopped: {error}"
        return
    finally:
        app.asking = None
    app.save = save
    app.view.notes = (outcome.replies,)
    app.tell(outcome.infos)


class TwoRecordings(Source):
    """Two recordings, read whole. `first` and `second` are their views after `start`."""

    missing = "the recordings are being read"

    def __init__(
        self, readers: tuple[TraceReader, TraceReader], names: tuple[str, str], notes: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.notes = notes
        self.readers, self._names = readers, names
        self.infos = [reader.info for reader in readers]
        self.first = self.second = View()

    async def start(self, on_progress: Progress) -> None:
        with self._starting():
            on_progress({"text": "reading the recordings"})
            self.first, self.second = [
                await asyncio.to_thread(recorded_view, *one) for one in zip(self.readers, self._names, strict=True)
            ]
            self.info = self.infos[1]

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        raise InvalidRequest(NO_CHATS)

    async def control(self, verb: str, **arguments: Any) -> Any:
        raise InvalidRequest(ONLY_READ)

    async def snapshot(self) -> dict[str, Any]:
        return self.second.history.live.state.snapshot()

    def drain_records(self) -> list[Record]:
        return []


class RecordingsApp(CompareApp):
    """The application for two recordings. Inspect and Lecture show the second."""

    MODES: ClassVar[dict[str, Any]] = {"compare": CompareScreen, "inspect": InspectScreen, "lecture": LectureScreen}
    NOT_OFFERED: ClassVar[dict[str, str]] = {
        **CompareApp.NOT_OFFERED, **NEED_CHATS, "Engine": ONLY_READ, "back": "", "forward": "", "now": "",
    }
    TABS = tuple(tab for tab in CompareApp.TABS if tab[0] != "chat")

    def __init__(self, source: TwoRecordings, *args: Any, **options: Any) -> None:
        options["load_codec"] = lambda info: TraceCodec(source.readers[1])
        options["script"] = RecordingsApp._show
        super().__init__(source, *args, **options)
        self._recordings = source

    def group_names(self) -> dict[str, str]:
        return self._recordings.second.texts.group_names

    async def _show(self) -> None:
        view = self._recordings.second
        view.earlier = self._recordings.first
        differ = settings_that_differ(self._recordings.infos)
        view.notes = ((f"The engines differ in: {differ}.",) if differ else ()) + tuple(self._recordings.notes)
        self.view = self.feed.view = view
        self.tell(self._recordings.infos)
        figures = scored(self._recordings.readers, (view.earlier.run_name, view.run_name))
        self.story = f"{self.story} {figures}".strip()
