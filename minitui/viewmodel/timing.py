"""Step timings: percentiles by kind of step, the cause of a slow step, host and device time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minitui.viewmodel.history import FirstToken, FirstTokens, StepRow, Steps

WINDOW_SECONDS = 10.0
MAX_STEPS = 20_000  # in the window
RECENT_FIRST_TOKENS = 32
LONG_PAUSE_S = 0.1  # a pause before a step explains its length only if longer than this
USUAL_EXCESS = 0.25  # a step longer than the median by less than this share needs no explanation


@dataclass(frozen=True, slots=True)
class KindStats:
    """Durations of one kind of step in the window, in ms. `share`: its share of the total step time."""

    steps: int = 0
    p50: float = 0.0
    p99: float = 0.0
    worst: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Figures of the window of steps that ends at the picture's last step. `seconds`: the sum of their step times."""

    decode: KindStats = KindStats()
    mixed: KindStats = KindStats()
    prefill: KindStats = KindStats()
    seconds: float = 0.0
    steps: int = 0
    slowest: StepRow | None = None
    first_token: FirstToken | None = None  # the newest first token
    median_first_ms: float | None = None  # median time to first token, of the last RECENT_FIRST_TOKENS
    first_tokens: int = 0  # number of first tokens in this median
    host_ms: float = 0.0  # mean per step: plan + launch + commit
    device_ms: float | None = None  # mean per step; None: not measured
    device_busy: float = 0.0  # device time as a share of step time
    rows: float = 0.0  # median number of rows in decode-only steps
    pause_s: float = 0.0  # median pause between two steps
    ranks: int = 1  # GPUs that share the model
    comm_ms: float = 0.0  # mean time per step in collectives: the `comm` records
    comm_share: float = 0.0  # share of step time in collectives
    recent: tuple[StepRow, ...] = field(default=())  # the last few steps, oldest first
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # draft tokens accepted
    per_row: float = 1.0  # tokens per row and decode step, accepted drafts included


def summarise(steps: Steps, firsts: FirstTokens, horizon: int, seq: int, recent: int = 8) -> Timings:
    """Returns the timings of the last WINDOW_SECONDS of step time up to step `horizon`.

    Only time inside steps counts: a long pause does not empty the window.
    """
    last = steps.get(horizon)
    while last is not None and last.wall_ms is None:  # the timing of this step has not arrived
        last = steps.get(last.step - 1)
    seen = firsts.until(seq)[-RECENT_FIRST_TOKENS:]
    median = float(np.median([item.total_ms for item in seen])) if seen else None
    if last is None:
        return Timings(first_token=seen[-1] if seen else None, median_first_ms=median, first_tokens=len(seen))
    for most in (MAX_STEPS // 8, MAX_STEPS):  # the smaller number is almost always enough
        at = steps.indices(max(steps.first, last.step - most), last.step)
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
        pause_s=float(np.median(np.maximum(0.0, began[1:] - ended[:-1]))) if len(at) > 1 else 0.0,
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
    """Returns why this step took longer than the median decode-only step: "+7.1 ms: 495 prefill tokens".

    The causes that records can show, in this order: prefill, drafts, exchange between ranks, host time, more rows
    than usual, a pause before the step. If none applies, the text says so.
    """
    if row.wall_ms is None:
        return ""
    usual = timings.decode.p50
    if not usual:
        return f"{row.prefill_tokens:,} prefill tokens" if row.prefill_tokens else ""
    excess = row.wall_ms - usual
    if excess < USUAL_EXCESS * usual:
        return "a usual decode step" if not row.chunks else "no longer than a decode step"
    host = (row.plan_ms or 0) + (row.launch_ms or 0) + (row.commit_ms or 0)
    if row.prefill_tokens:
        cause = f"{row.prefill_tokens:,} prefill tokens"
    elif row.drafted:
        cause = f"{row.drafted:,} draft tokens"
    elif row.comm_ms is not None and row.comm_ms - timings.comm_ms > excess / 2:
        cause = f"{row.comm_ms:.1f} ms of exchange between ranks"
    elif row.device_ms is not None and host - timings.host_ms > excess / 2:
        cause = f"host {host:.1f} ms, usually {timings.host_ms:.1f}"
    elif row.decodes >= 1.5 * timings.rows:
        cause = f"{row.decodes:,} rows, usually {timings.rows:,.0f}"
    elif row.pause_s > max(LONG_PAUSE_S, 4 * timings.pause_s):
        cause = f"first step after a pause of {row.pause_s:,.1f} s"
    else:
        cause = "no cause recorded"
    return f"+{excess:.1f} ms: {cause}"
