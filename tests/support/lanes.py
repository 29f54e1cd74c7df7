"""The phases of a lane, column by column."""

from __future__ import annotations

from minitui.viewmodel.history.lane import NOTHING, Lane


def codes(lane: Lane, first_step: int, k: int, n: int, until: int) -> list[int]:
    """The code of each of `n` columns of `k` steps; NOTHING after step `until`."""
    found = [NOTHING] * n
    for code, columns in lane.pieces(first_step, k, n, until):
        for column in columns:
            found[column] = max(found[column], code)
    return found
