"""Notices: sentences that an application shows for a few seconds."""

from __future__ import annotations

from textual.app import App
from textual.notifications import SeverityLevel

from minitui.visible import visible

MAX_NOTICE = 400  # characters


class Notices(App[int]):
    """An application whose notices are plain text, and of which no two have the same text."""

    def say(self, text: str, error: bool = False) -> None:
        """Show a sentence for a few seconds."""
        text = visible(text)
        if len(text) > MAX_NOTICE:
            text = text[:MAX_NOTICE] + "…"  # an error may quote a long text that was pasted in place of a name
        seconds = max(8.0 if error else 2.0, len(text) / 25)  # enough time to read the text
        self.notify(text, severity="error" if error else "information", timeout=seconds, markup=False)

    def notify(
        self, message: str, *, title: str = "", severity: SeverityLevel = "information", timeout: float | None = None,
        markup: bool = False,
    ) -> None:  # fmt: skip
        """Show a notice, always without markup. It replaces one with the same text: a key pressed again does not stack
        notices."""
        for notice in [notice for notice in self._notifications if notice.message == message]:
            self._unnotify(notice, refresh=False)
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)
