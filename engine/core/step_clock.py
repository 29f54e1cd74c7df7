"""Measures each step and writes the records "first", "comm" and "time" (engine/trace/records.py).

Four moments of a step are recorded before its commit::

    begun ── plan ── planned ── launch ── launched ── the device works ── arrived ── commit

With overlap, other steps are committed and planned between `launched` and `arrived`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.core.step import Emitted, StepPlan, StepResult
from engine.trace.records import RecordLog

now = time.perf_counter  # seconds


@dataclass(slots=True)
class StepTimes:
    """The moments of one step, in seconds of `now()`."""

    begun: float
    planned: float = 0.0
    launched: float = 0.0
    arrived: float = 0.0  # the ids are on the host


class StepClock:
    """Turns the moments of steps into records.

    `synchronous`: a step has ended when its launch returns, so the time of the launch includes the device's time.
    """

    def __init__(self, log: RecordLog, synchronous: bool) -> None:
        self._log = log
        self._synchronous = synchronous
        self._device_free_at = 0.0

    def record(self, times: StepTimes, plan: StepPlan, result: StepResult, emitted: list[Emitted]) -> float:
        """Record a step that was just committed; return its wall time in seconds.

        The wall time begins when the step begins or when the step before it ends, whichever is later. It ends when the
        ids arrive.
        """
        wall_s = times.arrived - max(times.begun, self._device_free_at)
        self._device_free_at = times.arrived
        prefills = len(plan.rows) - plan.num_decoding
        kind = "decode" if not prefills else "mixed" if plan.num_decoding else "prefill"
        if prefills:
            self._record_first_tokens(emitted, result.sample_ms)
        commit_s = now() - times.arrived
        launch_s = times.launched - times.planned
        if self._synchronous and result.device_ms is not None:
            launch_s -= result.device_ms / 1e3  # keep the host's part only
        if result.comm is not None:
            ranks, comm_ms = result.comm
            self._log.append("comm", plan.step, ranks, round(comm_ms, 3))
        self._log.append(
            "time", plan.step, round((times.planned - times.begun) * 1e6), round(launch_s * 1e6),
            round(commit_s * 1e6), round(wall_s * 1e3, 3), result.device_ms, kind,
        )  # fmt: skip
        return wall_s

    def _record_first_tokens(self, emitted: list[Emitted], sample_ms: float) -> None:
        """Record the three parts of the time to first token, for each request that has just drawn its first token."""
        for item in emitted:
            request = item.request
            if item.token_id is not None and not request.first_token_work:
                request.first_token_work = worked = self._log.worked()
                queue_ms = (request.admitted_work - request.submitted_work) * 1e3
                prefill_ms = (worked - request.admitted_work) * 1e3 - sample_ms
                self._log.append("first", request.id, round(queue_ms, 3), round(prefill_ms, 3), round(sample_ms, 3))
