"""The lecture screen: a few sentences say what the step did and why. Below them are the step, the blocks and the tree.

Its main panels fit into 80×24 cells, because presenters enlarge their font. A presenter's remote sends Page Down,
Page Up, F5, Escape and `.`: Page Down and Page Up step forward and back, the others have no effect on the engine.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding

from minitui.teaching.prediction import Poll, verdict
from minitui.tui.actions import BY_ID
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bars import StatusBar, TopBar
from minitui.tui.widgets.base import Column, Columns
from minitui.tui.widgets.hit_card import HitCard
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.details import Details
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.lecture import FirstTokens, Why
from minitui.viewmodel.explain.predict import question_about, why_no_question
from minitui.viewmodel.view import View

ROOMY = (100, 34)  # (columns, rows); a screen of at least this size also shows the block table and the first tokens


class LectureScreen(BaseScreen[None]):
    """Arranges the panels and handles their messages. On request, asks for a prediction before each step."""

    BINDINGS: ClassVar = [
        Binding("pagedown,n", "next", "next step", show=False, id="lecture.next", tooltip="one step, or the answer"),
        Binding("pageup", "back", "back", show=False, id="lecture.back", tooltip="go one step back in time"),
        Binding("d", "predict", "predict", show=False, id="lecture.predict", tooltip="guess before each step"),
        Binding("c", "colour", "colours", show=False, id="lecture.colour", tooltip="colour by another property"),
        Binding("f5", "nothing", "nothing", show=False, id="lecture.f5", tooltip="no effect: a remote sends this key"),
        Binding("escape", "close", "close", show=False, id="lecture.close", tooltip="undo the zoom or the selection"),
    ]
    DEFAULT_CSS = """
    LectureScreen {
        layout: vertical; background: $ground; layers: base above;
        & #why { height: 7; }
        & #columns { height: 1fr; }
        & #left, & #right { width: 1fr; }
        & #map, & #tree { height: 1fr; }
        & #table { height: 6; display: none; }
        & #first { height: 8; display: none; }
        &.-phone #columns { layout: vertical; }
        &.-roomy #table, &.-roomy #first { display: block; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked_from = -1  # while a question about the next step is shown: the step in the picture; else -1
        self._stepping_from = -1  # while the step to predict has not ended: the step before it; else -1
        self.answered: tuple[Poll, int] | None = None  # the last question that was answered, and its right choice

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield HitCard()
        yield Why(id="why")
        yield StepBar(id="step")
        with Columns(id="columns"):
            with Column(id="left"):
                yield BlockMap(id="map")
                yield BlockTable(id="table")
            with Column(id="right"):
                yield RadixTree(id="tree")
                yield FirstTokens(id="first")
        yield Details(id="details")
        yield StatusBar()

    def on_mount(self) -> None:
        self._why, self._details = self.query_one(Why), self.query_one(Details)
        self._map, self._step = self.query_one(BlockMap), self.query_one(StepBar)
        self.lay_out()
        self._map.focus()

    def hints(self) -> list[Hint]:
        hints = super().hints()
        first = [("n", "next step")] if self._steps or self.app.view.moment.travel_text else []
        first += [(",", "back")]
        first += [("d", "predict"), ("p", "pause"), ("X", "start over")] if self._steps else []
        first += [h for h in hints if h[1] in ("help", "go to")]
        return first + [h for h in hints if h[1] in ("until", "slow motion", "replay", "commands")]

    @property
    def _steps(self) -> bool:
        """True if this application can let the engine run a step."""
        return not self.app.reason_against(BY_ID["step"])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Refuse predictions where no step can be asked for."""
        return action != "predict" or self._steps

    def on_resize(self, event: events.Resize) -> None:
        self.lay_out()

    def lay_out(self) -> None:
        """Lay the panels out: a small terminal shows a step bar without a frame, and no block table or first tokens."""
        if not hasattr(self, "_step"):
            return
        roomy = self.size.width >= ROOMY[0] and self.size.height >= ROOMY[1]
        self.set_class(roomy, "-roomy")
        self._step.frame = "box" if roomy else "none"
        self._step.styles.height = 4 if roomy else 2

    # ---- painting

    def paint(self, view: View) -> None:
        if hasattr(self, "_step"):
            self._ask_prediction(view)
            super().paint(view)

    def _ask_prediction(self, view: View) -> None:
        """When the step to predict has ended, show the picture of the step before it and ask for the prediction."""
        if view.history.steps.last < max(self._stepping_from, self._asked_from):  # the history was cleared
            self._stepping_from = self._asked_from = -1
            self._why.question = None
        if self._asked_from >= 0 and not view.moment.travel_text:  # the user returned to the present without an answer
            self._why.question, self._asked_from = None, -1
        before = self._stepping_from
        if before < 0 or view.history.steps.last <= before:
            return
        row = view.history.steps.get(before + 1)
        if row is None or not row.end_seq:
            return
        self._stepping_from = -1
        if view.travel_to(before):
            self._why.question = question_about(view, before + 1)
            self._asked_from = before
            if self._why.question is None:
                if reason := why_no_question(view, before + 1):
                    self.notify(reason, markup=False, timeout=6)
                self._reveal(view)

    @property
    def poll(self) -> Poll | None:
        """The question that is shown."""
        question = self._why.question if hasattr(self, "_why") else None
        return None if question is None else Poll(f"Step {question.step:,}: {question.text}", question.choices)

    def reveal(self) -> None:
        self.action_next()

    def _reveal(self, view: View) -> None:
        if self._why.question is not None and self.poll is not None:
            self.answered = self.poll, self._why.question.answer
        self._why.question, self._asked_from = None, -1
        view.moment.present()

    @property
    def open_choices(self) -> int:
        """The number of choices of the question that is shown; 0 if there is none."""
        return len(self.poll.choices) if self.poll is not None else 0

    def guess(self, choice: int) -> None:
        """Show the step, and whether the choice was right."""
        if (question := self._why.question) is not None:
            self._why.verdict = (question.step, verdict(choice, question.answer))
            self._reveal(self.app.view)
            self.paint(self.app.view)

    # ---- messages and actions

    def action_next(self) -> None:
        """If a question is shown, show the step instead. In the past, go one step forward. Else let the engine run a
        step."""
        view = self.app.view
        if self._asked_from >= 0:
            self._reveal(view)
        elif view.moment.travel_text:
            view.travel(1)
        else:
            if self._why.predicting:
                self._stepping_from = view.history.steps.last
            self.call_later(self.app.run_action, "do('step')")
            return
        self.paint(view)

    def action_back(self) -> None:
        view = self.app.view
        self._why.question, self._asked_from = None, -1
        self.app.travel_to(view.moment.horizon - 1)
        self.paint(view)

    def action_predict(self) -> None:
        predicting = self._why.predicting = not self._why.predicting
        if not predicting and self._asked_from >= 0:
            self._reveal(self.app.view)
        asking = "some steps begin with a question: answer it, then press n"
        notice = asking if predicting else "no step begins with a question"
        self.notify(notice, timeout=3, markup=False)

    def action_colour(self) -> None:
        self._map.action_colour()

    def action_close(self) -> None:
        """Undo the first of these that is active: popover, zoom of the map, selection."""
        if self._details.display:
            self._details.action_close()
        elif self._map.zoomed_at is not None:
            self._map.action_unzoom()
        else:
            self.app.view.select(None)

    def action_nothing(self) -> None:
        """Do nothing: a presenter's remote sends this key."""
