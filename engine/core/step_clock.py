"""Measures each step and writes the records "first", "comm", "parts" and "time" (engine/trace/records.py).

Four moments of a step are recorded::

    begun ── plan ── planned ── launch ── launched ── the device works ── arrived ── commit

With overlap, the host commits the previous step and plans the next step between `launched` and `arrived`. The record
"parts" therefore covers the time from the arrival of one step to the arrival of the next step. It divides this time
into the parts of the host's work, whichever step the work was for; the parts add up to this time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.core.host_pauses import NO_PAUSES, HostPauses, Pauses
from engine.core.step import Emitted, StepPlan, StepResult
from engine.trace.records import RecordLog

now = time.perf_counter  # seconds
COMMIT, EMIT, GATE, PLAN, LAUNCH, WAIT = range(6)  # the parts, in the order of the record's fields
# A step is slow if it takes more than SLOW times the usual time plus SLOW_S seconds: then the host's delays are read.
SLOW = 1.2
SLOW_S = 1e-4  # shorter delays are not worth a reading
# The delays are also read after this much work: a slow step must not get the delays of old steps. On hosts that need
# long for a reading (sandboxes), they are read less often: readings may take this share of the host's time.
READ_AGAIN_S = 1e-3
READ_SHARE = 0.005


@dataclass(slots=True)
class StepTimes:
    """The moments of one step, in seconds of `now()`, and what the host did until the ids arrived."""

    begun: float
    planned: float = 0.0
    launched: float = 0.0
    arrived: float = 0.0  # the ids are on the host
    parts_us: list[int] = field(default_factory=list)  # microseconds since the arrival before, by kind of work
    device_s: float = 0.0  # the part of the launch in which the device computed; 0 unless the runner is synchronous
    pauses: Pauses = NO_PAUSES  # in the same time


class StepClock:
    """Turns the moments of steps into records. `synchronous`: a step has ended when its launch returns, so the launch
    time includes the device's time."""

    def __init__(self, log: RecordLog, synchronous: bool) -> None:
        self._log = log
        self._synchronous = synchronous
        self._device_free_at = 0.0
        self._parts = [0.0] * 6  # seconds since the last arrival
        self._lap_at = 0.0  # when `begin` or `lap` was called last; 0: the engine was idle
        self._held = 0.0  # log.held at the last `begin`
        self._pauses = HostPauses(computes=synchronous)
        self._usual_s = 0.0  # the mean time of recent steps
        self._unread_s = 0.0  # the time of the steps since the last reading
        self._worked_us = 0  # the sum of the recorded parts of all steps, without GATE

    def now(self) -> float:
        return now()

    def begin(self) -> StepTimes:
        """Begin a step. Of the time since the last lap, the gate's delay is added to GATE, the rest to EMIT. EMIT is
        the time for output and commands."""
        began = self.now()
        if not self._lap_at:
            self._pauses.since_last()  # discard the pauses while the engine was idle: they delayed no step
            self._lap_at, self._held = began, self._log.held
        between = began - self._lap_at
        if self._log.held != self._held:
            gate = min(self._log.held - self._held, between)
            self._parts[GATE] += gate
            between -= gate
            self._held = self._log.held
            self._pauses.since_last()  # pauses during the gate's delay delayed no step
        self._parts[EMIT] += between
        self._lap_at = began
        return StepTimes(began)

    def lap(self, part: int) -> float:
        """Add the time since the last lap to `part`; return the present time."""
        at = self.now()
        self._parts[part] += at - self._lap_at
        self._lap_at = at
        return at

    def arrive(self, times: StepTimes, result: StepResult) -> None:
        """Note that the ids of a step are on the host: this ends the parts of this time, and their pauses. Sets
        `result.arrived_us` to the sum of all recorded parts, so speeds agree with the records to the microsecond."""
        times.arrived = self.lap(WAIT)
        parts, self._parts = self._parts, [0.0] * 6
        if self._synchronous and result.device_ms is not None:
            times.device_s = min(result.device_ms / 1e3, times.launched - times.planned)
            parts[LAUNCH] -= times.device_s  # keep the host's part only
            parts[WAIT] += times.device_s
        times.parts_us = [round(part * 1e6) for part in parts]
        worked_us = sum(times.parts_us) - times.parts_us[GATE]
        self._worked_us += worked_us
        result.arrived_us = self._worked_us
        times.pauses = self._pauses.since_last(delays=self._reads_delays(worked_us / 1e6))

    def idle(self) -> None:
        """Begin an idle period: the time until the next `begin` belongs to no step."""
        self._lap_at = 0.0
        self._parts = [0.0] * 6

    def took(self, times: StepTimes) -> float:
        """Returns the wall time in seconds of a step whose ids have arrived; called once a step."""
        wall_s = times.arrived - max(times.begun, self._device_free_at)
        self._device_free_at = times.arrived
        return wall_s

    def own_s(self, times: StepTimes, result: StepResult, wall_s: float) -> float:
        """Returns how many seconds a step takes that overlaps with others: the longer of its launch and of the device's
        time. Its wall time is longer if the launch of the next step takes longer."""
        return wall_s if result.device_ms is None else max(times.launched - times.planned, result.device_ms / 1e3)

    def record(self, times: StepTimes, plan: StepPlan, result: StepResult, emitted: list[Emitted]) -> float:
        """Record a step that was just committed; return its wall time in seconds. The wall time begins when the step
        begins or when the step before it ends, whichever is later. It ends when the ids arrive."""
        wall_s = self.took(times)
        prefills = len(plan.rows) - plan.num_decoding
        kind = "decode" if not prefills else "mixed" if plan.num_decoding else "prefill"
        if prefills:
            self._record_first_tokens(emitted)
        commit_s = self.lap(COMMIT) - times.arrived
        launch_s = times.launched - times.planned - times.device_s
        if result.comm is not None:
            ranks, comm_ms = result.comm
            self._log.append("comm", plan.step, ranks, round(comm_ms, 3))
        gc_s, delayed_s, stops = times.pauses
        self._log.append(
            "parts", plan.step, *times.parts_us, round(gc_s * 1e6),
            None if delayed_s is None else round(delayed_s * 1e6), stops,
        )
        self._log.append(
            "time", plan.step, round((times.planned - times.begun) * 1e6), round(launch_s * 1e6),
            round(commit_s * 1e6), round(wall_s * 1e6) / 1e3, result.device_ms, kind,
        )
        return wall_s

    def _reads_delays(self, took_s: float) -> bool:
        """Returns whether to read the host's delays for a step that took this time. They are not read for every short
        step, because reading them costs more than the rest of the record."""
        usual_s = self._usual_s
        slow = took_s > SLOW * usual_s + SLOW_S
        # No step counts as more than twice the usual time: after a long prefill, a slow decode step must be noticed.
        self._usual_s = usual_s + 0.1 * (min(took_s, 2 * usual_s or took_s) - usual_s)
        self._unread_s += took_s
        if not slow and self._unread_s < max(READ_AGAIN_S, self._pauses.reading_s / READ_SHARE):
            return False
        self._unread_s = 0.0
        return True

    def _record_first_tokens(self, emitted: list[Emitted]) -> None:
        """Record the parts of the time to first token, for each request that has just drawn its first token."""
        for item in emitted:
            request = item.request
            if item.token_id is not None and request.ttft_ms is None:
                queue_ms = (request.admitted_work - request.submitted_work) * 1e3
                prefill_ms = (self._log.worked() - request.admitted_work) * 1e3
                request.ttft_ms = round(queue_ms, 3), round(prefill_ms, 3)
                self._log.append("first", request.id, *request.ttft_ms)
