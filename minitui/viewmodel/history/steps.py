"""The figures of the last steps, in columns of fixed size: new values replace the oldest. Columns are `array`s: the
garbage collector does not scan them, and numpy reads them without a copy."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from engine.trace.kind import Reader
from engine.trace.state import State

Chunk = tuple[int, int, int, bool]  # request, start, tokens, True if the step samples a token after the chunk
Draft = tuple[int, int, int]  # request, tokens drafted, tokens accepted (-1: not known yet)
KINDS = ("decode", "mixed", "prefill")  # of steps
PARTS = ("commit", "emit", "gate", "plan", "launch", "wait")  # parts of the host's time, as in the record "parts"


@dataclass(frozen=True, slots=True)
class StepParts:
    """The host's time, in ms, by kind of work, and its interruptions. The time begins when the results of the previous
    step arrive, or when the idle engine gets work."""

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
    wall_ms: float | None  # from its `time` record: without the commit of the step before and the output
    took_ms: float | None  # the step's duration: the time since the results of the step before, without pauses
    plan_ms: float | None
    launch_ms: float | None
    commit_ms: float | None
    device_ms: float | None
    ended: float | None  # engine time of its `time` record
    end_seq: int  # sequence number of its `time` record; 0: not arrived yet
    drafts: tuple[Draft, ...] = ()
    comm_ms: float | None = None  # time in collectives between ranks: the `comm` record
    parts: StepParts | None = None  # None: not recorded
    cut_ms: float = 0.0  # time left out of the axis before this step (spans.py)
    held: bool = False  # planned while the engine was paused or slowed

    @property
    def drafted(self) -> int:
        """Number of draft tokens verified."""
        return sum(draft[1] for draft in self.drafts)

    @property
    def accepted(self) -> int:
        """Number of draft tokens accepted. The requests decoded `decodes` + `accepted` tokens."""
        return sum(max(0, draft[2]) for draft in self.drafts)

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.decodes - self.drafted

    @property
    def kind(self) -> str:
        if not self.chunks:
            return "decode"
        return "mixed" if self.decodes else "prefill"


STEPS_KEPT = 32_768
GATE_SHOWN = 2.0  # ms: on the axis of time (spans.py), a longer pause or delay by slow motion is shortened to this
IDLE_SHOWN = 1_000.0  # ms: the same for time without work


class Steps(Reader):
    """The last `capacity` steps, by step number."""

    def __init__(self, capacity: int = STEPS_KEPT) -> None:
        self.capacity = capacity
        self.first = -1  # the oldest step kept; -1: none
        self.begin = 0  # the first step that was folded
        self.last = -1
        self.last_ended = -1  # the last step that is committed or failed; -1: none
        self._step = array("q", [-1]) * capacity
        self._t = array("d", [0.0]) * capacity
        self._tokens = array("q", [0]) * capacity
        self._decodes = array("q", [0]) * capacity
        self._drafted = array("q", [0]) * capacity
        self._accepted = array("q", [0]) * capacity
        self._waiting = array("q", [0]) * capacity
        self._wall = array("d", [0.0]) * capacity  # ms; NaN: unknown
        self._took = array("d", [0.0]) * capacity  # ms: StepRow.took_ms; NaN: unknown
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
        self._bucket = array("q", [0]) * capacity  # the bucket of Rates in which the step ended
        self._in_use = array("q", [0]) * capacity  # tokens in the blocks that requests held; 0: not noted
        self._longest = array("q", [0]) * capacity  # keys that one request reads, at most; 0: not noted
        self._cut = array("d", [0.0]) * capacity
        self.cut_ms = 0.0  # time left out of the axis so far
        self._held = array("b", [0]) * capacity
        self._closed, self._pace = False, 1.0  # the engine is paused; the factor of slow motion
        self.committed = -1  # the last step that is committed, whose timing has arrived; -1: none
        # For the cost model: the keys that a step's decoding requests read, and the pairs of a query and a key in its
        # prefill chunks.
        self._keys = array("d", [0.0]) * capacity
        self._pairs = array("d", [0.0]) * capacity
        self._parts = {name: array("d", [0.0]) * capacity for name in (*PARTS, "gc", "delayed", "stops")}
        self._measured = [self._parts[name] for name in (*PARTS, "gc")]
        self._decoding: dict[int, int] = {}  # request -> n: before step s, n + s of its tokens have been computed
        self._prompts: dict[int, int] = {}  # request -> number of its tokens when its prefill ends
        self._chunks: list[list[Chunk] | None] = [None] * capacity
        self._new: list[tuple[int, int]] = []  # requests that came since the last timing, with their prompt tokens
        self._came: dict[int, tuple[tuple[int, int], ...]] = {}  # step -> requests that came in its time
        self._drafts: dict[int, array[int]] = {}  # step -> the fields of all its Drafts, in one flat array
        self._nan = float("nan")
        self._views: dict[str, np.ndarray] = {}

    def adopt(self, state: State) -> None:
        """Begin with the state of a snapshot: its requests that decode, its gate and its slow motion."""
        self._closed, self._pace = state.gate == "closed", state.pace
        for request in state.requests.values():
            if request.joined_at >= 0:
                self._decoding[request.id] = state.computed(request) - (state.step + 1)

    def on_draft(self, step: int, drafts: list[tuple[int, int]]) -> None:
        """The record comes before the `step` record of the same step."""
        self._drafts[step] = array("q", [field for request, tokens in drafts for field in (request, tokens, -1)])

    def on_accept(self, step: int, drafts: list[Draft]) -> None:
        for request, _, taken in drafts:
            if request in self._decoding:
                self._decoding[request] += taken  # `taken` does not count the one token that every step adds
        if step in self:
            results = {draft[0]: draft for draft in drafts}
            known = [results.get(draft[0], draft) for draft in self._drafts_of(step)]
            self._drafts[step] = array("q", [field for draft in known for field in draft])
            self._accepted[step % self.capacity] = sum(draft[2] for draft in drafts)

    def on_step(
        self, t: float, step: int, prefills: list[Chunk], joined: list[int], left: list[int], tokens: int, waiting: int
    ) -> None:
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
        self._comm[i] = self._arrived[i] = self._took[i] = self._nan
        self._chunks[i], self._cut[i] = prefills or None, self.cut_ms
        self._held[i] = self._closed or self._pace > 1
        if self.first < 0:
            self.first = self.begin = step
        self.last = step
        if step - self.first >= self.capacity:
            self.first = step - self.capacity + 1
            self._drafts.pop(self.first - 1, None)
            self._came.pop(self.first - 1, None)

    def on_submit(self, request: int, prompt_tokens: int) -> None:
        self._new.append((request, prompt_tokens))

    def on_time(
        self, seq: int, t: float, step: int, plan_us: float, launch_us: float | None, commit_us: float, wall_ms: float,
        device_ms: float | None,
    ) -> None:
        came, self._new = self._new, []
        i = step % self.capacity
        if self._step[i] != step:
            return
        if came:
            self._came[step] = tuple(came)
        self.last_ended = step
        self._plan[i], self._commit[i] = plan_us / 1e3, commit_us / 1e3
        self._launch[i] = self._nan if launch_us is None else launch_us / 1e3
        self._wall[i] = wall_ms
        self._device[i] = self._nan if device_ms is None else device_ms
        self._ended[i], self._end_seq[i] = t, seq
        parts = self._parts_of(i)
        took = self._took[i] = wall_ms if parts is None else parts.took
        if parts is not None:  # a pause may also lie outside of the step's time
            gc = self._parts["gc"][i] = min(parts.gc, took)
            self._parts["delayed"][i] = self._nan if parts.delayed is None else min(parts.delayed, took - gc)
        before = self.committed
        self._cut_axis(step, i)
        self._paused[i], self._arrived[i] = self._paused_s, t - commit_us / 1e6 - self._paused_s
        if before in self and self._adjoins(before, i):
            # The time between two arrivals is then the step's duration, exactly; `t` is when the record was written.
            self._arrived[i] = self._arrived[before % self.capacity] + took / 1e3

    def _adjoins(self, before: int, i: int) -> bool:
        """True if the duration of the step at index `i` begins with the results of the step `before`."""
        commit, wait = self._parts["commit"][i], self._parts["wait"][i]
        if wait == wait:  # the parts were recorded: they include the commit of the step before
            return commit > 0
        arrival = self._ended[before % self.capacity] * 1e3 - self._commit[before % self.capacity]
        return self._t[i] * 1e3 - self._plan[i] <= arrival

    def on_fail(self, step: int) -> None:
        """The step has ended, without times."""
        self.last_ended = step

    def note_in_use(self, step: int, tokens: int) -> None:
        """Note how many tokens the blocks have that requests held in a step that was just planned."""
        self._in_use[step % self.capacity] = tokens
        self._longest[step % self.capacity] = max(self._decoding.values(), default=-step) + step

    def note_bucket(self, step: int, bucket: int) -> None:
        """Note the bucket of Rates in which a step ended."""
        self._bucket[step % self.capacity] = bucket

    def _cut_axis(self, step: int, i: int) -> None:
        """Shorten the time without work before this step on the axis; count a pause or slow motion as paused. A replay
        in slow motion delays every record, so steps that overlap are then apart by more than their times."""
        before, self.committed = self.committed, step
        parts = self._parts
        wait = parts["wait"][i]
        known = wait == wait  # the parts were recorded
        gate = parts["gate"][i] if known else 0.0
        self._held[i] |= self._closed or self._pace > 1
        outside = 0.0  # ms since the end of the step before that belong to no part
        longest = GATE_SHOWN if self._held[i] else IDLE_SHOWN
        if before in self:
            ended = self._ended[before % self.capacity]
            arrival = self._ended[i] * 1e3 - self._commit[i]
            outside = arrival - ended * 1e3 - self._wall[i]
            if known:
                since = parts["emit"][i] + gate + parts["plan"][i] + parts["launch"][i] + wait
                outside = arrival - ended * 1e3 - since
            if self._t[i] < ended:  # planned while the step before ran
                outside += self._commit[before % self.capacity] if not known else 0.0
                longest = 0.0 if self._held[i] else longest
        if self._held[i]:
            self._paused_s += max(0.0, outside) / 1e3
        self.cut_ms += max(0.0, gate - GATE_SHOWN) + max(0.0, outside - longest)
        for n in range(step, self.last + 1):  # the next step may be planned already
            self._cut[n % self.capacity] = self.cut_ms

    def on_gate(self, state: str) -> None:
        self._closed = state == "closed"

    def on_pace(self, factor: float) -> None:
        self._pace = factor

    def on_finish(self, request: int) -> None:
        """The request stops decoding, and no `step` record says so."""
        self._decoding.pop(request, None)
        self._prompts.pop(request, None)

    on_preempt = on_requeue = on_finish

    def on_parts(
        self, step: int, commit_us: float, emit_us: float, gate_us: float, plan_us: float, launch_us: float,
        wait_us: float, gc_us: float, delayed_us: float | None, stops: int,
    ) -> None:
        self._paused_s += gate_us / 1e6
        if step not in self:
            return
        i = step % self.capacity
        us = (commit_us, emit_us, gate_us, plan_us, launch_us, wait_us, gc_us)
        for column, value in zip(self._measured, us, strict=True):
            column[i] = value / 1e3
        self._parts["delayed"][i] = self._nan if delayed_us is None else delayed_us / 1e3
        self._parts["stops"][i] = stops

    def on_comm(self, step: int, ranks: int, ms: float) -> None:
        self.ranks = ranks
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
            step=step, t=self._t[i], tokens=self._tokens[i], decodes=self._decodes[i], chunks=self._chunks[i] or [],
            waiting=self._waiting[i], wall_ms=self._wall[i] if timed else None,
            took_ms=self._took[i] if timed else None, plan_ms=self._plan[i] if timed else None,
            launch_ms=None if not timed or launch != launch else launch, commit_ms=self._commit[i] if timed else None,
            device_ms=None if not timed or device != device else device, ended=self._ended[i] if timed else None,
            end_seq=self._end_seq[i], drafts=self._drafts_of(step), comm_ms=None if comm != comm else comm,
            parts=self._parts_of(i), cut_ms=self._cut[i], held=bool(self._held[i]),
        )

    def planned_ahead(self, step: int) -> bool:
        """True if the step was planned before the results of the step before it arrived."""
        before = (step - 1) % self.capacity
        if step not in self or step - 1 not in self:
            return False
        return self._end_seq[before] > 0 and self._t[step % self.capacity] < self._ended[before]

    def _parts_of(self, i: int) -> StepParts | None:
        values = {name: column[i] for name, column in self._parts.items()}
        if values["wait"] != values["wait"]:
            return None
        delayed, stops = values.pop("delayed"), values.pop("stops")
        return StepParts(**values, delayed=None if delayed != delayed else delayed, stops=int(stops))

    def _drafts_of(self, step: int) -> tuple[Draft, ...]:
        fields = self._drafts.get(step, array("q"))
        return tuple(zip(fields[::3], fields[1::3], fields[2::3], strict=True))

    def came(self, step: int) -> tuple[tuple[int, int], ...]:
        """Returns the requests that came in the time of a step, with the number of their prompt tokens."""
        return self._came.get(step, ())

    def drafts_of(self, request: int, first: int, last: int) -> tuple[int, int]:
        """Returns (tokens drafted, tokens accepted) for a request in the kept steps from `first` to `last`."""
        steps = range(max(first, self.first), last + 1) if self._drafts else ()
        drafts = [draft for step in steps for draft in self._drafts_of(step) if draft[0] == request]
        return sum(draft[1] for draft in drafts), sum(max(0, draft[2]) for draft in drafts)

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

    def kinds(self, at: np.ndarray) -> np.ndarray:
        """Returns the kinds of the steps at these column indices, as indices of KINDS."""
        return np.where(self.prefilled(at) == 0, 0, np.where(self.column("decodes")[at] > 0, 1, 2))

    def gate_ms(self, step: int) -> float | None:
        """Returns how long a pause or slow motion delayed a step; None if this was not recorded."""
        i = step % self.capacity
        known = step in self and self._parts["wait"][i] == self._parts["wait"][i]  # not NaN
        return self._parts["gate"][i] if known else None

    def took_ms(self, step: int) -> float | None:
        """Returns how long a timed step took; None if the step is not kept."""
        return self._took[step % self.capacity] if step in self else None

    def gap_ms(self, step: int) -> float | None:
        """Returns the time between the tokens of a step and of the step before it, without pauses; None if no request
        decoded in this step, or if a time is unknown."""
        if step not in self or step - 1 not in self or not self.decoded(step):
            return None
        gap = (self._arrived[step % self.capacity] - self._arrived[(step - 1) % self.capacity]) * 1e3
        return gap if gap >= 0 else None

    def before_bucket(self, bucket: int) -> int | None:
        """Returns the last step that ended before a bucket of Rates began; None if no such step is kept."""
        at = self.indices(self.first, self.last)
        earlier = at[(self.column("end_seq")[at] > 0) & (self.column("bucket")[at] < bucket)]
        return int(self.column("step")[earlier[-1]]) if len(earlier) else None

    def decoded(self, step: int) -> int:
        """Returns the number of requests that decoded in a kept step."""
        return self._decodes[step % self.capacity]

    def since(self, t: float, last: int) -> int:
        """Returns the first kept step up to `last` that was planned at engine time `t` or later; `last` + 1 if none."""
        first = max(self.first, 0)
        return first + bisect_left(range(first, last + 1), t, key=lambda step: self._t[step % self.capacity])
