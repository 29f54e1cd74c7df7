"""The status bar: whether letters are text or keys, what the keys do, and whether the picture is up to date."""

from __future__ import annotations

from textual.widgets import TextArea

from minitui.tui.glyphs import glyphs
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bar import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row
from minitui.viewmodel.view import View

FRESH_S = 60.0  # dropped records are shown as an alarm for so long


class StatusBar(Bar):
    """The last line of a screen. It shows the screen's keys, or the prompt's keys while the prompt has the focus."""

    def picture(self, view: View, width: int, height: int) -> Picture:
        screen, feed = self.screen, self.app.feed
        assert isinstance(screen, BaseScreen)
        typing = isinstance(self.app.focused, TextArea)
        row = Row(" TYPING " if typing else " KEYS ", "bold on-fill on running" if typing else "bold on-fill on decode")
        figures = ""
        if screen.FIGURES or feed.backlog or feed.dropped:
            dot = glyphs().middot
            figures = f"{view.steps_per_frame:,.0f} steps/frame {dot} " if width >= 100 else ""
            if width >= 100 or feed.backlog:
                figures += f"backlog {feed.backlog:,} {dot} "
            figures += f"{feed.dropped:,} dropped{_ago(view.moment.dropped_s) if feed.dropped else ''} "
        room = width - len(figures) - 1
        for key, what in self._typing_hints() if typing else self._key_hints(screen):
            if row.width + len(key) + len(what) + 3 > room:
                break
            row.add("  " + key, "bold ink").add(" " + what, "dim")
        fresh = feed.dropped > 0 and view.moment.dropped_s < FRESH_S
        return Picture([row.right(figures, width, "bad" if fresh else "dim").done(width)])

    def _typing_hints(self) -> list[Hint]:
        if self.app.focused is not None and self.app.focused.screen is not self.screen:  # in a dialog
            return [("enter", "accept"), ("esc", "cancel")]
        escape = [("esc", "keys")]
        if self.app.answer_waits:
            state = "engine paused" if self.app.gated else "answer waits"
            escape = [("esc", f"keys ({state})"), ("esc esc", "cancel")]
        elif self.app.session.busy:
            escape = [("esc", "cancel"), (self.app.key_of("keys"), "keys")]
        return [("enter", "send"), *escape, ("/", "commands"), ("tab", "complete"), ("ctrl+j", "new line")]

    def _key_hints(self, screen: BaseScreen[None]) -> list[Hint]:
        view = self.app.view
        now = [(self.app.key_of("now"), "now")] if view.moment.travel_text and view.moment.playback is None else []
        return now + screen.hints()


def _ago(seconds: float) -> str:
    """Returns how long ago records were dropped: " 12 s ago", " 3 min ago", " 2 h ago"."""
    if seconds < FRESH_S:
        return f" {seconds:.0f} s ago"
    return f" {seconds / 60:.0f} min ago" if seconds < 3600 else f" {seconds / 3600:.0f} h ago"
