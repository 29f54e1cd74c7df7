"""Paints the panels of the inspect screen in turns, so that the work is spread over the frames."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from minitui.tui.app_base import AppBase
from minitui.tui.widgets.bar import Bar
from minitui.tui.widgets.base import LinePanel
from minitui.viewmodel.view import View

# Panel -> (n, k): the panel is painted in frame k of every n frames (k from 0), which spreads the work over the frames.
# If the frame is not drawn, the panel is painted in the next one. While frames are skipped, n is at least
# SKIPPING_EVERY. Panels that change with every step are painted often, panels of figures less often. After a selection,
# and in every frame while the picture does not move (frozen, paused, in the past), all panels are painted.
EVERY = {
    "step": (2, 0), "map": (2, 0), "table": (2, 1), "lanes": (4, 1), "events": (4, 3), "bars": (2, 1),
    "tree": (4, 2), "vitals": (4, 0), "timings": (10, 4), "experts": (4, 3), "waterfall": (2, 1),
    "requests": (4, 0), "timeline": (4, 3), "trends": (10, 2), "about": (4, 2),
}  # fmt: skip
SKIPPING_EVERY = 4
PAINT_S = 0.005  # the panels of a frame are painted in turns of about this time


class PanelPainter:
    """Knows which panels are due. `later` calls a function after the keys that have arrived are handled."""

    def __init__(
        self, app: AppBase, panels: Mapping[str, LinePanel], bars: Sequence[Bar], later: Callable[..., object]
    ) -> None:
        self.frames = 0
        self._app, self._panels, self._bars, self._later = app, panels, bars, later
        self._due: deque[str] = deque()
        self._at_once = False  # the picture must not wait: something was selected, or the picture does not move
        self._painted_moment: object = None

    def paint(self, view: View) -> None:
        """Paint what is due in this frame; called once a frame."""
        limiter = self._app.frame_limiter
        before, self.frames = self.frames, self.frames + limiter.stride
        moment = (view.version, view.moment.travel_text, view.moment.still)
        at_once = self._at_once = view.moment.still or moment != self._painted_moment
        self._painted_moment = moment
        for name, (every, offset) in EVERY.items():
            if limiter.skipping:
                every = max(every, SKIPPING_EVERY)
            is_due = at_once or (self.frames - offset) // every > (before - offset) // every
            if name == "bars":
                for bar in self._bars if is_due else ():
                    bar.paint(view)
            elif (is_due or not self._panels[name].painted) and name not in self._due:
                self._due.append(name)
        if self._app.is_headless:
            self._paint_due()
        else:
            self._later(self._paint_due)

    def _paint_due(self) -> None:
        """Paint the panels of `_due`. After PAINT_S, the rest waits until the keys that arrived are handled."""
        began = time.monotonic()
        if self._app.feed.key_waits("panels") and not (self._at_once or self._app.is_headless):
            return  # the next frame paints them
        while self._due:
            panel = self._panels[self._due.popleft()]
            if panel.display:
                panel.paint(self._app.view)
                if time.monotonic() - began >= PAINT_S and self._due and not self._app.is_headless:
                    self._later(self._paint_due)
                    return
