"""Moment: which moment of the history is shown. The present, a paused engine's last step, or a step in the past. The
panels show the figures of this moment, and mark what has just changed at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.gate import RUNNING
from minitui.viewmodel.history.history import History
from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.history.rates import BUCKET
from minitui.viewmodel.state.annotated_state import Eviction
from minitui.viewmodel.state.tree import Tree

GLOW_SECONDS, WARM_SECONDS = 0.4, 1.2  # after a change: full highlight, then fading highlight
EVICTED_SECONDS = 2.0  # after an eviction, the text is drawn as evicted
LIT_SECONDS = 1.0  # after a hit, its blocks are highlighted
STALL_FROM_MS = 250.0  # records may arrive this late


@dataclass(frozen=True, slots=True)
class Playback:
    """How a recording is played. `speed`: engine time that passes per second."""

    speed: float = 1.0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """The step in the past that is shown. `bucket` of `rates`: in which the step ended; `marks`: what it had then."""

    step: int
    bucket: int
    marks: dict[str, float]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens that requests took from the cache, and the prompt tokens of new requests that were computed."""

    saved: int  # prompt tokens of new requests
    resumed: int  # tokens that preempted requests took again
    missed: int

    @property
    def hit_rate(self) -> float | None:
        """The share of new requests' prompt tokens that came from the cache; None: no tokens."""
        return self.saved / (self.saved + self.missed) if self.saved + self.missed else None


class Moment:
    """The moment of a history that is shown: `shown` is the state at this moment."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.playback: Playback | None = None  # a recording is played: working time passes only with its records
        self.frozen = False  # the user froze the picture: no record is folded
        self.now = 0.0  # the time of the last frame
        self.begin()

    def begin(self) -> None:
        """Show the present of a history that was reset."""
        self.shown = self.history.live
        self.tree = Tree()
        self.past: Past | None = None  # None: the present is shown

    # ---- time

    @property
    def engine_now(self) -> float:
        """The present engine time in seconds; it also advances between records."""
        if self.history.folded_at is None:
            return self.history.live.state.t
        since = max(0.0, self.now - self.history.folded_at)
        if self.playback is not None:
            since *= 0.0 if self.playback.paused else self.playback.speed
        return self.history.live.state.t + since

    @property
    def working_now(self) -> float:
        """The working time at the moment of the picture, in seconds (see Rates)."""
        return self.history.rates.now if self.past is None else self.past.marks["now"]

    @property
    def picture_now(self) -> float:
        """The engine time at the moment of the picture, in seconds; it also advances between records."""
        return self.shown.state.t if self.exact else self.engine_now

    def begun(self, lane: Lane) -> bool:
        """True if the request had been submitted at the moment of the picture."""
        return lane.request.submitted <= self.shown.state.t

    @property
    def exact(self) -> bool:
        """True if the picture shows one exact step: engine or replay is paused, or the picture is of the past."""
        return self._stopped or self.past is not None

    @property
    def _stopped(self) -> bool:
        """True if the engine or the replay is paused."""
        paused = self.playback is not None and self.playback.paused
        return paused or self.history.live.state.gate == "closed"

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
        ms = (self.history.rates.now - self.history.result_at) * 1e3
        return ms if ms >= STALL_FROM_MS and self.past is None and self.shown.state.requests else 0.0

    @property
    def horizon(self) -> int:
        """The last step in the picture."""
        return self.newest if self.past is None else self.past.step

    @property
    def newest(self) -> int:
        """The last step of the present. Paused, this is a step that has ended: the steps in flight come after it."""
        steps = self.history.steps
        return steps.last_ended if self._stopped and steps.last_ended >= 0 else steps.last

    @property
    def oldest(self) -> int:
        """The oldest step to which the picture can go back; the newest step if there is no other."""
        at = self.history.steps.indices(self.history.steps.first, self.newest)
        ends = self.history.steps.column("end_seq")[at]
        kept = at[(ends > 0) & (ends >= self.history.past.first_seq)]
        return int(self.history.steps.column("step")[kept[0]]) if len(kept) else self.newest

    @property
    def planned_ahead(self) -> int | None:
        """The last planned step, if it is later than the step of an exact picture. Where steps overlap, the next step
        is planned before a step ends: requests, queue and blocks are then those after this plan."""
        planned = self.shown.state.step
        return planned if self.exact and planned > self.horizon else None

    @property
    def bucket(self) -> int:
        """The bucket of `rates` in which the picture's last step ended; the current bucket for a live picture."""
        return self.history.rates.bucket if self.past is None else self.past.bucket

    def recent(self, name: str, n: int, filling: bool = True) -> np.ndarray:
        """Returns the last `n` buckets of `rates`, oldest first. In the past, the last of them has only what came
        before the end of the picture's step. `filling` False: without the bucket that is being filled."""
        values = self.history.rates.series(name, n, self.bucket + filling)
        if self.past is not None and filling:
            state = self.shown.state
            levels = {"running": len(state.requests) - len(state.queue), "used": self.shown.used}
            values[-1] = (levels | self.past.marks)[name]
        return values

    def glow(self) -> np.ndarray:
        """uint8 [num_blocks]: 2 for a block that has just changed, 1 while its highlight fades, else 0. Paused or in
        the past: 2 for the blocks that the last step changed."""
        return self._glow(self.shown.changed)

    def glow_of(self, changed: float) -> int:
        """Returns the highlight, 0 to 2 as in `glow`, of a thing that last changed at engine time `changed`."""
        return int(self._glow(changed))

    def age(self, changed: Any) -> Any:
        """Returns how long ago, in seconds of the user, the engine time `changed` was; of a moving picture."""
        return (self.engine_now - changed) / (1.0 if self.playback is None else self.playback.speed)

    def _glow(self, changed: Any) -> Any:
        one = np.uint8(1)
        if self.exact:
            return 2 * one * (changed >= self.shown.step_began)
        age = self.age(changed)
        return one * (age < GLOW_SECONDS) + one * (age < WARM_SECONDS)

    def just_reused(self) -> frozenset[int]:
        """Returns the blocks that requests took from the cache in the last second; of an exact picture, in its step."""
        if self.exact:
            new = [blocks for t, blocks in self.shown.reuses if t >= self.shown.step_began]
        else:
            new = [blocks for t, blocks in self.shown.reuses if self.age(t) < LIT_SECONDS]
        return frozenset(block for blocks in new for block in blocks)

    def just_evicted(self) -> list[Eviction]:
        """Returns the last evictions of the last seconds; of an exact picture, of its step."""
        if self.exact:
            return [last for last in self.shown.evicted if last.t >= self.shown.step_began]
        return [last for last in self.shown.evicted if self.age(last.t) < EVICTED_SECONDS]

    @property
    def travel_text(self) -> str:
        """The text "PAST step 790, 22 back"; empty if the picture is live."""
        if self.past is None:
            return ""
        return f"PAST step {self.horizon:,}, {self.newest - self.horizon:,} back"

    @property
    def gate_text(self) -> str:
        """The text "PAUSED at step 812" or "RUNNING until the next eviction"; empty while the gate is open."""
        state, reason = self.history.live.state, self.history.gate_reason
        if state.gate == "open":
            return ""
        if reason.startswith(RUNNING):
            event = reason.removeprefix(RUNNING)
            return f"RUNNING until the next {'slow step' if event == 'slow' else event}"
        return f"PAUSED at step {state.step:,}" if state.step >= 0 else "PAUSED before step 0"

    @property
    def pace_text(self) -> str:
        """The text "slow motion ×50"; empty without slow motion."""
        pace = self.history.live.state.pace
        return f"slow motion ×{pace:g}" if pace != 1 else ""

    # ---- time travel

    def travel_to(self, step: int) -> bool:
        """Show the state after `step`; for the last or a later step, show the live picture. Failed steps are skipped.
        Returns True if a past step is shown; False for the live picture, or if the step is no longer kept."""
        if step >= self.newest:
            self.present()
            return False
        direction = -1 if step < self.horizon else 1
        row = self.history.steps.get(step)
        while row is not None and not row.end_seq:  # a failed step has no timing: skip it
            row = self.history.steps.get(row.step + direction)
        if row is None or row.end_seq < self.history.past.first_seq:
            return False
        self.shown = self.history.past.state_at(row.end_seq)
        bucket = int(self.history.steps.column("bucket")[row.step % self.history.steps.capacity])
        self.past = Past(row.step, bucket, self.history.rates.marked(row.step))
        self.tree.refresh(self.shown, self.now, force=True)
        return True

    def present(self) -> None:
        """Returns to the live picture."""
        self.past = None
        self.history.past.back_to_present()
        self.shown = self.history.live
        self.tree.refresh(self.shown, self.now, force=True)

    # ---- figures of the picture

    def speed(self, what: str) -> float:
        """Returns the tokens per second of "decode" or "prefill", of working time. In slow motion, when paused and in
        the past, it is that of the steps of the last second, from results to results without pauses: as the gaps of
        the requests are measured."""
        if not self.slowed and not self.exact:
            return self.history.rates.per_second(what, 1.0, self.bucket)
        last = self.horizon
        at = self.history.steps.indices(last - 511, last)
        took = self.history.steps.column("took")[at]
        at, took = at[~np.isnan(took)], took[~np.isnan(took)]
        recent = np.cumsum(took[::-1])[::-1] <= 1000.0  # the steps of the last second
        at, seconds = at[recent], float(took[recent].sum()) / 1e3
        decodes, accepted = (int(self.history.steps.column(name)[at].sum()) for name in ("decodes", "accepted"))
        tokens = decodes + accepted if what == "decode" else int(self.history.steps.prefilled(at).sum())
        return tokens / seconds if seconds else 0.0

    @property
    def reused(self) -> Reuse:
        """From the begin of the history to the moment of the picture."""
        totals = self.history.rates.totals if self.past is None else self.past.marks
        return Reuse(*(int(totals[f"total {name}"]) for name in ("cached", "resumed", "missed")))

    @property
    def reused_lately(self) -> Reuse:
        """In the last minute of working time."""
        return Reuse(*(int(self.recent(name, round(60 / BUCKET)).sum()) for name in ("cached", "resumed", "missed")))

    @property
    def knows_the_last_minute(self) -> bool:
        """False if the history does not have a whole minute of working time up to this moment."""
        return self.bucket * BUCKET >= 60

    @property
    def last_minute_s(self) -> float:
        """The seconds of working time of which the figures of the last minute are: at most 60."""
        return min(60.0, self.working_now)

    @property
    def last_minute(self) -> str:
        """Returns "in the last minute"; "since step 1,204" if the history is shorter and begins with this step."""
        return "in the last minute" if self.knows_the_last_minute else self.since_begin

    @property
    def since_begin(self) -> str:
        """Returns "since step 1,204": the history begins with this step."""
        return f"since step {self.history.steps.begin:,}"

    @property
    def dropped_s(self) -> float:
        """Seconds since records were missing the last time."""
        return max(0.0, self.now - self.history.dropped_at)
