"""Loads of the simulated engine (minitui/dev/simulator.py), views that begin with it, and figures of views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.trace.state import State
from minitui.dev.simulator import Load
from minitui.viewmodel.history.lane import NOTHING, Lane
from minitui.viewmodel.view import View

# A pool so tight that requests are preempted, and a budget so small that prompts are chunked.
TIGHT = Load(blocks=40, chats=6, rows=6, budget=48, context=480, reply=(60, 160), turns=3, think=0.05, paste=0.3)
LONG = Load(blocks=600, chats=6, rows=6, budget=512, context=2048, reply=(60, 160), turns=3, think=0.05, paste=0.3)


def empty_state(load: Load) -> State:
    """Returns the state of a simulated engine before its first record."""
    return State(load.blocks + 1, load.block_size, load.budget, load.rows)


def empty_view(load: Load) -> View:
    """Returns a view of this state."""
    view = View()
    view.reset(empty_state(load).snapshot())
    return view


def codes(lane: Lane, first_step: int, k: int, n: int, until: int) -> list[int]:
    """The phases of a lane: the code of each of `n` columns of `k` steps; NOTHING after step `until`."""
    found = [NOTHING] * n
    for code, columns in lane.pieces(first_step, k, n, until):
        for column in columns:
            found[column] = max(found[column], code)
    return found


def percentiles(values: Sequence[float] | np.ndarray, shares: Sequence[float] = (50, 99)) -> Any:
    """Returns the percentiles as minitui defines them; those of fewer than ten values are themselves values."""
    return np.percentile(values, shares, method="inverted_cdf" if len(values) < 10 else "linear")
