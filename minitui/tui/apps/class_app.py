"""The application of `minitui class`: the scenes of a run sheet, one after the other, on one engine that stays warm."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

from textual.binding import Binding, BindingType

from engine.errors import EngineError
from minitui.teaching.class_file import ClassFile
from minitui.teaching.contrasts import CONTRASTS
from minitui.teaching.lessons import LESSONS
from minitui.teaching.run_sheet import RunSheet, Scene
from minitui.teaching.scenarios import DEMOS
from minitui.text import count
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.actions import key_label
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.audience import Ballot
from minitui.tui.apps.compare_app import DemoApp, TwoRecordings, compare_in_app
from minitui.tui.apps.demo import play_in_app
from minitui.tui.apps.lesson_app import LessonApp
from minitui.tui.screens.compare import CompareScreen
from minitui.tui.screens.lesson import LessonScreen
from minitui.tui.widgets.chat.transcript import Transcript
from minitui.viewmodel.compare.runs import recorded_view

MAX_TOKENS = {"lesson": 60, "question": 200, "chat": 200}  # of an answer; demos and comparisons have their own
AFTER = 200  # steps of a recording that can be shown after the step of its scene
KEEP_S = 2.0  # from an answer of a phone to the file of the class, at most
JUST_S = 2.0  # a press of the key so soon after the end of an experiment was meant for the experiment


class ClassApp(LessonApp, DemoApp):
    """The application for a run sheet. `file`: where scenes and answers are kept."""

    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "compare": CompareScreen}
    TABS = (("lesson", "0 Lesson"), *MinituiApp.TABS, ("compare", "9 Compare"))
    DEFAULT_MODE = "chat"
    THINK_S: ClassVar[float] = math.inf  # the key of the next scene shows the answer
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", "switch_mode('lesson')", "Lesson", id="lesson", tooltip="Back to the lesson", show=False),
        Binding("9", "switch_mode('compare')", "Compare", id="compare", tooltip="Two runs on one clock", show=False),
        Binding("f8", "next_scene", "Next scene", id="class.next", show=False, priority=True,
                tooltip="Show the answer of an open question, end an experiment, else open the next scene"),
        Binding("f9", "choose_scene", "Scenes", id="class.scenes", show=False, priority=True,
                tooltip="All scenes with their notes; a number opens one"),
    ]

    def __init__(
        self, *args: Any, sheet: RunSheet, file: ClassFile | None = None, beat: float = 1.0,
        clock: Callable[[], float] = time.monotonic, **options: Any,
    ) -> None:
        lesson = next((scene.lesson for scene in sheet.scenes if scene.kind == "lesson"), LESSONS[0])
        super().__init__(*args, lesson=lesson, **options)
        self.sheet, self.file, self.beat, self.clock = sheet, file, beat, clock
        self.number = -1  # of the open scene, from 0
        self._first = 0  # the scene that opens when the engine has started
        self.playing = False  # the scene is being opened, or plays by itself
        self.began = self.scene_began = clock()
        self._ran = -math.inf  # when an experiment was last seen to run
        self._steps = 0  # of the scene, which the key for the next scene runs first
        self._live, self._restarting = self.source, asyncio.Lock()
        self._noted: dict[str, Any] | None = None  # the open scene in the file of the class

    async def on_unmount(self) -> None:
        self._note_answers()
        self.source = self._live  # the application closes it

    async def _begin(self) -> None:
        await super()._begin()
        plain, self.restart = self.restart, self._whole
        self._restart = plain
        assert self.stage is not None
        self.stage.restart, self.stage.beat = self._whole, self.beat
        self.began = self.clock()
        self.set_interval(KEEP_S, self._note_answers)
        self.open_scene(self._first)

    async def _whole(self, options: dict[str, Any]) -> None:
        """Replace the engine. A scene that is left meanwhile does not interrupt this."""

        async def replaced() -> None:
            async with self._restarting:
                await self._restart(options)
                if self._noted is not None and (recording := self._live.recording_file) is not None:
                    self._noted["more"].append(str(recording.resolve()))
                    self._keep()

        await asyncio.shield(asyncio.ensure_future(replaced()))

    # ---- scenes

    @property
    def scene(self) -> Scene | None:
        return self.sheet.scenes[self.number] if self.number >= 0 else None

    def open_scene(self, number: int) -> None:
        """Open a scene, counted from 0: its engine is new, its cache empty, and no chat of another scene is left."""
        if self.stage is None:  # the engine is starting
            self._first = max(0, min(number, len(self.sheet.scenes) - 1))
        elif 0 <= number < len(self.sheet.scenes):
            self._note_answers()
            self.audience.forget()
            self.run_worker(self._play(number), group="change", exclusive=True)

    async def _play(self, number: int) -> None:
        scene = self.sheet.scenes[number]
        self.number, self.scene_began, self.playing = number, self.clock(), True
        self._ran, self._steps = -math.inf, scene.steps
        self.scene_name, self._noted = f"scene {number + 1}: {scene.title}", None
        try:
            await self._reset(scene)
            self._note_scene(scene)
            await getattr(self, f"_play_{scene.kind}")(scene)
        except EngineError as error:
            self.story = f"{self.scene_name} stopped: {error}"
        self.playing = False

    async def _reset(self, scene: Scene) -> None:
        assert self.stage is not None
        self.source, self.view = self._live, self.feed.view  # a recording was shown instead
        for screen in self.screen_stack:
            screen.workers.cancel_group(screen, "lesson")
        self.asking, self.story, self.feed.frozen = None, "", False
        self.chats.cancel_all()
        self.view.moment.present()
        most = MAX_TOKENS.get(scene.kind, 60)
        if scene.kind in ("demo", "compare"):
            most = (DEMOS[scene.what] if scene.kind == "demo" else CONTRASTS[scene.what]).max_tokens
        self.chats.sampling = replace(self.chats.sampling, max_tokens=most)
        for session in list(self.chats.sessions):
            self.chats.close(session)
        self.select_session(self.chats.new(self.system))
        await self._other_engine(scene.options)
        self.clear_notifications()

    async def _play_demo(self, scene: Scene) -> None:
        self.switch_mode("chat")
        demo = DEMOS[scene.what]
        await play_in_app(demo, self, lambda changes: self._whole(scene.options | changes), self.beat)

    async def _play_compare(self, scene: Scene) -> None:
        contrast = CONTRASTS[scene.what]
        self.switch_mode("compare")
        await compare_in_app(contrast, self, lambda changes: self._whole(contrast.options | changes), None)

    async def _play_lesson(self, scene: Scene) -> None:
        self.lesson = scene.lesson
        await self.switch_mode("lesson")  # until it is mounted: in another scene it was never opened
        await self._open(scene.lesson, scene.at)
        if not isinstance(screen := self.screen, LessonScreen) or (page := screen.reading.page) is None:
            return  # another screen was chosen, or the page has the closing questions
        if page.run is not None and page.predict is None:
            screen.reveal()

    async def _play_recording(self, scene: Scene) -> None:
        reader = TraceReader(find_trace(scene.what))
        view = await asyncio.to_thread(recorded_view, reader, "", scene.at + AFTER)
        still = TwoRecordings((reader, reader), ("", ""))
        still.info = reader.info
        self._names = self.group_names()  # the recording keeps its own
        self.source, self.view = still, view
        view.travel_to(scene.at)
        self.story = f"A recording of {reader.info.model} on {reader.info.device}.\nPress , and . for other steps."
        self.switch_mode(scene.screen or "lecture")

    async def _play_question(self, scene: Scene) -> None:
        await self._play_chat(scene)
        self.ask_question(scene.what)

    async def _play_chat(self, scene: Scene) -> None:
        assert self.stage is not None
        if scene.paused or scene.steps:
            await self.stage.gate()
        await self.source.control("pace", factor=scene.slow)
        await self.switch_mode(scene.screen or "chat")
        if transcripts := self.screen.query(Transcript):  # not the prompt: the next keys are J and X
            self.screen.set_focus(transcripts.first())

    def switch_mode(self, mode: str) -> Any:
        """Show a screen. A recording has no chats."""
        if mode == "chat" and self.source is not self._live:
            mode = "lecture"
        return super().switch_mode(mode)

    async def start_over(self) -> None:
        self.open_scene(max(0, self.number))

    # ---- keys, and the lecturer's page

    @property
    def _runs(self) -> bool:
        """An experiment of a lesson runs."""
        screen = self.screen if self.screen_stack else None
        return isinstance(screen, LessonScreen) and screen.runs

    @property
    def _answer_waits(self) -> bool:
        """A demo shows the answer of its question."""
        return self.asking is not None and self.asking.answer_waits

    def _frame(self) -> None:
        super()._frame()
        if self._runs:
            self._ran = self.clock()

    def _follows(self) -> tuple[str, Callable[[], object]]:
        """Returns what the key for the next scene does now: in words, and the action."""
        if self.poll is not None:
            return "answer", self._asks().reveal
        if self._answer_waits and self.asking is not None:
            return "go on", self.asking.reveal
        if self._runs:
            return "to the end", cast(LessonScreen, self.screen).action_hurry
        if self.clock() - self._ran < JUST_S:
            ended = "the experiment has just ended"
            return "next scene", lambda: self.say(f"{ended}: {self.class_keys[0][0]} again opens the next scene")
        if self._steps:
            return "next step", self._step
        if self.number + 1 < len(self.sheet.scenes):
            return "next scene", lambda: self.open_scene(self.number + 1)
        return "last scene", lambda: self.say("this was the last scene: f9 opens any of them again")

    def _step(self) -> None:
        self._steps -= 1
        self.action_do("step")

    def action_next_scene(self) -> None:
        self._follows()[1]()

    @property
    def shown_ballot(self) -> Ballot | None:
        """The newest question of the scene: its counts stay beside its answer."""
        return self.audience.ballots[-1] if self.audience.ballots else None

    @property
    def class_keys(self) -> list[tuple[str, str]]:
        keys = (("class.next", "f8", self._follows()[0]), ("class.scenes", "f9", "scenes"))
        return [(key_label(self.settings.keys.get(id, key)), what) for id, key, what in keys]

    def action_choose_scene(self) -> None:
        rows = [
            (f"{at + 1} {scene.title}", f"{scene.minutes:g} min. {' '.join(scene.notes.split())}")
            for at, scene in enumerate(self.sheet.scenes)
        ]
        names = [name for name, _ in rows]
        self.choose("Scenes", rows, lambda name: self.open_scene(names.index(name)), names, max(0, self.number))

    def lecturer_says(self, verb: str, number: int) -> None:
        if verb == "next":
            self.action_next_scene()
        elif verb == "scene":
            self.open_scene(number - 1)

    def scene_for_phones(self) -> dict[str, Any]:
        return {"title": self.sheet.title, "scene": self.scene_name}

    def scene_for_lecturer(self) -> dict[str, Any]:
        """Returns notes and minutes. Times are in whole seconds since the class and the scene began."""
        scene, at, now = self.scene, max(0, self.number), self.clock()
        following = self.sheet.scenes[at + 1].title if at + 1 < len(self.sheet.scenes) else ""
        return {
            "notes": scene.notes if scene is not None else "", "next": following, "number": self.number + 1,
            "minutes": scene.minutes if scene is not None else 0.0, "begins": self.sheet.begins(at),
            "of": self.sheet.minutes, "elapsed_s": int(now - self.began), "scene_s": int(now - self.scene_began),
            "scenes": [one.title for one in self.sheet.scenes], "asks": self.poll is not None,
            "runs": self._runs, "reads": self._answer_waits, "plays": self.playing, "steps": self._steps,
        }

    # ---- what is kept

    def _note_scene(self, scene: Scene) -> None:
        """Bookmark the scene in the recording, and note it in the file of the class."""
        recording, step = self._live.recording_file, -1
        if recording is not None:
            step = self._live.add_note(self.scene_name)
        if self.file is not None:
            self.file.data["title"] = self.sheet.title
            self._noted = {
                "number": self.number + 1, "title": scene.title, "began_s": round(self.scene_began - self.began),
                "recording": str(recording.resolve()) if recording is not None else "", "step": step, "more": [],
                "answers": [],
            }
            self.file.scenes.append(self._noted)
            self._keep()

    def _note_answers(self) -> None:
        """Keep the answers of the open scene in the file of the class."""
        answers = [
            {"question": ballot.poll.question, "choices": list(ballot.poll.choices), "counts": ballot.counts,
             "phones": ballot.phones, "right": ballot.right}
            for ballot in self.audience.ballots if ballot.scene == self.scene_name and ballot.answers
        ]
        if self._noted is not None and answers and answers != self._noted["answers"]:
            self._noted["answers"] = answers
            self._keep()

    def _keep(self) -> None:
        try:
            assert self.file is not None
            self.file.save()
        except EngineError as error:
            self.say(str(error), error=True)


def about(sheet: RunSheet) -> str:
    """Returns the scenes of a run sheet as text, with the minute in which each begins."""
    lines = [f"{sheet.title}: {count(len(sheet.scenes), 'scene')}, {sheet.minutes:g} minutes"]
    lines += [f"  {sheet.begins(at):5g}  {at + 1:2}  {scene.title}" for at, scene in enumerate(sheet.scenes)]
    return "\n".join(lines)
