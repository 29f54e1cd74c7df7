"""The history: columns of step figures, rates in buckets of time, and times to first token.

All have a fixed size: new values replace the oldest. Columns are `array`s: the garbage collector does not scan them,
and numpy reads them without a copy.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.trace.records import Record

STEPS_KEPT = 32_768
BUCKET = 0.25  # seconds
BUCKETS_KEPT = 2048
FIRST_TOKENS_KEPT = 256

Chunk = tuple[int, int, int, bool]  # request, start, tokens, True if the step samples a token after the chunk
Draft = tuple[int, int, int]  # request, tokens drafted, tokens accepted (-1: not known yet)
KINDS = ("", "decode", "mixed", "prefill")
PARTS = ("commit", "emit", "gate", "plan", "launch", "wait")  # parts of the host's time, as in the record "parts"
GATE_SHOWN = 2.0  # ms: on the axis of time (spans.py), a longer pause or delay by slow motion is shortened to this
IDLE_SHOWN = 1_000.0  # ms: the same for time without work


@dataclass(frozen=True, slots=True)
class StepParts:
    """The host's time, in ms, by kind of work, and its interruptions.

    The time begins when the results of the previous step arrive, or when the idle engine gets work.
    """

    commit: float
    emit: float
    gate: float
    plan: float
    launch: float
    wait: float
    gc: float
    delayed: float | None  # time in which another program had the core; None: unknown
    stops: int  # how often a signal stopped the process

    @property
    def took(self) -> float:
        """The time without `gate` (pause and slow motion)."""
        return self.commit + self.emit + self.plan + self.launch + self.wait


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. Durations are in ms; None if unknown, or if the timing of the step has not arrived yet."""

    step: int
    t: float
    tokens: int
    decodes: int
    chunks: list[Chunk]
    waiting: int
    wall_ms: float | None
    plan_ms: float | None
    launch_ms: float | None
    commit_ms: float | None
    device_ms: float | None
    ended: float | None  # engine time of its `time` record
    end_seq: int  # sequence number of its `time` record; 0: not arrived yet
    drafts: tuple[Draft, ...] = ()
    comm_ms: float | None = None  # time in collectives between ranks: the `comm` record
    parts: StepParts | None = None  # None: not recorded
    keys: float = 0.0  # keys that its decoding requests read
    pairs: float = 0.0  # pairs of a query and a key in its prefill chunks
    cut_ms: float = 0.0  # time left out of the axis before this step (spans.py)
    held: bool = False  # planned while the engine was paused or slowed
    plans_next: bool = False  # with overlap: `plan` and `launch` of its parts are those of the next step

    @property
    def drafted(self) -> int:
        """Number of draft tokens verified."""
        return sum(draft[1] for draft in self.drafts)

    @property
    def accepted(self) -> int:
        """Number of draft tokens accepted. The requests decoded `decodes` + `accepted` tokens."""
        return sum(max(0, draft[2]) for draft in self.drafts)

    @property
    def took_ms(self) -> float | None:
        """The time since the results of the step before, without pauses and slow motion; None: not known yet."""
        return self.wall_ms if self.wall_ms is None or self.parts is None else self.parts.took

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.decodes - self.drafted

    @property
    def kind(self) -> str:
        if not self.chunks:
            return "decode"
        return "mixed" if self.decodes else "prefill"

    def part_name(self, part: str) -> str:
        """Returns the name of a part of its time: with overlap "launch of 57", because step 57 is the next step."""
        return f"{part} of {self.step + 1:,}" if self.plans_next and part in ("plan", "launch") else part


class Steps:
    """The last `capacity` steps, by step number."""

    def __init__(self, capacity: int = STEPS_KEPT) -> None:
        self.capacity = capacity
        self.first = -1  # the oldest step kept; -1: none
        self.last = -1
        self._step = array("q", [-1]) * capacity
        self._t = array("d", [0.0]) * capacity
        self._tokens = array("q", [0]) * capacity
        self._decodes = array("q", [0]) * capacity
        self._drafted = array("q", [0]) * capacity
        self._accepted = array("q", [0]) * capacity
        self._waiting = array("q", [0]) * capacity
        self._wall = array("d", [0.0]) * capacity  # ms; NaN: unknown
        self._plan = array("d", [0.0]) * capacity
        self._launch = array("d", [0.0]) * capacity
        self._commit = array("d", [0.0]) * capacity
        self._device = array("d", [0.0]) * capacity
        self._comm = array("d", [0.0]) * capacity
        self.ranks = 1  # GPUs that share the model
        self._ended = array("d", [0.0]) * capacity
        self._end_seq = array("q", [0]) * capacity
        self._arrived = array("d", [0.0]) * capacity  # when its tokens arrived: seconds, without pauses; NaN: unknown
        self._paused = array("d", [0.0]) * capacity  # seconds of pauses and slow motion since the history began
        self._paused_s = 0.0
        self._bucket = array("q", [0]) * capacity  # the bucket of Rates in which the step was planned
        self._cut = array("d", [0.0]) * capacity
        self.cut_ms = 0.0  # time left out of the axis so far
        self._held = array("b", [0]) * capacity
        self._closed, self._pace = False, 1.0  # the engine is paused; the factor of slow motion
        self._timed = -1  # the last step whose timing has arrived
        # For the cost model: the keys that a step's decoding requests read, and the pairs of a query and a key in its
        # prefill chunks.
        self._keys = array("d", [0.0]) * capacity
        self._pairs = array("d", [0.0]) * capacity
        self._parts = {name: array("f", [0.0]) * capacity for name in (*PARTS, "gc", "delayed", "stops")}
        self._decoding: dict[int, int] = {}  # request -> n: before step s, n + s of its tokens have been computed
        self._prompts: dict[int, int] = {}  # request -> number of its tokens when its prefill ends
        self._chunks: list[list[Chunk] | None] = [None] * capacity
        self._drafts: dict[int, array[int]] = {}  # step -> the fields of all its Drafts, in one flat array
        self._nan = float("nan")
        self._views: dict[str, np.ndarray] = {}

    def fold_draft(self, record: Record) -> None:
        """Fold a `draft` record. It comes before the `step` record of the same step."""
        _seq, _t, _kind, step, drafts = record
        self._drafts[step] = array("q", [field for request, tokens in drafts for field in (request, tokens, -1)])

    def fold_accept(self, record: Record) -> tuple[int, int]:
        """Fold an `accept` record. Returns (tokens drafted, tokens accepted)."""
        _seq, _t, _kind, step, drafts = record
        drafted, accepted = sum(draft[1] for draft in drafts), sum(draft[2] for draft in drafts)
        for request, _, taken in drafts:
            if request in self._decoding:
                self._decoding[request] += taken  # `taken` does not count the one token that every step adds
        if step in self:
            results = {draft[0]: draft for draft in drafts}
            known = [results.get(draft[0], draft) for draft in self._drafts_of(step)]
            self._drafts[step] = array("q", [field for draft in known for field in draft])
            self._accepted[step % self.capacity] = accepted
        return drafted, accepted

    def fold_step(self, record: Record, bucket: int = 0) -> int:
        """Fold a `step` record; `bucket` is the current bucket of Rates. Returns the number of prefill tokens."""
        _seq, t, _kind, step, prefills, joined, left, tokens, waiting = record
        i = step % self.capacity
        for id in left:
            self._decoding.pop(id, None)
        for id in joined:
            self._decoding[id] = self._prompts.pop(id, 0) - step
        prefill_tokens = pairs = 0
        for id, start, n, samples in prefills:
            prefill_tokens += n
            pairs += n * (start + n // 2)
            if samples:
                self._prompts[id] = start + n
        self._keys[i] = sum(self._decoding.values()) + len(self._decoding) * step
        self._pairs[i] = pairs
        self._parts["wait"][i] = self._nan
        drafted = sum(self._drafts[step][1::3]) if step in self._drafts else 0
        decodes = tokens - prefill_tokens - drafted
        self._drafted[i], self._accepted[i] = drafted, 0
        self._step[i], self._t[i], self._tokens[i], self._decodes[i] = step, t, tokens, decodes
        self._waiting[i], self._wall[i], self._device[i], self._end_seq[i] = waiting, self._nan, self._nan, 0
        self._comm[i] = self._arrived[i] = self._nan
        self._chunks[i], self._bucket[i], self._cut[i] = prefills or None, bucket, self.cut_ms
        self._held[i] = self._closed or self._pace > 1
        if self.first < 0:
            self.first = step
        self.last = step
        if step - self.first >= self.capacity:
            self.first = step - self.capacity + 1
            if self._drafts:
                self._drafts.pop(self.first - 1, None)
        return prefill_tokens

    def fold_time(self, record: Record) -> None:
        """Fold a `time` record."""
        seq, t, _kind, step, plan_us, launch_us, commit_us, wall_ms, device_ms, _ = record
        i = step % self.capacity
        if self._step[i] != step:
            return
        self._plan[i], self._commit[i] = plan_us / 1e3, commit_us / 1e3
        self._launch[i] = self._nan if launch_us is None else launch_us / 1e3
        self._wall[i] = wall_ms
        self._device[i] = self._nan if device_ms is None else device_ms
        self._ended[i], self._end_seq[i] = t, seq
        self._cut_axis(step, i)
        self._paused[i], self._arrived[i] = self._paused_s, t - commit_us / 1e6 - self._paused_s

    def _cut_axis(self, step: int, i: int) -> None:
        """Shorten the time without work before this step on the axis; count a pause or slow motion as paused.

        A replay in slow motion delays every record, so steps that overlap are then apart by more than their times.
        """
        before, self._timed = self._timed, step
        parts = self._parts_of(i)
        self._held[i] |= self._closed or self._pace > 1
        outside = 0.0  # ms since the end of the step before that belong to no part
        longest = GATE_SHOWN if self._held[i] else IDLE_SHOWN
        if before in self:
            ended = self._ended[before % self.capacity]
            arrival = self._ended[i] * 1e3 - self._commit[i]
            outside = arrival - ended * 1e3 - self._wall[i]
            if parts is not None:
                outside = arrival - ended * 1e3 - (parts.took - parts.commit + parts.gate)
            if self._t[i] < ended:  # planned while the step before ran
                outside += self._commit[before % self.capacity] if parts is None else 0.0
                longest = 0.0 if self._held[i] else longest
        if self._held[i]:
            self._paused_s += max(0.0, outside) / 1e3
        gate = 0.0 if parts is None else parts.gate
        self.cut_ms += max(0.0, gate - GATE_SHOWN) + max(0.0, outside - longest)
        for n in range(step, self.last + 1):  # the next step may be planned already
            self._cut[n % self.capacity] = self.cut_ms

    def gate(self, closed: bool) -> None:
        """Note that the engine is paused, or runs again."""
        self._closed = closed

    def pace(self, factor: float) -> None:
        """Note the factor of slow motion; 1: none."""
        self._pace = factor

    def adopt(self, request: int, tokens: int, step: int) -> None:
        """Add a request that already decodes in the first snapshot. `tokens`: how many were computed before `step`."""
        self._decoding[request] = tokens - step

    def fold_release(self, record: Record) -> None:
        """Fold a `finish`, `preempt` or `requeue` record: the request stops decoding, and no `step` says so."""
        self._decoding.pop(record[3], None)
        self._prompts.pop(record[3], None)

    def fold_parts(self, record: Record) -> None:
        """Fold a `parts` record."""
        _seq, _t, _kind, step, *us, delayed, stops = record
        self._paused_s += us[2] / 1e6
        if step not in self:
            return
        i = step % self.capacity
        for name, value in zip((*PARTS, "gc"), us, strict=True):
            self._parts[name][i] = value / 1e3
        self._parts["delayed"][i] = self._nan if delayed is None else delayed / 1e3
        self._parts["stops"][i] = stops

    def fold_comm(self, record: Record) -> None:
        """Fold a `comm` record."""
        _seq, _t, _kind, step, self.ranks, ms = record
        if step in self:
            self._comm[step % self.capacity] = ms

    def __contains__(self, step: int) -> bool:
        return step >= 0 and self._step[step % self.capacity] == step

    def get(self, step: int) -> StepRow | None:
        """Returns the step, or None if it is not kept."""
        if step not in self:
            return None
        i = step % self.capacity
        timed = self._end_seq[i] > 0
        device, comm, launch = self._device[i], self._comm[i], self._launch[i]
        return StepRow(
            step=step,
            t=self._t[i],
            tokens=self._tokens[i],
            decodes=self._decodes[i],
            chunks=self._chunks[i] or [],
            waiting=self._waiting[i],
            wall_ms=self._wall[i] if timed else None,
            plan_ms=self._plan[i] if timed else None,
            launch_ms=None if not timed or launch != launch else launch,
            commit_ms=self._commit[i] if timed else None,
            device_ms=None if not timed or device != device else device,
            ended=self._ended[i] if timed else None,
            end_seq=self._end_seq[i],
            drafts=self._drafts_of(step),
            comm_ms=None if comm != comm else comm,
            parts=self._parts_of(i),
            keys=self._keys[i],
            pairs=self._pairs[i],
            cut_ms=self._cut[i],
            held=bool(self._held[i]),
            plans_next=self._overlaps(step) and self._overlaps(step - 1),
        )

    def _overlaps(self, step: int) -> bool:
        """True if the step after `step` was planned before the results of `step` arrived."""
        i, following = step % self.capacity, (step + 1) % self.capacity
        if step not in self or self._step[following] != step + 1:
            return False
        return self._end_seq[i] > 0 and self._t[following] < self._ended[i]

    def _parts_of(self, i: int) -> StepParts | None:
        values = {name: column[i] for name, column in self._parts.items()}
        if values["wait"] != values["wait"]:
            return None
        delayed, stops = values.pop("delayed"), values.pop("stops")
        return StepParts(**values, delayed=None if delayed != delayed else delayed, stops=int(stops))

    def _drafts_of(self, step: int) -> tuple[Draft, ...]:
        fields = self._drafts.get(step, array("q"))
        return tuple(zip(fields[::3], fields[1::3], fields[2::3], strict=True))

    def chunks(self, step: int) -> list[Chunk]:
        return self._chunks[step % self.capacity] or []

    def indices(self, first: int, last: int) -> np.ndarray:
        """Returns the column indices of the kept steps from `first` to `last`."""
        first, last = max(first, self.first, 0), min(last, self.last)
        if last < first:
            return np.empty(0, np.int64)
        steps = np.arange(first, last + 1)
        at = steps % self.capacity
        return at[np.frombuffer(self._step, np.int64)[at] == steps]

    @property
    def committed(self) -> int:
        """The last step that is committed; -1: none."""
        return self._timed

    def column(self, name: str) -> np.ndarray:
        """Returns a whole column as a numpy array; index it with `indices`."""
        view = self._views.get(name)
        if view is None:
            store = self._parts[name.partition(":")[2]] if name.startswith("part:") else getattr(self, f"_{name}")
            view = self._views[name] = np.frombuffer(store, store.typecode)
        return view

    def prefilled(self, at: np.ndarray) -> np.ndarray:
        """Returns, for each step at these column indices, the number of prompt tokens computed."""
        return self.column("tokens")[at] - self.column("decodes")[at] - self.column("drafted")[at]

    def gap_ms(self, step: int) -> float | None:
        """Returns the time between the tokens of a step and of the step before it, without pauses; None if no request
        decoded in this step, or if a time is unknown."""
        if step not in self or step - 1 not in self or not self.decoded(step):
            return None
        gap = (self._arrived[step % self.capacity] - self._arrived[(step - 1) % self.capacity]) * 1e3
        return gap if gap >= 0 else None

    def before_bucket(self, bucket: int) -> int | None:
        """Returns the last step that was planned before a bucket of Rates began; None if no such step is kept."""
        at = self.indices(self.first, self.last)
        earlier = at[self.column("bucket")[at] < bucket]
        return int(self.column("step")[earlier[-1]]) if len(earlier) else None

    def decoded(self, step: int) -> int:
        """Returns the number of requests that decoded in a kept step."""
        return self._decodes[step % self.capacity]

    def since(self, t: float, last: int) -> int:
        """Returns the first kept step up to `last` that was planned at engine time `t` or later; `last` + 1 if none."""
        first = max(self.first, 0)
        return first + bisect_left(range(first, last + 1), t, key=lambda step: self._t[step % self.capacity])


class Rates:
    """Sums per quarter of a second of working time.

    Working time stops while the engine is paused and excludes the delay of slow motion, so pauses and slow motion do
    not lower the rates.
    """

    SUMS = ("decode", "prefill", "cached", "steps", "drafted", "accepted", "device_ms", "host_ms")
    LEVELS = ("running", "waiting", "used")  # each bucket keeps the last value

    def __init__(self) -> None:
        names = (*self.SUMS, *self.LEVELS, "worst_ms")
        self._columns = {name: array("d", [0.0]) * BUCKETS_KEPT for name in names}
        self.now = 0.0  # working time since the history began, in seconds
        self._t = 0.0  # engine time of the last record
        self._stretched = 0.0  # seconds of slow motion still to be excluded
        self._closed = False  # the gate is closed: the engine is paused
        self._pace = 1.0
        self.bucket = 0  # the bucket being filled
        self._slot = 0  # the index of `bucket` in the columns

    def reset(self, t: float, closed: bool, pace: float) -> None:
        """Set the engine time, gate and pace from which the rates start."""
        self._t, self._closed, self._pace = t, closed, pace

    def advance(self, t: float) -> None:
        """Advance working time to engine time `t`."""
        elapsed = t - self._t
        if elapsed <= 0:
            return
        self._t = t
        if self._closed:
            return
        if self._stretched:
            excluded = min(elapsed, self._stretched)
            self._stretched -= excluded
            elapsed -= excluded
        self._add_working_time(elapsed)

    def _add_working_time(self, seconds: float) -> None:
        self.now += seconds
        bucket = int(self.now / BUCKET)
        if bucket == self.bucket:
            return
        columns, before = self._columns, self._slot
        for new in range(max(self.bucket + 1, bucket - BUCKETS_KEPT + 1), bucket + 1):
            slot = new % BUCKETS_KEPT
            for name in (*self.SUMS, "worst_ms"):
                columns[name][slot] = 0.0
            for name in self.LEVELS:
                columns[name][slot] = columns[name][before]
        self.bucket, self._slot = bucket, bucket % BUCKETS_KEPT

    def add(self, name: str, value: float) -> None:
        self._columns[name][self._slot] += value

    def level(self, name: str, value: float) -> None:
        self._columns[name][self._slot] = value

    def add_step(self, decodes: int, prefill: int) -> None:
        """Count a planned step."""
        columns, slot = self._columns, self._slot
        columns["decode"][slot] += decodes
        columns["steps"][slot] += 1
        if prefill:
            columns["prefill"][slot] += prefill

    def add_durations(self, wall_ms: float, host_ms: float, device_ms: float | None) -> None:
        """Count the durations of a finished step."""
        columns, slot = self._columns, self._slot
        if wall_ms > columns["worst_ms"][slot]:
            columns["worst_ms"][slot] = wall_ms
        columns["host_ms"][slot] += host_ms
        if device_ms is not None:
            columns["device_ms"][slot] += device_ms
        if self._closed:
            self._add_working_time(wall_ms / 1e3)
        elif self._pace > 1:
            self._stretched += wall_ms / 1e3 * (self._pace - 1)

    def gate(self, closed: bool) -> None:
        self._closed = closed

    def pace(self, factor: float) -> None:
        self._pace = factor

    def series(self, name: str, n: int, end: int | None = None) -> np.ndarray:
        """Returns the `n` buckets before bucket `end`, oldest first; 0 for missing buckets.

        Without `end`, returns the buckets before the bucket that is being filled.
        """
        end = self.bucket if end is None else min(end, self.bucket + 1)
        n = min(n, BUCKETS_KEPT - 1)
        first = end - n
        values = np.zeros(n)
        start = max(first, 0, self.bucket - BUCKETS_KEPT + 1)
        if end > start:
            column = np.frombuffer(self._columns[name])
            values[start - first :] = column[np.arange(start, end) % BUCKETS_KEPT]
        return values

    def at(self, name: str, bucket: int) -> float:
        """Returns the value of one bucket."""
        return self._columns[name][bucket % BUCKETS_KEPT]

    def per_second(self, name: str, seconds: float = 1.0, end: int | None = None) -> float:
        """Returns the mean per second over the last `seconds`, in complete buckets before `end`."""
        end = self.bucket if end is None else end
        n = min(max(1, round(seconds / BUCKET)), max(1, end))
        return float(self.series(name, n, end).sum() / (n * BUCKET))

    def total(self, name: str, seconds: float, end: int | None = None) -> float:
        """Returns the sum over bucket `end` and the `seconds` before it."""
        end = self.bucket if end is None else end
        return float(self.series(name, max(1, round(seconds / BUCKET)), end).sum() + self.at(name, end))


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to first token of a request, in ms, as two parts: queue, then prefill until the token arrives."""

    request: int
    seq: int
    queue_ms: float
    prefill_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms


class FirstTokens:
    """The FIRST_TOKENS_KEPT most recent times to first token."""

    def __init__(self) -> None:
        self.items: deque[FirstToken] = deque(maxlen=FIRST_TOKENS_KEPT)

    def fold(self, record: Record) -> None:
        seq, _t, _kind, request, queue_ms, prefill_ms = record
        self.items.append(FirstToken(request, seq, queue_ms, prefill_ms))

    def until(self, seq: int) -> list[FirstToken]:
        """Returns the first tokens up to record `seq`, oldest first."""
        return [item for item in self.items if item.seq <= seq]
