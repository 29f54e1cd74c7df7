"""The view model: everything that the panels show, folded from records. This module does not import Textual.

View       call `reset` with a snapshot, `fold` with records, and `frame` before each painted frame; `select` and
           `travel` change what the panels show
History    `view.history`: what is folded from records (history/history.py lists it)
Moment     `view.moment`: which moment of the history is shown, and the figures of this moment
Texts      `view.texts`: the texts of tokens, chats and events

An AnnotatedState is the state at one moment: `view.history.live` is the newest, `view.moment.shown` the one on screen.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

from engine.trace.records import Record
from engine.trace.waste import WasteFigures, waste_of
from minitui.viewmodel.board import Board
from minitui.viewmodel.explain.cost_models import CostModels, first_model
from minitui.viewmodel.explain.timing import Timings, summarise
from minitui.viewmodel.history.history import History
from minitui.viewmodel.history.lane import OPEN
from minitui.viewmodel.history.steps import StepRow, Steps
from minitui.viewmodel.moment import Moment, Past
from minitui.viewmodel.selection import Links, Selection, resolve
from minitui.viewmodel.state.time_travel import PastStates
from minitui.viewmodel.words.texts import Texts

TIMINGS_SECONDS = 0.5  # between two computations of the percentiles
WASTE_SECONDS = 0.5  # between two computations of the waste


@dataclass(frozen=True, slots=True)
class Frame:
    """Means over the steps between two painted frames, and the peak, which is the step with the most tokens."""

    count: int = 0
    first: int = -1
    last: int = -1
    tokens: float = 0.0
    decodes: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    prefill_tokens: float = 0.0
    chunks: float = 0.0
    peak_tokens: int = 0

    @classmethod
    def of(cls, steps: Steps, first: int, last: int) -> Frame:
        """Returns the means over the kept steps from `first` to `last`."""
        at = steps.indices(first, last)
        if not len(at):
            return cls()
        tokens = steps.column("tokens")[at]
        decodes, drafted = steps.column("decodes")[at], steps.column("drafted")[at]
        prefilled = steps.prefilled(at)
        chunks = sum(len(steps.chunks(int(step))) for step in steps.column("step")[at][prefilled > 0])
        n = len(at)
        return cls(
            count=n, first=first, last=last, tokens=float(tokens.mean()), decodes=float(decodes.mean()),
            drafted=float(drafted.mean()), accepted=float(steps.column("accepted")[at].mean()),
            prefill_tokens=float(prefilled.mean()), chunks=chunks / n, peak_tokens=int(tokens.max()),
        )


class View:
    """The history, the moment that is shown, and a picture of it (see above). Parameters called `now` are times of any
    monotonic clock."""

    def __init__(self) -> None:
        self.history = History()
        self.moment = Moment(self.history)
        self.texts = Texts(self.history)
        self.selection: Selection | None = None
        self.board: Board | None = None  # what a lesson shows besides the records
        self.home: str | None = None  # panels of a single request show only requests of this group; None: of all groups
        self.version = 0  # increases with each selection and each `put`: screens then paint again
        self.run_name = ""  # of a run that is compared with another run (see `keep_run`)
        self.earlier: View | None = None  # the run to compare with
        self.notes: tuple[str, ...] = ()  # sentences about both runs, besides their figures
        self._begin()

    def _begin(self) -> None:
        self.run_end = OPEN  # the last step of a run that has ended; later steps of its engine are not part of it
        self.moment.begin()
        self.texts.begin()
        self.models = CostModels(self.history.steps)
        self.steps_per_frame = 0
        self.last_frame = Frame()
        self.links = Links()
        self.lit: frozenset[int] = frozenset()  # blocks of the last hits (see Moment.just_reused)
        self.timings = Timings()
        self._timings_at = (-1e9, -1)
        self.waste = WasteFigures()
        self.recomputed = 0  # tokens computed again after preemptions, if the state does not count them
        self._waste_at = -1e9
        self._still_moment: tuple[int, Past | None] | None = None  # `_still` at the last frame
        self._framed = self.history.live.state.step

    def reset(self, snapshot: dict[str, Any], recorded: Iterable[Record] | None = None) -> None:
        """Start again from a snapshot (`Engine.snapshot()`). `recorded`: all records of the recording that begins here,
        for the costs of its first steps."""
        self.history.reset(snapshot)
        self._begin()
        if recorded is not None:
            self.models.look_ahead(first_model(snapshot, recorded))

    def kept(self) -> View:
        """Returns a view of what was folded since the last snapshot. The next call must be `reset`: until then, the two
        share their history."""
        kept = copy(self)
        kept.history, kept.moment, kept.texts = copy(self.history), copy(self.moment), copy(self.texts)
        kept.moment.history = kept.texts.history = kept.history
        kept.history.past = PastStates()  # frees the records: figures and lanes do not need them
        return kept

    def keep_run(self) -> None:
        """Keep what was folded since the last snapshot as `earlier`, the run to compare the next run with (see
        `kept`)."""
        self.earlier = self.kept()
        self.earlier.earlier = None
        self.run_name = ""

    def fold(self, records: list[Record], now: float = 0.0, packed: bytes | None = None) -> None:
        """Fold records (see History.fold)."""
        self.history.fold(records, now, packed)
        if self.history.live.merged:
            self._follow_merges(self.history.live.merged)

    def _follow_merges(self, merged: dict[int, int]) -> None:
        """Let the selection and the folded nodes refer to the nodes that are left."""
        chosen = self.selection
        if chosen is not None and chosen.kind == "node":
            while chosen.id in merged:
                chosen = self.selection = Selection("node", merged[chosen.id])
        for id in self.moment.tree.folded & merged.keys():
            self.moment.tree.folded.remove(id)
            self.moment.tree.folded.add(merged[id])
        merged.clear()

    def frame(self, now: float) -> None:
        """Prepare a frame: summarise its steps, age the highlights, resolve the selection. The percentiles, the
        waste and the tree's order are computed at intervals, and at once for a new picture that is still. Each takes
        milliseconds in which no key is handled: what is due waits for the next frame if this frame computes another."""
        history, moment = self.history, self.moment
        if moment.frozen and self._still() == self._still_moment:
            return
        moment.now = now
        if history.live.state.gate == "open" and history.loaded and moment.playback is None:
            history.rates.advance(moment.engine_now)
        last = history.steps.last
        self.steps_per_frame = max(0, last - self._framed) if last >= 0 else 0
        if self.steps_per_frame:
            self.last_frame = Frame.of(history.steps, self._framed + 1, last)
            self._framed = last
            history.lanes.forget_before(history.steps.first)
            history.events.forget_before(history.past.first_seq)
        if moment.past is None:
            moment.shown = history.live
        self.links = resolve(self.selection, moment.shown, history.steps, history.requests_of)
        self.lit = moment.just_reused()
        still = self._still()
        is_new_still, self._still_moment = still is not None and still != self._still_moment, still
        late = 2 if moment.tree.refresh(moment.shown, now, force=is_new_still) else 1
        if is_new_still or now - self._waste_at >= late * WASTE_SECONDS:
            self._waste_at, self.waste, late = now, waste_of(moment.shown.state), 2
            if self.waste.again is None:
                ended = min(moment.horizon, history.steps.committed)
                self.recomputed = sum(lane.recomputed(ended) for lane in history.lanes.lanes.values())
        at, horizon = self._timings_at
        if is_new_still or (horizon != moment.horizon and now - at >= late * TIMINGS_SECONDS):
            self._timings_at = (now, moment.horizon)
            self.timings = summarise(history.steps, history.first_tokens, moment.horizon, moment.shown.state.seq)

    def _still(self) -> tuple[int, Past | None] | None:
        """Returns what identifies a picture that is still; None for one that moves."""
        moment = self.moment
        return (moment.shown.state.seq, moment.past) if moment.still else None

    # ---- selection

    def select(self, kind: str | None, id: Any = None) -> None:
        """Select a thing by kind ("request", "group", "block", "node" or "step") and id; None clears the selection."""
        self.selection = None if kind is None else Selection(kind, id)
        self.version += 1
        self.links = resolve(self.selection, self.moment.shown, self.history.steps, self.history.requests_of)

    def shown_step(self) -> StepRow | None:
        """Returns the step whose figures are shown: the selected step, else the last step of an exact picture, else the
        only step of the last frame. None if that frame has several steps."""
        if self.selection is not None and self.selection.kind == "step":
            row = self.history.steps.get(self.selection.id)
            if row is not None:
                return row
        if self.moment.exact or self.last_frame.count <= 1:
            return self.history.steps.get(self.moment.horizon)
        return None

    def travel(self, steps: int) -> bool:
        """Move the picture by `steps` steps (negative: back). Returns the same as `travel_to`."""
        return self.travel_to(self.moment.horizon + steps)

    def travel_to(self, step: int) -> bool:
        """Show the state after `step` (see Moment.travel_to). A selected other step is not selected any more."""
        past = self.moment.travel_to(step)
        if past or step >= self.moment.newest:
            self.leave_step(self.moment.horizon)
        return past

    def leave_step(self, step: int) -> None:
        """End the selection of another step than `step`: the picture goes there."""
        if self.selection is not None and self.selection.kind == "step" and self.selection.id != step:
            self.select(None)

    def put(self, board: Board | None) -> None:
        """Show what a lesson shows besides the records; None: nothing."""
        self.board = board
        self.version += 1

    def subject(self) -> int | None:
        """Returns the request that panels of a single request show: the selected one, else the newest running one, else
        the last finished one. With a `home`, only requests of that group count."""
        requests = self.moment.shown.state.requests
        known = [id for id in self.links.requests if id in self.history.lanes.lanes]
        if self.home is not None:
            own = [id for id in self.history.requests_of(self.home) if self.moment.begun(self.history.lanes.lanes[id])]
            known = [id for id in known if id in own] or own
            return max([id for id in known if id in requests] or known, default=None)
        if self.selection is not None and known:
            running = [id for id in known if id in requests]
            return max(running or known)
        if self.selection is not None and self.selection.kind == "group":
            return None
        running = [r.id for r in requests.values() if r.state == "running"]
        if running or requests:
            return max(running or requests)
        return next(
            (lane.id for lane in reversed(self.history.lanes.ended) if lane.finish_step <= self.moment.horizon), None
        )
