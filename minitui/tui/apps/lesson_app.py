"""The application with a lesson as its first screen; the other screens show the lesson's engine."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, cast

from textual.binding import Binding, BindingType
from textual.worker import Worker

from engine.errors import EngineError
from minitui.teaching.lesson_progress import LessonProgress
from minitui.teaching.lessons import LESSONS
from minitui.teaching.lessons.page import Lesson
from minitui.teaching.stage import Restart, Stage
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.demo import stage_of
from minitui.tui.screens.lesson import LessonScreen


class LessonApp(MinituiApp):
    """The application of `minitui lesson`. `restart(options)` replaces the engine by one with these options."""

    DEFAULT_MODE = "lesson"
    TABS = (("lesson", "0 Lesson"), *MinituiApp.TABS)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", "switch_mode('lesson')", "Lesson", id="lesson", tooltip="Back to the lesson", show=False),
        Binding("L", "choose_lesson", "Lessons", id="lesson.list", tooltip="All lessons", show=False),
    ]

    def __init__(
        self, *args: Any, lesson: Lesson, restart: Restart, progress: LessonProgress | None = None, **options: Any
    ) -> None:
        super().__init__(*args, script=lambda app: self._begin(), **options)
        self.lesson = lesson
        self.lesson_progress = progress or LessonProgress()
        self.restart = restart
        self.stage: Stage | None = None  # set when the engine has started
        self._changing: Worker[None] | None = None  # opens another lesson
        self.add_mode(
            "lesson", lambda: LessonScreen(self.lesson, self.lesson_progress, lambda: self.stage, self.open_lesson)
        )

    async def _begin(self) -> None:
        self.stage = stage_of(self, say=lambda text: None, restart=self.restart, home=self.lesson.options)
        # The screen begins the lesson at its next paint. `_open` is not called here: it would return to the first page.

    async def _open(self, lesson: Lesson, at: int | None) -> None:
        assert self.stage is not None
        self.switch_mode("lesson")
        self.clear_notifications()  # the restart has ended: its sentence would cover the page
        cast(LessonScreen, self.screen).begin(lesson, self.stage, at)

    def switch_mode(self, mode: str) -> Any:
        """Show a screen. Dialogs close: they would be over what their screen shows later."""
        while self.screen_stack[1:]:
            self.pop_screen()
        return super().switch_mode(mode)

    def say(self, text: str, error: bool = False) -> None:
        """Show a sentence. On the lesson's screen, only the newest is shown: several would cover the page."""
        if self.current_mode == "lesson":
            self.clear_notifications()
        super().say(text, error)

    def open_mode(self, mode: str) -> None:
        """Show a screen; in the chats, say how to return to the lesson: a digit could go into the text box."""
        super().open_mode(mode)
        if mode == "chat":
            self.say("ctrl+g, then 0: back to the lesson; L: all lessons")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow Escape to cancel an answer only in the chats: a running experiment needs the answers to its questions,
        and would have another result without them."""
        if action == "escape" and self.current_mode != "chat":
            return False
        return super().check_action(action, parameters)

    def action_choose_lesson(self) -> None:
        """Offer a list of the lessons, beginning at the current one. The engine restarts with the options of the chosen
        lesson."""
        by_name = {lesson.name: lesson for lesson in LESSONS}
        rows = [(lesson.name, self.lesson_progress.summary(lesson) or lesson.question) for lesson in LESSONS]

        def then(name: str) -> None:
            self.open_lesson(by_name[name])

        # The counts of the summary are not searched: "3" finds L3, not "3 of 7 pages read".
        searched = [f"{lesson.name} {lesson.question}" for lesson in LESSONS]
        names = [lesson.name for lesson in LESSONS]
        self.choose("Lessons", rows, then, searched, names.index(self.lesson.name) if self.lesson in LESSONS else 0)

    def open_lesson(self, lesson: Lesson, at_end: bool = False) -> None:
        """Restart the engine with this lesson's options, and show the lesson. `at_end`: its last page."""
        if self.stage is None:
            self.say("the engine is starting: another lesson can be opened when it has started")
        elif self._changing is None or self._changing.is_finished or self.lesson is not lesson:
            self.say(f"{lesson.name}: the engine restarts for this lesson")
            self._changing = self.run_worker(self._change(lesson, at_end), group="change", exclusive=True)

    async def _change(self, lesson: Lesson, at_end: bool = False) -> None:
        assert self.stage is not None
        screen = self.screen
        if isinstance(screen, LessonScreen):
            screen.workers.cancel_group(screen, "lesson")
        self.lesson = lesson
        try:
            await self._other_engine(lesson.options)
        except EngineError as error:
            self.say(str(error), error=True)
            return
        await self._open(lesson, -1 if at_end else None)

    async def _other_engine(self, options: dict[str, Any]) -> None:
        """Replace the engine by one with these options; texts are decoded as before."""
        assert self.stage is not None
        self.stage.home = options
        self.stage.forget_runs()
        await self.stage.other_engine(**options)
        self.view.texts.ids_to_text = (
            partial(self.chats.codec.decode, skip_special_tokens=False) if self.chats.codec else None
        )
