"""The view model: everything that the panels show, folded from records. This module does not import Textual.

View              call `reset` with a snapshot, `fold` with records, and `frame` before each painted frame;
                  `select` and `travel` change what the panels show
AnnotatedState    the state at one moment: `view.live` is the newest, `view.shown` the one on screen, live or past
History           the base of View: what is folded from records, without the picture (history.py lists it)
Tree              the radix tree in display order
WasteFigures      unused slots, copies of blocks, tokens computed again
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.gate import RUNNING
from engine.trace.records import Record
from engine.trace.waste import WasteFigures, waste_of
from minitui.viewmodel.annotated_state import AnnotatedState, BlockEvent
from minitui.viewmodel.board import Board
from minitui.viewmodel.cost_model import FIT_STEPS
from minitui.viewmodel.events import Event, describe
from minitui.viewmodel.frame import Frame
from minitui.viewmodel.history import History
from minitui.viewmodel.lane import Lane
from minitui.viewmodel.rates import BUCKET
from minitui.viewmodel.selection import Links, Selection, resolve
from minitui.viewmodel.step_row import StepRow
from minitui.viewmodel.time_travel import PastStates
from minitui.viewmodel.timing import Timings, summarise
from minitui.viewmodel.tree import Tree, is_hidden, quoted, without_markup

__all__ = ["AnnotatedState", "Event", "Frame", "Lane", "Links", "Playback", "Selection", "StepRow", "View"]

TIMINGS_SECONDS = 0.5  # between two computations of the percentiles
FIT_SECONDS = 2.0  # between two fits of the cost model, whose steps are those of several seconds
WASTE_SECONDS = 0.5  # between two computations of the waste
GLOW_SECONDS, WARM_SECONDS = 0.4, 1.2  # after a change: full highlight, then fading highlight
QUOTE_WIDTH = 28
STALL_FROM_MS = 250.0  # records may arrive this late


@dataclass(frozen=True, slots=True)
class Playback:
    """How a recording is played. `speed`: engine time that passes per second."""

    speed: float = 1.0
    paused: bool = False


class View(History):
    """The history and a picture of it (see above). Parameters called `now` are times of any monotonic clock."""

    def __init__(self) -> None:
        self.group_names: dict[str, str] = {}
        self.ids_to_text: Callable[[list[int]], str] | None = None
        self.caching = True  # prefix caching is on
        self.selection: Selection | None = None
        self.board: Board | None = None  # what a lesson shows besides the records
        self.home: str | None = None  # panels of a single request show only requests of this group; None: of all groups
        self.playback: Playback | None = None  # a recording is played: working time passes only with its records
        self.frozen = False  # the user froze the picture: no record is folded
        self.version = 0  # increases with each selection and each `put`: screens then paint again
        self.run_name = ""  # of a run that is compared with another run (see `keep_run`)
        self.earlier: View | None = None  # the run to compare with
        self._now = 0.0
        super().__init__()

    def _begin(self, live: AnnotatedState) -> None:
        super()._begin(live)
        self.shown = live
        self.tree = Tree()
        self.steps_per_frame = 0
        self.last_frame = Frame()
        self.links = Links()
        self.timings = Timings()
        self._timings_at = (-1e9, -1)
        self._fitted_at = -1e9
        self.waste = WasteFigures()
        self._waste_at = -1e9
        # (record number, step travelled to) of the last frame; None if that frame's picture was not still.
        self._still_moment: tuple[int, int | None] | None = None
        self._framed = live.state.step
        self._travelled: int | None = None
        self._past_bucket = 0  # the bucket in which the step travelled to ended,
        self._past_marks: dict[str, float] = {}  # and what this bucket had then
        self._words: dict[int, str] = {}

    def kept(self) -> View:
        """Returns a view of what was folded since the last snapshot. The next call must be `reset`: until then, the two
        share their history."""
        kept = copy(self)
        kept.past = PastStates()  # frees the records: figures and lanes do not need them
        return kept

    def keep_run(self) -> None:
        """Keep what was folded since the last snapshot as `earlier`, the run to compare the next run with (see
        `kept`)."""
        self.earlier = self.kept()
        self.earlier.earlier = None
        self.run_name = ""

    def fold(self, records: list[Record], now: float = 0.0, packed: bytes | None = None) -> None:
        super().fold(records, now, packed)
        if self.live.merged:
            self._follow_merges(self.live.merged)

    def _follow_merges(self, merged: dict[int, int]) -> None:
        """Let the selection and the folded nodes refer to the nodes that are left."""
        chosen = self.selection
        if chosen is not None and chosen.kind == "node":
            while chosen.id in merged:
                chosen = self.selection = Selection("node", merged[chosen.id])
        for id in self.tree.folded & merged.keys():
            self.tree.folded.remove(id)
            self.tree.folded.add(merged[id])
        merged.clear()

    def frame(self, now: float) -> None:
        """Prepare a frame: summarise its steps, age the highlights, resolve the selection. The percentiles, the
        waste and the tree's order are computed at intervals, and at once for a new picture that is still. Each takes
        milliseconds in which no key is handled: what is due waits for the next frame if this frame computes another."""
        moment = (self.shown.state.seq, self._travelled) if self.still else None
        if self.frozen and moment == self._still_moment:
            return
        self._now = now
        if self.live.state.gate == "open" and self.loaded and self.playback is None:
            self.rates.advance(self.engine_now)
        last = self.steps.last
        self.steps_per_frame = max(0, last - self._framed) if last >= 0 else 0
        if self.steps_per_frame:
            self.last_frame = Frame.of(self.steps, self._framed + 1, last)
            self._framed = last
            self.lanes.forget_before(self.steps.first)
            self.events.forget_before(self.past.first_seq)
        if self._travelled is None:
            self.shown = self.live
        self.links = resolve(self.selection, self.shown, self.steps, self.requests_of)
        moment = (self.shown.state.seq, self._travelled) if self.still else None
        is_new_still, self._still_moment = moment is not None and moment != self._still_moment, moment
        late = 2 if self.tree.refresh(self.shown, now, force=is_new_still) else 1
        if is_new_still or now - self._waste_at >= late * WASTE_SECONDS:
            self._waste_at, self.waste, late = now, waste_of(self.shown.state), 2
        at, horizon = self._timings_at
        if is_new_still or (horizon != self.horizon and now - at >= late * TIMINGS_SECONDS):
            self._timings_at = (now, self.horizon)
            many = self.steps.last - self.steps.first >= FIT_STEPS  # with fewer steps, each fit is better than the last
            model = self.timings.model if many and not is_new_still and now - self._fitted_at < FIT_SECONDS else None
            if model is None:
                self._fitted_at = now
            self.timings = summarise(self.steps, self.first_tokens, self.horizon, self.shown.state.seq, model=model)

    # ---- figures of the picture

    def speed(self, what: str) -> float:
        """Returns the tokens per second of "decode" or "prefill". In slow motion, when paused and in the past, only
        time inside steps counts, so the delays between steps do not lower the speed."""
        if not self.slowed and not self.exact:
            return self.rates.per_second(what, 1.0, self.bucket)
        last = self.horizon
        at = self.steps.indices(last - 511, last)
        wall = self.steps.column("wall")[at]
        at, wall = at[~np.isnan(wall)], wall[~np.isnan(wall)]
        recent = np.cumsum(wall[::-1])[::-1] <= 1000.0  # the steps of the last second
        at, seconds = at[recent], float(wall[recent].sum()) / 1e3
        decodes, accepted = (int(self.steps.column(name)[at].sum()) for name in ("decodes", "accepted"))
        tokens = decodes + accepted if what == "decode" else int(self.steps.prefilled(at).sum())
        return tokens / seconds if seconds else 0.0

    @property
    def saved_in_the_last_minute(self) -> int:
        """Prompt tokens that requests took from the cache in the last minute of working time."""
        return int(self.recent("cached", round(60 / BUCKET)).sum())

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that came from the cache in the last minute; None: no prompt tokens."""
        saved, computed = self.saved_in_the_last_minute, self.recent("prefill", round(60 / BUCKET)).sum()
        return saved / (saved + computed) if saved + computed else None

    @property
    def knows_the_last_minute(self) -> bool:
        """False if no records of the beginning of the last minute are known."""
        return self.bucket * BUCKET >= 60 or self.steps.first <= 0

    @property
    def last_minute(self) -> str:
        """Returns "in the last minute"; "since step 1,204" if no earlier records of this minute are known."""
        return "in the last minute" if self.knows_the_last_minute else f"since step {self.steps.first:,}"

    @property
    def dropped_s(self) -> float:
        """Seconds since records were missing the last time."""
        return max(0.0, self._now - self.dropped_at)

    def block_history(self, block: int, most: int) -> list[BlockEvent]:
        """Returns the last `most` events of a block up to the picture's record, newest first."""
        seq, found = self.shown.state.seq, []
        for event in reversed(self.block_log):
            if block in event[4:] and event[0] <= seq:
                found.append(event)
                if len(found) == most:
                    break
        return found

    # ---- time

    @property
    def engine_now(self) -> float:
        """The present engine time in seconds; it also advances between records."""
        if self._folded_at is None:
            return self.live.state.t
        since = max(0.0, self._now - self._folded_at)
        if self.playback is not None:
            since *= 0.0 if self.playback.paused else self.playback.speed
        return self.live.state.t + since

    @property
    def working_now(self) -> float:
        """The working time at the moment of the picture, in seconds (see Rates)."""
        return self.rates.now if self._travelled is None else self._past_marks["now"]

    @property
    def picture_now(self) -> float:
        """The engine time at the moment of the picture, in seconds; it also advances between records."""
        return self.shown.state.t if self.exact else self.engine_now

    def begun(self, lane: Lane) -> bool:
        """True if the request had been submitted at the moment of the picture."""
        return lane.submitted_t <= self.shown.state.t

    @property
    def exact(self) -> bool:
        """True if the picture shows one exact step: engine or replay is paused, or the picture is of the past."""
        paused = self.playback is not None and self.playback.paused
        return paused or self.shown.state.gate == "closed" or self._travelled is not None

    @property
    def slowed(self) -> bool:
        """True if steps take longer than without slow motion, or are played slower than they were."""
        return self.shown.state.pace != 1 or (self.playback is not None and self.playback.speed < 1)

    @property
    def still(self) -> bool:
        """True if the picture does not change: frozen, paused or in the past."""
        return self.frozen or self.exact

    @property
    def idle(self) -> bool:
        """True if no request is running or waiting."""
        return not self.shown.state.requests

    @property
    def since_result_ms(self) -> float:
        """Working time since the results of the last step; 0 in the past, and if it is too short to be a stall."""
        ms = (self.rates.now - self._result_at) * 1e3
        return ms if ms >= STALL_FROM_MS and self._travelled is None and self.shown.state.requests else 0.0

    @property
    def horizon(self) -> int:
        """The last step in the picture."""
        return self.steps.last if self._travelled is None else self._travelled

    @property
    def bucket(self) -> int:
        """The bucket of `rates` in which the picture's last step ended; the current bucket for a live picture."""
        return self.rates.bucket if self._travelled is None else self._past_bucket

    def recent(self, name: str, n: int, filling: bool = True) -> np.ndarray:
        """Returns the last `n` buckets of `rates`, oldest first. In the past, the last of them has only what came
        before the end of the picture's step. `filling` False: without the bucket that is being filled."""
        values = self.rates.series(name, n, self.bucket + filling)
        if self._travelled is not None and filling:
            state = self.shown.state
            levels = {"running": len(state.requests) - len(state.queue), "used": self.shown.used}
            values[-1] = (levels | self._past_marks)[name]
        return values

    def glow(self) -> np.ndarray:
        """uint8 [num_blocks]: 2 for a block that has just changed, 1 while its highlight fades, else 0. Paused or in
        the past: 2 for the blocks that the last step changed."""
        return self._glow(self.shown.changed)

    def glow_of(self, changed: float) -> int:
        """Returns the highlight, 0 to 2 as in `glow`, of a thing that last changed at engine time `changed`."""
        return int(self._glow(changed))

    def _glow(self, changed: Any) -> Any:
        one = np.uint8(1)
        if self.exact:
            return 2 * one * (changed >= self.shown.step_began)
        age = (self.engine_now - changed) / (1.0 if self.playback is None else self.playback.speed)
        return one * (age < GLOW_SECONDS) + one * (age < WARM_SECONDS)

    def shown_step(self) -> StepRow | None:
        """Returns the step whose figures are shown: the selected step, else the last step of an exact picture, else the
        only step of the last frame. None if that frame has several steps."""
        if self.selection is not None and self.selection.kind == "step":
            row = self.steps.get(self.selection.id)
            if row is not None:
                return row
        if self.exact or self.last_frame.count <= 1:
            return self.steps.get(self.horizon)
        return None

    # ---- time travel

    def travel(self, steps: int) -> bool:
        """Move the picture by `steps` steps (negative: back). Returns the same as `travel_to`."""
        return self.travel_to(self.horizon + steps)

    def travel_to(self, step: int) -> bool:
        """Show the state after `step`; for the last or a later step, show the live picture. Failed steps are skipped.
        Returns True if a past step is shown; False for the live picture, or if the step is no longer kept."""
        if step >= self.steps.last:
            self.present()
            return False
        direction = -1 if step < self.horizon else 1
        row = self.steps.get(step)
        while row is not None and not row.end_seq:  # a failed step has no timing: skip it
            row = self.steps.get(row.step + direction)
        if row is None or row.end_seq < self.past.first_seq:
            return False
        self.shown = self.past.state_at(row.end_seq)
        self._travelled = row.step
        self._past_bucket = int(self.steps.column("bucket")[row.step % self.steps.capacity])
        self._past_marks = self.rates.marked(row.step)
        self.tree.refresh(self.shown, self._now, force=True)
        return True

    def present(self) -> None:
        """Return to the live picture."""
        self._travelled = None
        self.past.back_to_present()
        self.shown = self.live
        self.tree.refresh(self.shown, self._now, force=True)

    # ---- selection

    def select(self, kind: str | None, id: Any = None) -> None:
        """Select a thing by kind ("request", "group", "block", "node" or "step") and id; None clears the selection."""
        self.selection = None if kind is None else Selection(kind, id)
        self.version += 1
        self.links = resolve(self.selection, self.shown, self.steps, self.requests_of)

    def put(self, board: Board | None) -> None:
        """Show what a lesson shows besides the records; None: nothing."""
        self.board = board
        self.version += 1

    def subject(self) -> int | None:
        """Returns the request that panels of a single request show: the selected one, else the newest running one, else
        the last finished one. With a `home`, only requests of that group count."""
        requests = self.shown.state.requests
        known = [id for id in self.links.requests if id in self.lanes.lanes]
        if self.home is not None:
            own = [id for id in self.requests_of(self.home) if self.begun(self.lanes.lanes[id])]
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
        return next((lane.id for lane in reversed(self.lanes.ended) if lane.finish_step <= self.horizon), None)

    # ---- words

    @property
    def gate_text(self) -> str:
        """The text "PAUSED at step 812" or "RUNNING until the next eviction"; empty while the gate is open."""
        state = self.live.state
        if state.gate == "open":
            return ""
        if self.gate_reason.startswith(RUNNING):
            event = self.gate_reason.removeprefix(RUNNING)
            return f"RUNNING until the next {'slow step' if event == 'slow' else event}"
        return f"PAUSED at step {state.step:,}" if state.step >= 0 else "PAUSED before the first step"

    @property
    def pace_text(self) -> str:
        """The text "slow motion ×50"; empty without slow motion."""
        return f"slow motion ×{self.live.state.pace:g}" if self.live.state.pace != 1 else ""

    @property
    def travel_text(self) -> str:
        """The text "PAST step 790, 22 back"; empty if the picture is live."""
        if self._travelled is None:
            return ""
        return f"PAST step {self._travelled:,}, {self.steps.last - self._travelled:,} back"

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; without a tokenizer, the ids as numbers."""
        if self.ids_to_text is None:
            return " ".join(map(str, ids))
        return self.ids_to_text(list(ids))

    def group_name(self, group: str) -> str:
        return self.group_names.get(group, group)

    def event_text(self, event: Event, short: bool = False) -> str:
        """Returns the event as a sentence, or in few words for narrow panels if `short`."""
        if event.kind == "refuse" and event.record[3]:  # a refused request has no number: name its chat
            return f"chat {self.group_name(event.record[3])} · {event.record[4]}"
        if short:
            return describe(event, self.lanes.lanes.get(event.request), short=True)
        words = self._words.get(event.seq)
        if words is None:
            if len(self._words) > 2000:
                self._words.clear()
            quote = ""
            if event.evicted and not is_hidden(array("i", event.evicted), self.decode):
                quote = quoted(without_markup(self.decode(array("i", event.evicted))), QUOTE_WIDTH)
            words = self._words[event.seq] = describe(event, self.lanes.lanes.get(event.request), quote)
        return words
