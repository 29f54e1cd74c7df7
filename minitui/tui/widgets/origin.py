"""Prompt origin: how many tokens of a prompt came from the tree, how many were computed, and why the match ended."""

from __future__ import annotations

from minitui.text import match_reason
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row
from minitui.viewmodel.view import View


class PromptOrigin(LinePanel, can_focus=False):
    """Shows the prompt of the selected request, else of the newest running request, else of the last finished one."""

    TITLE = "Prompt: cached or computed"
    NEEDS_STATE = True

    def picture(self, view: View, width: int, height: int) -> Picture:
        id = view.subject()
        if id is None and view.selection is not None:
            known = [request for request in view.links.requests if request in view.history.lanes.lanes]
            id = max(known, default=None)
        lane = view.history.lanes.lanes.get(id) if id is not None else None
        if lane is None:
            return Picture([Row("no request yet", "dim").done(width)])
        prompt = max(1, lane.prompt_tokens)
        # A preempted request computes its prompt again: without `min`, the bar would be longer than the prompt.
        cached = lane.cached_tokens
        computed = min(lane.computed_tokens, prompt - cached)
        waiting = prompt - cached - computed
        g = glyphs()
        cells = [round(n * width / prompt) for n in (cached, computed)]
        row = Row(g.busy * cells[0], "hit").add(g.prefill * cells[1], "prefill")
        row.to(width, g.unused, "faint")
        words = Row(f"{cached:,} from the tree", "hit").add(" · ", "dim").add(f"{computed:,} computed", "prefill")
        if waiting > 0:
            words.add(f" · {waiting:,} left", "dim")
        rows = [row.done(width), words.done(width)]
        if lane.stop:
            rows.append(Row(match_reason(lane.stop, lane.stop_at, cached > 0), "dim").done(width))
        return Picture(rows[:height])
