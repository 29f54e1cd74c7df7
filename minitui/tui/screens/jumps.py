"""The last jump in time on the inspect screen, and the way back from it."""

from __future__ import annotations

from typing import NamedTuple

from minitui.tui.app_base import AppBase


class Place(NamedTuple):
    """The current panel, and whether it is maximised."""

    panel: str
    maximised: bool


class _Jump(NamedTuple):
    """`place`: the panel before the jump. `before`: the step that was shown; None: the present."""

    step: int
    place: Place
    before: int | None


class Jumps:
    """Goes to steps, and back to the panel and the moment before the last jump."""

    def __init__(self, app: AppBase) -> None:
        self._app = app
        self._last: _Jump | None = None

    @property
    def shown(self) -> bool:
        """True if the picture still shows the step of the last jump."""
        return self._last is not None and self._last.step == self._app.view.moment.horizon

    def go(self, step: int, place: Place) -> bool:
        """Show the engine as it was after a step. `place`: the panel to go back to. False: the step is not kept."""
        view = self._app.view
        stays = view.moment.travel_text or view.moment.playback is not None
        if view.moment.horizon != step or self._last is None:
            self._last = _Jump(step, place, view.moment.horizon if stays else None)
        if self._app.travel_to(step):
            return True
        self._last = None
        self._app.say(f"step {step:,} is no longer kept: the picture cannot go back so far", error=True)
        return False

    def undo(self) -> Place | None:
        """Go back to the moment before the last jump. Returns the panel to show; None if that step is no longer
        shown."""
        last, shown = self._last, self.shown
        self._last = None
        if last is None or not shown:
            return None
        if last.before is None:
            self._app.to_now()
        else:
            self._app.travel_to(last.before)
        return last.place
