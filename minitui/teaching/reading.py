"""Reading: where a reader of a lesson is, and what the experiments have shown so far."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from engine.errors import EngineError
from minitui.teaching.lesson_progress import LessonProgress
from minitui.teaching.lessons.page import Check, Lesson, Page, Seen, fresh
from minitui.teaching.stage import Stage
from minitui.viewmodel.view import View


class Reading:
    """The current page of a lesson, and the results so far. The last page has the closing questions."""

    def __init__(self, lesson: Lesson, progress: LessonProgress | None = None) -> None:
        """Begin where the reader stopped. `progress`: None: nothing is kept."""
        self.lesson = lesson
        self.progress = progress or LessonProgress()
        self.at = self.progress.resume_at(lesson)
        self.predicted = self.progress.predictions(lesson)  # page -> choice
        self.typed: dict[int, str] = {}  # page -> the text that the reader typed for its experiment
        self.seen: dict[int, Seen] = {}  # page -> result of its experiment
        self.failed: dict[int, str] = {}  # page -> error of its experiment
        self.views: dict[int, View] = {}  # page -> picture of its run, if another page has run since
        self.in_engine: int | None = None  # the page whose run the engine's own picture shows
        self.ready = False  # the engine has started
        self.running = False  # an experiment runs
        self.hurried = False  # the reader skips the pauses of the running experiment
        self.by_hand = False  # each pause of the running experiment waits for a key
        # The reader wanted to run this page's experiment without a prediction, or an answer before the engine is ready.
        self.asked = False
        self.waits = False  # the page's experiment runs as soon as the engine is ready
        self.prepared = False  # the panels show the run that the closing questions ask about
        self.disturbed = False  # not any more: the engine has run on since then
        self._end: tuple[int, int, frozenset[int]] = (-1, -1, frozenset())  # of the closing run: see `_end_of`
        self.question = 0  # index of the current closing question
        self.answers: list[str] = []  # to the closing questions, as read from the closing run
        self.revealed: set[int] = set()  # the questions whose answers are shown

    @property
    def pages(self) -> int:
        return len(self.lesson.pages) + 1

    @property
    def page(self) -> Page | None:
        """The current page; None on the page of the closing questions."""
        return self.lesson.pages[self.at] if self.at < len(self.lesson.pages) else None

    @property
    def panel_has_content(self) -> bool:
        """True if the panel shows an experiment of this page or the subject of a closing question."""
        return self.page is None or self.running or self.at in self.seen or self.at in self.failed

    def turn(self, pages: int) -> bool:
        """Turn pages: forward, or back if negative. Returns False if there is no such page. A page that the reader
        leaves forward has been read. The last page has been read when it opens."""
        at = max(0, min(self.pages - 1, self.at + pages))
        if at > self.at:
            self.progress.mark_read(self.lesson, self.at)
        turned, self.at = at != self.at, at
        if turned:
            self.asked = self.waits = False
            if self.page is None:
                self.progress.mark_read(self.lesson, at)
        return turned

    @property
    def can_predict(self) -> bool:
        """True if the page asks for a prediction, and no experiment shows the answer or has shown it."""
        seen, predict = self.seen.get(self.at), self.page.predict if self.page is not None else None
        return predict is not None and not self.running and (seen is None or seen.answer is None)

    @property
    def asks(self) -> bool:
        """True if the page waits for a prediction: the reader has not made one."""
        return self.can_predict and self.at not in self.predicted

    def predict(self, choice: int) -> None:
        """Keep a prediction for this page."""
        self.predicted[self.at] = choice
        self.progress.mark_predicted(self.lesson, self.at, choice)

    def withdraw(self) -> None:
        """Forget the prediction for this page, if no experiment has shown the answer yet."""
        if self.can_predict:
            self.predicted.pop(self.at, None)

    def next_picture(self, stage: Stage) -> None:
        """End the current pause of the running experiment. The later pauses wait for this, too."""
        self.by_hand = True
        stage.next_picture()

    def hurry(self, stage: Stage) -> None:
        """Run the experiment to its end, without pauses."""
        stage.hurried = self.hurried = True

    @property
    def all_revealed(self) -> bool:
        """True if each closing question has been answered."""
        return len(self.revealed) == len(self.lesson.checks)

    @property
    def can_answer(self) -> bool:
        """True if there is an answer that is not shown yet."""
        return self.prepared and not self.all_revealed

    @property
    def check(self) -> Check:
        return self.lesson.checks[self.question]

    @property
    def panel(self) -> str:
        """The name of the panel for the current page or question; empty if it has none."""
        return self.page.panel if self.page is not None else self.check.panel

    # ---- the engine

    async def keep_picture(self, stage: Stage) -> None:
        """Keep the picture of the last run for that run's page: the next run begins with a new one."""
        self.look(stage.view)
        if self.disturbed:  # the panels do not show the closing run any more
            self.prepared = self.disturbed = False
            self.in_engine = None
        if self.in_engine is not None:
            stage.view.frame(time.monotonic())
            kept = stage.view.kept()
            await stage.feed.sync()
            self.views[self.in_engine] = kept
            self.in_engine = None

    def look(self, view: View) -> None:
        """Notice whether the engine has left the closing run: the reader can ask in a chat, or run a step. Answers that
        are shown go with the run: they would not agree with the panels."""
        closing = len(self.lesson.pages)
        self.disturbed = self.prepared and self.in_engine == closing and _end_of(view) != self._end
        if self.disturbed:
            self.revealed.clear()

    async def run(self, stage: Stage, run: Callable[[Stage], Awaitable[Seen]]) -> None:
        """Run the experiment of the current page, and keep its result or its error. Call `keep_picture` before."""
        at = self.at
        self.seen.pop(at, None)
        self.failed.pop(at, None)
        self.views.pop(at, None)
        self.running = True
        stage.hurried = self.hurried = stage.by_hand = self.by_hand = False
        stage.typed = self.typed.get(at, "")
        try:
            await fresh(stage)
            self.seen[at] = await run(stage)
            self.in_engine = at
        except EngineError as error:
            self.failed[at] = f"The experiment stopped: {error}"
            self.in_engine = at
        finally:
            self.running = stage.hurried = self.hurried = stage.by_hand = self.by_hand = False

    async def prepare(self, stage: Stage) -> None:
        """Bring the engine into the state that the closing questions ask about, without pauses: no panel shows the way
        there. Read the answers there, so that they are of this run."""
        at = self.at
        stage.hurried = True
        try:
            await self.keep_picture(stage)
            self.views.pop(at, None)
            self.failed.pop(at, None)
            self.revealed.clear()
            await fresh(stage)
            await self.lesson.close(stage)
            stage.state()
            stage.view.frame(time.monotonic())
            self.answers = [check.answer(stage) for check in self.lesson.checks]
            self._end = _end_of(stage.view)
            self.prepared, self.disturbed, self.in_engine = True, False, at
        except EngineError as error:
            self.failed[at] = f"The engine could not be prepared: {error}"
        finally:
            stage.hurried = False


def _end_of(view: View) -> tuple[int, int, frozenset[int]]:
    """Returns the numbers of the newest request and of the last step, and the requests that have not ended."""
    state = view.history.live.state
    return max(view.history.lanes.lanes, default=-1), state.step, frozenset(state.requests)
