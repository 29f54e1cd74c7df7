"""The history: everything that is folded from records. AnnotatedState the newest state PastStates recent records and
states, for time travel Steps, Rates, Trends, Lanes, TokenTimes, Events, FirstTokens what happened, in memory of fixed
size"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from engine.trace.kind import Reader, Record, kind_of, named, seq_of, time_of
from engine.trace.state import State
from minitui.viewmodel.history.events import EVENTS_ALWAYS, PAGES, Events
from minitui.viewmodel.history.experts import ExpertLoads
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.history.rates import Rates
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.history.tokens import FirstTokens, TokenTimes
from minitui.viewmodel.history.trends import Trends
from minitui.viewmodel.state.annotated_state import AnnotatedState, BlockEvent
from minitui.viewmodel.state.time_travel import PastStates

EMPTY = State(num_blocks=2, block_size=16, budget=1, max_num_seqs=1)
BLOCK_EVENTS_KEPT = 20_000
OF_STEPS = frozenset({"parts", "comm", "draft"})  # kinds of records that only Steps folds
TIMINGS = frozenset({"time", "experts"})  # kinds of records that are no decisions


class History(Reader):
    """Call `reset` with a snapshot, then `fold` with the records after it."""

    def __init__(self) -> None:
        self.dropped = 0  # records missing from the history: lost, or dropped from a long backlog
        self.dropped_at = 0.0  # when records were missing the last time, by the caller's clock
        self.gap = False  # records are missing: `reset` with a snapshot is needed
        self.loaded = False
        self.caching = True  # prefix caching is on
        self.missing = "the engine is starting"  # why nothing is loaded yet
        self.phases: Callable[[], list[str]] = list  # returns the phases of a start so far, as lines
        self.origin = 0.0  # engine time in seconds from which displayed times count: of the first snapshot, or record
        self._begin(AnnotatedState(EMPTY))

    def _begin(self, live: AnnotatedState) -> None:
        self.live = live
        self.steps = Steps()
        self.rates = Rates()
        self.trends = Trends()
        self.lanes = Lanes()
        self.tokens = TokenTimes(self.steps, self.lanes)
        self.events = Events()
        self.pages = Events(EVENTS_ALWAYS)  # what happened to the pages of side groups
        self.block_log: deque[BlockEvent] = deque(maxlen=BLOCK_EVENTS_KEPT)
        self.first_tokens = FirstTokens()
        self.experts = ExpertLoads()
        self.past = PastStates()
        self.past.begin(live)
        self.gate_reason = ""
        self._dropped: dict[int, int] = {}  # step in flight -> rows whose token is dropped
        self._found: Any = None  # what AnnotatedState.fold found for the record being folded
        self.result_at = 0.0  # working time of the last `time` record
        self.folded_at: float | None = None  # the caller's clock at the last fold

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
        first = seq_of(records[0])
        if first < expected:
            records, packed = records[expected - first :], None
            if not records:
                return
        elif first > expected:
            self._note_gap(first - expected, now)
            return
        missing = seq_of(records[-1]) - seq_of(records[0]) + 1 - len(records)
        if missing:
            self._note_gap(missing, now)
            return
        if self.folded_at is None:  # rates start at the first record
            self.origin = self.origin or time_of(records[0])
            self.rates.reset(time_of(records[0]), self.live.state.gate == "closed", self.live.state.pace)
        self.folded_at = now
        rest = records
        while rest:
            part, rest = self._to_end_of_bucket(rest)
            self._fold_history(self.live.fold(part))
            self.rates.advance(time_of(part[-1]))
            self._note_levels()
        self.past.keep(records, self.live, packed)

    def _to_end_of_bucket(self, records: list[Record]) -> tuple[list[Record], list[Record]]:
        """Returns the records up to the end of a bucket of the rates, and the others. Levels are noted at the end of
        each bucket, so they do not depend on the number of records that are folded at a time."""
        end = time_of(records[0]) + self.rates.rest_of_bucket(time_of(records[0]))
        if time_of(records[-1]) < end:
            return records, []
        at = max(1, bisect_left(records, end, key=time_of))
        return records[:at], records[at:]

    def _note_gap(self, records: int, now: float) -> None:
        if not self.gap:
            self.dropped, self.dropped_at = self.dropped + records, now
        self.gap = True

    def _fold_history(self, records: list[tuple[Record, Any]]) -> None:
        """Fold the records that AnnotatedState.fold returned."""
        events, lanes, steps, reads = self.events, self.lanes, self.steps, self.READS
        pages = self.pages if self.live.state.groups else None
        for record, found in records:
            kind = kind_of(record)
            if kind == "evict":  # the most frequent kind; it belongs to no lane
                events.fold_evict(record, lanes.step, found)
                continue
            if kind == "step":
                self.tokens.before_step(named(record).step)
            steps.read(record)
            if kind in OF_STEPS:
                continue
            self.rates.advance(time_of(record))
            if kind not in TIMINGS:
                if pages is not None and kind in PAGES:
                    pages.fold(record, lanes.step)
                    if kind != "lose":
                        continue
                step = lanes.ending if kind == "finish" else lanes.step
                events.fold(record, step, -1 if kind != "match" or found is None else found[0])
                lanes.read_at(record, self.rates.now)
            self._found = found
            if (read := reads.get(kind)) is not None:
                read(self, record)
        self.block_log.extend(self.live.block_events)
        self.live.block_events.clear()

    def on_time(self, step: int, wall_ms: float) -> None:
        steps, rates = self.steps, self.rates
        self.lanes.ended_step = step
        took_ms = steps.took_ms(step)
        rates.add_durations(wall_ms if took_ms is None else took_ms, wall_ms, steps.gate_ms(step))
        rates.mark(step)
        steps.note_bucket(step, rates.bucket)
        self.result_at = rates.now
        self.trends.advance(rates.now)
        rows = steps.decoded(step) - self._dropped.get(step, 0)
        if rows > 0 and (gap := steps.gap_ms(step)) is not None:
            self.trends.add("token gaps", gap, rows)
        if self._dropped:
            self._dropped = {later: rows for later, rows in self._dropped.items() if later > step}
        for gap in self.tokens.after_preemptions(step):
            self.trends.add("token gaps", gap)

    def on_step(self, step: int, prefills: list[tuple[int, int, int, bool]], waiting: int) -> None:
        prefill = sum(n for _id, _start, n, _samples in prefills)
        resumed = sum(n for id, _start, n, _samples in prefills if self.lanes.resumed(id))
        self.rates.add_step(self.steps.decoded(step), prefill, prefill - resumed)
        self.trends.advance(self.rates.now)
        self.trends.level("queue", waiting)

    def on_accept(self, drafts: list[tuple[int, int, int]]) -> None:
        self.rates.add("decode", sum(draft[2] for draft in drafts))

    def on_experts(self, t: float, step: int, load: list[tuple[int, list[int]]]) -> None:
        self.experts.on_experts(t, step, load)

    def on_submit(self) -> None:
        self.lanes.submit(self._found)

    def on_match(self, request: int, tokens: int) -> None:
        self.trends.advance(self.rates.now)
        lane, again = self.lanes.lanes.get(request), self.lanes.resumed(request)
        if lane is not None and not again and self._found is not None:
            lane.source = self._found[1]
        self.rates.add("resumed" if again else "cached", tokens)
        if lane is not None and lane.request.prompt_tokens > 0 and not again:
            self.trends.add("hit of a prompt", min(100.0, 100 * max(0, tokens) / lane.request.prompt_tokens))

    def on_first(self, seq: int, request: int, queue_ms: float, prefill_ms: float) -> None:
        self.trends.advance(self.rates.now)
        self.trends.add("first token", queue_ms + prefill_ms)
        self.first_tokens.on_first(seq, request, queue_ms, prefill_ms)

    def on_finish(self, kind: str, request: int) -> None:
        computed, blocks = self._found
        self.lanes.release(kind, request, computed, blocks, self.steps.committed)
        for step in self.tokens.dropped(request) if kind != "preempt" else ():
            self._dropped[step] = self._dropped.get(step, 0) + 1

    on_preempt = on_requeue = on_finish

    def on_fail(self, step: int) -> None:
        self.lanes.ended_step = step - 1  # its requests finish after this record

    def on_gate(self, state: str, reason: str) -> None:
        self.rates.gate(state == "closed")
        self.gate_reason = reason

    def on_pace(self, factor: float) -> None:
        self.rates.pace(factor)

    def _note_levels(self) -> None:
        """Note how many requests run and wait, and how full the pool is."""
        rates, state, used = self.rates, self.live.state, self.live.used
        rates.level("running", len(state.requests) - len(state.queue))
        rates.level("used", used)
        self.trends.advance(rates.now)
        self.trends.level("pool", 100 * used)
        self.trends.level("queue", len(state.queue))

    def requests_of(self, group: str) -> list[int]:
        """Returns the known requests of a group, oldest first."""
        return [lane.id for lane in self.lanes.lanes.values() if lane.request.group == group]

    def block_events(self, block: int, most: int, seq: int) -> list[BlockEvent]:
        """Returns the last `most` events of a block up to record `seq`, newest first."""
        found = (event for event in reversed(self.block_log) if event[0] <= seq and block in event[4:])
        return list(islice(found, most))

    def begins_in_cache(self, ids: Sequence[int]) -> bool | None:
        """Returns whether the engine's cache has the first block of a prompt; None: unknown, or there is no cache."""
        state = self.live.state
        if not self.loaded or not self.caching:
            return None
        first = array("i", ids[: state.block_size])
        return any(state.nodes[child].ids[: state.block_size] == first for child in state.nodes[0].children)
