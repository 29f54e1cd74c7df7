"""Why a step was slow: percentiles by kind of step, the slowest one explained, host and device side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minitui.viewmodel.history import FirstToken, FirstTokens, StepRow, Steps

WINDOW_SECONDS = 10.0
MOST_STEPS = 20_000
RECENT_FIRST_TOKENS = 32
REST = 0.1  # seconds: a step after a longer rest than this, and than is usual, may owe its length to that
USUAL = 0.25  # a step longer than the median by less than this share needs no explanation


@dataclass(frozen=True, slots=True)
class KindStats:
    """Durations of one kind of step in the window, in ms; `share` of the time that steps took."""

    steps: int = 0
    p50: float = 0.0
    p99: float = 0.0
    worst: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """The window that ends with the picture's last step; `seconds` is how long its steps took."""

    decode: KindStats = KindStats()
    mixed: KindStats = KindStats()
    prefill: KindStats = KindStats()
    seconds: float = 0.0
    steps: int = 0
    slowest: StepRow | None = None
    first_token: FirstToken | None = None  # the last one
    median_first_ms: float | None = None  # of the last RECENT_FIRST_TOKENS
    first_tokens: int = 0
    host_ms: float = 0.0  # mean per step: plan + launch + commit
    device_ms: float | None = None  # mean per step; None: not measured
    device_busy: float = 0.0  # share of the time in which steps were running
    rows: float = 0.0  # median of the rows of the steps that only decode
    rest: float = 0.0  # median of the seconds between two steps
    ranks: int = 1  # that share the model
    comm_ms: float = 0.0  # mean per step, in which they exchanged or waited for it
    comm_share: float = 0.0  # of the time that steps took
    recent: tuple[StepRow, ...] = field(default=())  # the last few, oldest first
    drafted: int = 0  # draft tokens computed
    accepted: int = 0  # of those, how many were right
    per_row: float = 1.0  # tokens that a request drew in a step of its own, drafts accepted included


def summarise(steps: Steps, firsts: FirstTokens, horizon: int, seq: int, recent: int = 8) -> Timings:
    """Timings of the steps that took the last WINDOW_SECONDS up to step `horizon`.

    Only the time in which steps ran counts: who looks at a step for a minute, the engine paused, still sees those
    before it.
    """
    last = steps.get(horizon)
    while last is not None and last.wall_ms is None:  # its timing has not arrived
        last = steps.get(last.step - 1)
    seen = firsts.until(seq)[-RECENT_FIRST_TOKENS:]
    median = float(np.median([item.total_ms for item in seen])) if seen else None
    if last is None:
        return Timings(first_token=seen[-1] if seen else None, median_first_ms=median, first_tokens=len(seen))
    for many in (MOST_STEPS // 8, MOST_STEPS):  # the window is seldom longer than the first
        at = steps.indices(max(steps.first, last.step - many), last.step)
        at = at[~np.isnan(steps.column("wall")[at])]
        spent = np.cumsum(steps.column("wall")[at][::-1])  # ms, from the last step back
        if spent[-1] > WINDOW_SECONDS * 1e3:
            break
    at = at[-max(1, int(np.searchsorted(spent, WINDOW_SECONDS * 1e3, "right"))) :]
    wall = steps.column("wall")[at]
    decodes = steps.column("decodes")[at]
    prefills = steps.prefilled(at)
    drafted, accepted = int(steps.column("drafted")[at].sum()), int(steps.column("accepted")[at].sum())
    total = float(wall.sum()) or 1.0
    numbers = steps.column("step")[at]
    worst = steps.get(int(numbers[int(wall.argmax())])) if len(wall) else None
    device = steps.column("device")[at]
    known = ~np.isnan(device)
    comm = steps.column("comm")[at]
    exchanged = ~np.isnan(comm)
    host = steps.column("plan")[at] + steps.column("launch")[at] + steps.column("commit")[at]
    rows = [steps.get(int(n)) for n in numbers[-recent:]]
    began, ended = steps.column("t")[at], steps.column("ended")[at]
    return Timings(
        decode=_stats(wall[prefills == 0], total),
        mixed=_stats(wall[(prefills > 0) & (decodes > 0)], total),
        prefill=_stats(wall[(prefills > 0) & (decodes == 0)], total),
        seconds=float(wall.sum()) / 1e3,
        steps=len(at),
        slowest=worst,
        first_token=seen[-1] if seen else None,
        median_first_ms=median,
        first_tokens=len(seen),
        host_ms=float(host.mean()),
        device_ms=float(device[known].mean()) if known.any() else None,
        device_busy=min(1.0, float(device[known].sum()) / float(wall[known].sum())) if known.any() else 0.0,
        rows=float(np.median(decodes[prefills == 0])) if (prefills == 0).any() else 0.0,
        rest=float(np.median(np.maximum(0.0, began[1:] - ended[:-1]))) if len(at) > 1 else 0.0,
        ranks=steps.ranks if exchanged.any() else 1,
        comm_ms=float(comm[exchanged].mean()) if exchanged.any() else 0.0,
        comm_share=float(comm[exchanged].sum() / (wall[exchanged].sum() or 1.0)) if exchanged.any() else 0.0,
        recent=tuple(row for row in rows if row is not None),
        drafted=drafted,
        accepted=accepted,
        per_row=1 + accepted / int(decodes.sum()) if decodes.any() else 1.0,
    )


def _stats(wall: np.ndarray, total: float) -> KindStats:
    if not len(wall):
        return KindStats()
    return KindStats(
        steps=len(wall),
        p50=float(np.percentile(wall, 50)),
        p99=float(np.percentile(wall, 99)),
        worst=float(wall.max()),
        share=float(wall.sum()) / total,
    )


def why_slow(row: StepRow, timings: Timings) -> str:
    """What made this step longer than a usual one that only decodes: "+7.1 ms: 495 prefill tokens".

    Only what the records tell: its prefill, the host's part, more rows than usual, a rest before it; else that it is
    none of these.
    """
    if row.wall_ms is None:
        return ""
    usual = timings.decode.p50
    if not usual:
        return f"{row.prefill_tokens:,} prefill tokens" if row.prefill_tokens else ""
    excess = row.wall_ms - usual
    if excess < USUAL * usual:
        return "as long as decoding alone takes" if not row.chunks else "no longer than decoding alone takes"
    host = (row.plan_ms or 0) + (row.launch_ms or 0) + (row.commit_ms or 0)
    if row.prefill_tokens:
        cause = f"{row.prefill_tokens:,} prefill tokens"
    elif row.drafted:
        cause = f"{row.drafted:,} draft tokens"
    elif row.comm_ms is not None and row.comm_ms - timings.comm_ms > excess / 2:
        cause = f"{row.comm_ms:.1f} ms in exchange between ranks"
    elif row.device_ms is not None and host - timings.host_ms > excess / 2:
        cause = f"host {host:.1f} ms, not {timings.host_ms:.1f}"
    elif row.decodes >= 1.5 * timings.rows:
        cause = f"{row.decodes:,} rows, usually {timings.rows:,.0f}"
    elif row.rest > max(REST, 4 * timings.rest):
        cause = f"first after {row.rest:,.1f} s of rest"
    else:
        cause = f"{row.decodes:,} row{'s' if row.decodes != 1 else ''} as usual, no prefill"
    return f"+{excess:.1f} ms: {cause}"
