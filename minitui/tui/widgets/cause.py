"""The cause of a step's time, as long as its place allows."""

from __future__ import annotations

from minitui.tui.glyphs import glyphs
from minitui.viewmodel.explain.cost_model import CostModel
from minitui.viewmodel.explain.timing import why_briefly, why_slow
from minitui.viewmodel.history.steps import StepRow


def cause_within(row: StepRow, model: CostModel | None, width: int) -> str:
    """Returns the longest text of at most `width` cells about why the step took its time: all causes with their steps,
    all without them, or the largest ones and dots. Empty if none fits."""
    whole = why_slow(row, model)
    if len(whole) <= width:
        return whole
    brief = why_briefly(row, model).split(", ")  # the largest part first
    parts = [", ".join([*brief[:n], glyphs().dots]) for n in range(len(brief) - 1, 0, -1)]
    return next((text for text in (", ".join(brief), *parts) if text and len(text) <= width), "")
