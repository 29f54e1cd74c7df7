"""What a hit costs that a side group cut short: full attention has the tokens, but another kind of memory does not."""

from __future__ import annotations

from engine.trace.views import RequestView
from minitui.text import match_reason
from minitui.viewmodel.history.history import History
from minitui.viewmodel.history.lane import PREFILLING, Lane
from minitui.viewmodel.state.side_groups import FULL

CUT = ("window", "state")  # `stop` of the matches that a side group cut


def again_ms(history: History, lane: Lane | None, at: int, cached: int) -> float | None:
    """Returns the time that a request needs for the tokens [cached, at), at the speed at which the steps with its
    prompt computed prompts. None: these steps are not known, or have not all ended."""
    if lane is None or lane.preemptions or lane.request.prompt_tokens - lane.request.cached_tokens > lane.missed_tokens:
        return None
    steps = [step for code, first, last in lane.spans if code == PREFILLING for step in range(first, last + 1)]
    took = [history.steps.took_ms(step) if step <= history.steps.committed else None for step in steps]
    tokens = sum(chunk[2] for step in steps for chunk in history.steps.chunks(step)) if None not in took else 0
    total = sum(ms for ms in took if ms is not None)
    return total * (at - cached) / tokens if tokens and total == total else None  # NaN: the time of a step is unknown


def served(names: list[str], request: RequestView) -> list[tuple[str, int, bool]]:
    """Returns (group, tokens, exact) of a hit that a side group cut: how many tokens each group has for the prompt.
    Not exact: the group has at least these. `names`: of the side groups. Empty for other hits."""
    stop, at, detail = request.match
    if stop not in CUT:
        return []
    cutter = detail.partition("cut by ")[2]
    return [(FULL, at, True), *((name, request.cached_tokens, name == cutter) for name in names)]


def why_ended(history: History, lane: Lane | None, stop: str, at: int, cached: int, detail: str = "") -> str:
    """Returns why a match ended (minitui/text.py), with the time of what is computed again if a side group cut it."""
    again = again_ms(history, lane, at, cached) if stop in CUT else None
    return match_reason(stop, at, cached, detail, again)
