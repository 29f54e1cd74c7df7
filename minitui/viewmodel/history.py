"""The history: everything that is folded from records.

AnnotatedState    the newest state
PastStates        recent records and states, for time travel
Steps, Rates, Trends, Lanes, TokenTimes, Events, FirstTokens    what happened, in memory of fixed size
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import itemgetter
from typing import Any, ClassVar

from engine.trace.records import Record
from engine.trace.state import State
from minitui.viewmodel.annotated_state import AnnotatedState, BlockEvent
from minitui.viewmodel.cost_models import CostModels
from minitui.viewmodel.events import Events
from minitui.viewmodel.experts import ExpertLoads
from minitui.viewmodel.first_tokens import FirstTokens
from minitui.viewmodel.lanes import Lanes
from minitui.viewmodel.rates import Rates
from minitui.viewmodel.steps import Steps
from minitui.viewmodel.time_travel import PastStates
from minitui.viewmodel.tokens import TokenTimes
from minitui.viewmodel.trends import Trends

TIME = itemgetter(1)  # of a record
EMPTY = State(num_blocks=2, block_size=16, budget=1, max_num_seqs=1)
BLOCK_EVENTS_KEPT = 20_000
OF_STEPS = ("parts", "comm", "draft")  # kinds of records that only Steps folds


class History:
    """Call `reset` with a snapshot, then `fold` with the records after it."""

    def __init__(self) -> None:
        self.dropped = 0  # records missing from the history: lost, or dropped from a long backlog
        self.dropped_at = 0.0  # when records were missing the last time, by the caller's clock
        self.gap = False  # records are missing: `reset` with a snapshot is needed
        self.loaded = False
        self.missing = "the engine is starting"  # why nothing is loaded yet
        self.origin = 0.0  # engine time in seconds from which displayed times count: of the first snapshot, or record
        self._begin(AnnotatedState(EMPTY))

    def _begin(self, live: AnnotatedState) -> None:
        self.live = live
        self.steps = Steps()
        self.models = CostModels(self.steps)
        self.rates = Rates()
        self.trends = Trends()
        self.lanes = Lanes()
        self.tokens = TokenTimes(self.steps, self.lanes)
        self.events = Events()
        self.block_log: deque[BlockEvent] = deque(maxlen=BLOCK_EVENTS_KEPT)
        self.first_tokens = FirstTokens()
        self.experts = ExpertLoads()
        self.past = PastStates()
        self.past.begin(live)
        self.gate_reason = ""
        self._dropped: dict[int, int] = {}  # step in flight -> rows whose token is dropped
        self._result_at = 0.0  # working time of the last `time` record
        self._folded_at: float | None = None  # the caller's clock at the last fold

    def reset(self, snapshot: dict[str, Any]) -> None:
        """Start again from a snapshot (`Engine.snapshot()`); the history begins with it."""
        state = State.from_snapshot(snapshot)
        self._begin(AnnotatedState(state))
        self.gap, self.loaded = False, True
        self.origin = self.origin or state.t
        self.lanes.step = state.step
        self.steps.adopt(state)
        for request in state.requests.values():
            self.lanes.adopt(request, state.computed(request))

    def fold(self, records: list[Record], now: float = 0.0, packed: bytes | None = None) -> None:
        """Fold records; skip records that were folded before. If records are missing, nothing is folded and `gap` is
        set: call `reset`. `packed`: the same records as marshal bytes for the history, if the caller has them."""
        if not records or not self.loaded:
            return
        expected = self.live.state.seq + 1
        first = records[0][0]
        if first < expected:
            records, packed = records[expected - first :], None
            if not records:
                return
        elif first > expected:
            self._note_gap(first - expected, now)
            return
        missing = records[-1][0] - records[0][0] + 1 - len(records)
        if missing:
            self._note_gap(missing, now)
            return
        if self._folded_at is None:  # rates start at the first record
            self.origin = self.origin or records[0][1]
            self.rates.reset(records[0][1], self.live.state.gate == "closed", self.live.state.pace)
        self._folded_at = now
        rest = records
        while rest:
            part, rest = self._to_end_of_bucket(rest)
            self._fold_history(self.live.fold(part))
            self.rates.advance(part[-1][1])
            self._note_levels()
        self.past.keep(records, self.live, packed)

    def _to_end_of_bucket(self, records: list[Record]) -> tuple[list[Record], list[Record]]:
        """Returns the records up to the end of a bucket of the rates, and the others. Levels are noted at the end of
        each bucket, so they do not depend on the number of records that are folded at a time."""
        end = records[0][1] + self.rates.rest_of_bucket(records[0][1])
        if records[-1][1] < end:
            return records, []
        at = max(1, bisect_left(records, end, key=TIME))
        return records[:at], records[at:]

    def _note_gap(self, records: int, now: float) -> None:
        if not self.gap:
            self.dropped, self.dropped_at = self.dropped + records, now
        self.gap = True

    def _fold_history(self, records: list[tuple[Record, Any]]) -> None:
        """Fold the records that AnnotatedState.fold returned."""
        events, lanes, folds = self.events, self.lanes, self._FOLDS
        for record, found in records:
            kind = record[2]
            if kind == "evict":  # the most frequent kind; it belongs to no lane
                events.fold_evict(record, lanes.step, found)
                continue
            if kind == "step":
                self.tokens.before_step(record[3])
            self.steps.fold(record)
            if (fold := folds.get(kind)) is not None:
                fold(self, record)
            elif kind not in OF_STEPS:
                self._fold_decision(record, found)
        self.block_log.extend(self.live.block_events)
        self.live.block_events.clear()

    def _time(self, record: Record) -> None:
        steps, rates = self.steps, self.rates
        rates.advance(record[1])
        _, _, _, step, plan_us, launch_us, commit_us, wall_ms, device_ms, _ = record
        self.lanes.ended_step = step
        took_ms, host_ms = steps.took_ms(step), (plan_us + (launch_us or 0) + commit_us) / 1e3
        delayed_ms = steps.gate_ms(step)
        rates.add_durations(wall_ms if took_ms is None else took_ms, wall_ms, host_ms, device_ms, delayed_ms)
        rates.mark(step)
        steps.note_bucket(step, rates.bucket)
        self._result_at = rates.now
        self.trends.advance(rates.now)
        rows = steps.decoded(step) - self._dropped.get(step, 0)
        if rows > 0 and (gap := steps.gap_ms(step)) is not None:
            self.trends.add("token gaps", gap, rows)
        if self._dropped:
            self._dropped = {later: rows for later, rows in self._dropped.items() if later > step}
        for gap in self.tokens.after_preemptions(step):
            self.trends.add("token gaps", gap)

    def _step(self, record: Record) -> None:
        self.rates.advance(record[1])
        prefill = sum(n for _id, _start, n, _samples in record[4])
        resumed = sum(n for id, _start, n, _samples in record[4] if self.lanes.resumed(id))
        self.rates.add_step(self.steps.decoded(record[3]), prefill, prefill - resumed)
        self.trends.advance(self.rates.now)
        self.trends.level("queue", record[8])
        self.lanes.fold_step(record)

    def _accept(self, record: Record) -> None:
        drafted, accepted = sum(draft[1] for draft in record[4]), sum(draft[2] for draft in record[4])
        self.rates.add("drafted", drafted)
        self.rates.add("accepted", accepted)
        self.rates.add("decode", accepted)
        self.lanes.fold(record, self.rates.now)

    def _experts(self, record: Record) -> None:
        self.experts.fold(record)

    _FOLDS: ClassVar = {"time": _time, "step": _step, "accept": _accept, "experts": _experts}

    def _fold_decision(self, record: Record, found: Any) -> None:
        """Fold a record about a request, or of the gate or of slow motion."""
        rates, lanes, kind = self.rates, self.lanes, record[2]
        step = lanes.ending if kind == "finish" else lanes.step
        self.events.fold(record, step, -1 if kind != "match" or found is None else found)
        rates.advance(record[1])
        lanes.fold(record, rates.now)
        if kind == "match":
            self.trends.advance(rates.now)
            lane, again = lanes.lanes.get(record[3]), lanes.resumed(record[3])
            rates.add("resumed" if again else "cached", record[4])
            if lane is not None and lane.prompt_tokens > 0 and not again:
                self.trends.add("hit of a prompt", min(100.0, 100 * max(0, record[4]) / lane.prompt_tokens))
        elif kind == "first":
            self.trends.advance(rates.now)
            self.trends.add("first token", record[4] + record[5])
            self.first_tokens.fold(record)
        elif kind in ("finish", "preempt", "requeue"):
            computed, blocks = found
            lanes.release(record, computed, blocks, self.steps.committed)
            for step in self.tokens.dropped(record[3]) if kind != "preempt" else ():
                self._dropped[step] = self._dropped.get(step, 0) + 1
        elif kind == "fail":
            lanes.ended_step = record[3] - 1  # its requests finish after this record
        elif kind == "gate":
            rates.gate(record[3] == "closed")
            self.gate_reason = record[4]
        elif kind == "pace":
            rates.pace(record[3])

    def _note_levels(self) -> None:
        """Note how many requests run and wait, and how full the pool is."""
        rates, state = self.rates, self.live.state
        used = self.live.used
        rates.level("running", len(state.requests) - len(state.queue))
        rates.level("waiting", len(state.queue))
        rates.level("used", used)
        self.trends.advance(rates.now)
        self.trends.level("pool", 100 * used)
        self.trends.level("queue", len(state.queue))

    # ---- reading

    def requests_of(self, group: str) -> list[int]:
        """Returns the known requests of a group, oldest first."""
        return [lane.id for lane in self.lanes.lanes.values() if lane.group == group]
