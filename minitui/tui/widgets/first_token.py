"""First tokens: how long did recent requests wait for their first token, and how much of their prompt was cached?"""

from __future__ import annotations

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, legend
from minitui.viewmodel.view import View

PARTS = (("queue", "queued", "waiting"), ("prefill", "prefill", "prefill"))  # (word, name of the glyph, style)


class FirstTokens(LinePanel, can_focus=False):
    """One bar per request, the newest at the top; its parts are the times in the queue and in prefill."""

    TITLE = "First token, ms"
    NEEDS_STATE = True

    def picture(self, view: View, width: int, height: int) -> Picture:
        items = view.history.first_tokens.until(view.moment.shown.state.seq)[-height:][::-1]
        if not items:
            return Picture([Row("no request has a first token yet", "dim").done(width)])
        longest = max(item.total_ms for item in items) or 1.0
        name = max(len(str(item.request)) for item in items) + 2
        rows: list[Runs] = []
        for item in items:
            lane = view.history.lanes.lanes.get(item.request)
            cached = f"{lane.cached_tokens:,} of {lane.prompt_tokens:,} cached" if lane is not None else ""
            room = max(6, width - name - 8 - 22)
            row = Row(f"r{item.request}", "ink").to(name)
            for value, (_, glyph, style) in zip((item.queue_ms, item.prefill_ms), PARTS, strict=True):
                cells = round(value / longest * room)
                row.add(getattr(glyphs(), glyph) * min(cells, name + room - row.width), style)
            row.to(name + room).right(ms(item.total_ms), name + room + 7, "bold ink")
            if width - row.width > len(cached):
                row.add(" ").add(cached, "hit" if lane is not None and lane.cached_tokens else "dim")
            rows.append(row.done(width))
        parts = ((getattr(glyphs(), glyph), style, word) for word, glyph, style in PARTS)
        return Picture(rows, legend=legend(*parts, gap=" "))
