"""The view model: everything that the panels show, folded from records. This module does not import Textual.

View              call `reset` with a snapshot, `fold` with records, and `frame` before each painted frame;
                  `select` and `travel` change what the panels show
AnnotatedState    the state at one moment: `view.live` is the newest, `view.shown` the one on screen, live or past
Moment            the base of View: which moment is shown, and the figures of this moment
History           the base of Moment: what is folded from records (history.py lists it)
Tree              the radix tree in display order
WasteFigures      unused slots, copies of blocks, tokens computed again
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from engine.core.gate import RUNNING
from engine.trace.eviction import EVICTION_POLICIES
from engine.trace.records import Record
from engine.trace.waste import WasteFigures, waste_of
from minitui.viewmodel.board import Board
from minitui.viewmodel.explain.timing import Timings, summarise
from minitui.viewmodel.history.events import Event, describe
from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.history.steps import StepRow, Steps
from minitui.viewmodel.moment import Moment, Past, Playback
from minitui.viewmodel.selection import Links, Selection, resolve
from minitui.viewmodel.state.annotated_state import AnnotatedState
from minitui.viewmodel.state.time_travel import PastStates
from minitui.viewmodel.state.tree import is_hidden, quoted, without_markup


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
    peak_step: int = -1

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
        peak = int(tokens.argmax())
        n = len(at)
        return cls(
            count=n,
            first=first,
            last=last,
            tokens=float(tokens.mean()),
            decodes=float(decodes.mean()),
            drafted=float(drafted.mean()),
            accepted=float(steps.column("accepted")[at].mean()),
            prefill_tokens=float(prefilled.mean()),
            chunks=chunks / n,
            peak_tokens=int(tokens[peak]),
            peak_step=int(steps.column("step")[at][peak]),
        )


__all__ = ["AnnotatedState", "Event", "Frame", "Lane", "Links", "Playback", "Selection", "StepRow", "View"]

TIMINGS_SECONDS = 0.5  # between two computations of the percentiles
WASTE_SECONDS = 0.5  # between two computations of the waste
QUOTE_WIDTH = 28


class View(Moment):
    """The history, the moment that is shown, and a picture of it (see above). Parameters called `now` are times of any
    monotonic clock."""

    def __init__(self) -> None:
        self.group_names: dict[str, str] = {}
        self.ids_to_text: Callable[[list[int]], str] | None = None
        self.caching = True  # prefix caching is on
        self.selection: Selection | None = None
        self.board: Board | None = None  # what a lesson shows besides the records
        self.home: str | None = None  # panels of a single request show only requests of this group; None: of all groups
        self.version = 0  # increases with each selection and each `put`: screens then paint again
        self.run_name = ""  # of a run that is compared with another run (see `keep_run`)
        self.earlier: View | None = None  # the run to compare with
        super().__init__()

    def _begin(self, live: AnnotatedState) -> None:
        super()._begin(live)
        self.steps_per_frame = 0
        self.last_frame = Frame()
        self.links = Links()
        self.timings = Timings()
        self._timings_at = (-1e9, -1)
        self.waste = WasteFigures()
        self.recomputed = 0  # tokens computed again after preemptions, if the state does not count them
        self._waste_at = -1e9
        self._still_moment: tuple[int, Past | None] | None = None  # `_still` at the last frame
        self._framed = live.state.step
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
        if self.frozen and self._still() == self._still_moment:
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
        moment = self._still()
        is_new_still, self._still_moment = moment is not None and moment != self._still_moment, moment
        late = 2 if self.tree.refresh(self.shown, now, force=is_new_still) else 1
        if is_new_still or now - self._waste_at >= late * WASTE_SECONDS:
            self._waste_at, self.waste, late = now, waste_of(self.shown.state), 2
            if self.waste.again is None:
                ended = min(self.horizon, self.steps.committed)
                self.recomputed = sum(lane.recomputed(ended) for lane in self.lanes.lanes.values())
        at, horizon = self._timings_at
        if is_new_still or (horizon != self.horizon and now - at >= late * TIMINGS_SECONDS):
            self._timings_at = (now, self.horizon)
            self.timings = summarise(self.steps, self.first_tokens, self.horizon, self.shown.state.seq)

    def _still(self) -> tuple[int, Past | None] | None:
        """Returns what identifies a picture that is still; None for one that moves."""
        return (self.shown.state.seq, self._travelled) if self.still else None

    # ---- selection

    def select(self, kind: str | None, id: Any = None) -> None:
        """Select a thing by kind ("request", "group", "block", "node" or "step") and id; None clears the selection."""
        self.selection = None if kind is None else Selection(kind, id)
        self.version += 1
        self.links = resolve(self.selection, self.shown, self.steps, self.requests_of)

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

    def travel_to(self, step: int) -> bool:
        past = super().travel_to(step)
        if past or step >= self.newest:
            self.leave_step(self.horizon)
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

    def begins_in_cache(self, ids: Sequence[int]) -> bool | None:
        """Returns whether the engine's cache has the first block of a prompt; None: unknown, or there is no cache."""
        state = self.live.state
        if not self.loaded or not self.caching:
            return None
        first = array("i", ids[: state.block_size])
        return any(state.nodes[child].ids[: state.block_size] == first for child in state.nodes[0].children)

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

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; without a tokenizer, the ids as numbers."""
        if self.ids_to_text is None:
            return " ".join(map(str, ids))
        return self.ids_to_text(list(ids))

    def group_name(self, group: str) -> str:
        return self.group_names.get(group, group)

    def event_text(self, event: Event, short: bool = False) -> str:
        """Returns the event as a sentence, or in few words for narrow panels if `short`."""
        if event.kind == "refuse" and event.record.group:  # a refused request has no number: name its chat
            return f"chat {self.group_name(event.record.group)} · {event.record.reason}"
        lane = self.lanes.lanes.get(event.request)
        if short:
            return describe(event, lane, short=True)
        words = self._words.get(event.seq)
        if words is None:
            if len(self._words) > 2000:
                self._words.clear()
            quote = ""
            if event.evicted and not is_hidden(array("i", event.evicted), self.decode):
                quote = quoted(without_markup(self.decode(array("i", event.evicted))), QUOTE_WIDTH)
            if event.kind == "finish" and lane is not None:
                stats = self.tokens.stats(lane, lane.finish_step)
                words = describe(event, lane, tok_s=None if stats is None else stats.tok_s)
                if lane.finish_step > self.steps.committed:  # its last token has no time yet
                    return words
            else:
                words = describe(event, lane, quote, order=EVICTION_POLICIES[self.live.state.eviction_policy].words)
            self._words[event.seq] = words
        return words
