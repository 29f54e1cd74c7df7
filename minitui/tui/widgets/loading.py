"""The progress bar of an engine that is starting."""

from __future__ import annotations

from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.bar import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row, fit
from minitui.viewmodel.view import View


class Loading(Bar):
    """Shows a text, a percentage and a bar while `app.progress` is set; hidden otherwise."""

    DEFAULT_CSS = "Loading { height: 3; padding: 1 2 0 2; }"

    def paint(self, view: View) -> int:
        """Paint the bar, or hide it."""
        wanted = self.app.progress is not None
        if self.display != wanted:
            self.display = wanted
        return super().paint(view) if wanted else 0

    def picture(self, view: View, width: int, height: int) -> Picture:
        progress = self.app.progress or {}
        done, total = progress.get("done") or 0, progress.get("total") or 0
        text = str(progress.get("text") or progress.get("stage") or self.app.source.missing)
        row = Row(fit(text, width - 6), "dim")
        if not total:
            return Picture([row.done(width)])
        share = min(max(done / total, 0.0), 1.0)
        filled = round(share * width)
        g = glyphs()
        bar = Row(g.active * filled, "running").add(g.rule * (width - filled), "faint")
        return Picture([row.right(f"{share:4.0%}", width, "bold ink").done(width), bar.done(width)])
