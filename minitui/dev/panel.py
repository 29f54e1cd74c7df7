"""A small application that shows one panel with simulated records: `python -m minitui.dev.panel map`.

Keys: space pauses the simulated engine, n runs one step, t changes the theme, a switches to ASCII and back, q quits.
All other keys go to the panel.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding

from engine.trace.state import State
from minitui.dev.simulator import CLASSROOM, Load, Stress
from minitui.tui import panels
from minitui.tui.glyphs import ASCII, glyphs, use_ascii
from minitui.tui.theme import THEMES
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.occupancy import PromptOrigin
from minitui.tui.widgets.lecture import FirstTokens, Why
from minitui.tui.widgets.lesson import panels as lesson_panels
from minitui.tui.widgets.side_by_side import SideBySide
from minitui.viewmodel.view import View


def stress_view(load: Load = CLASSROOM, seconds: float = 0.0, frames: int = 1) -> tuple[Stress, View]:
    """Returns a simulated engine and its view after `seconds` of simulated time, folded in `frames` frames."""
    stress = Stress(load)
    view = View()
    view.texts.ids_to_text = stress.words.decode
    view.texts.group_names = stress.group_names
    view.reset(State(load.blocks + 1, load.block_size, load.budget, load.rows).snapshot())
    for _ in range(frames):
        stress.run(seconds / frames)
        stress.show(view)
    return stress, view


class Alone(App[None]):
    """An application with one panel."""

    BINDINGS: ClassVar = [
        Binding("space", "pause", "pause"),
        Binding("n", "step", "step"),
        Binding("t", "theme", "theme"),
        Binding("a", "ascii", "glyphs"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self, panel: Callable[[], LinePanel], load: Load = CLASSROOM, warm_up: float = 8.0, fps: float = 20.0
    ) -> None:
        super().__init__()
        self.fps = fps  # 0: no timer, so frames are drawn only by calls of `tick` or `show`
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name
        self.stress, self.view = stress_view(load, warm_up)
        self.panel = panel()
        self._last = time.monotonic()

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_mount(self) -> None:
        self.panel.focus()
        if self.fps:
            self.set_interval(1 / self.fps, self.tick)

    def tick(self) -> None:
        """Draws one frame: simulates the time since the last frame, folds the records, paints the panel."""
        now = time.monotonic()
        self.stress.run(min(0.2, now - self._last))
        self._last = now
        self.show()

    def show(self) -> None:
        self.stress.show(self.view)
        self.panel.paint(self.view)

    async def run_action(self, action: Any, *namespaces: Any, **options: Any) -> bool:
        ran = await super().run_action(action, *namespaces, **options)
        self.panel.repaint()
        return ran

    def action_pause(self) -> None:
        self.stress.gate(not self.stress.closed)

    def action_step(self) -> None:
        self.stress.gate(True, "stepping")
        self.stress.run_steps(1)
        self.show()

    def action_theme(self) -> None:
        names = [theme.name for theme in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]

    def action_ascii(self) -> None:
        use_ascii(glyphs() is not ASCII)


PANELS: dict[str, type[LinePanel]] = {
    **lesson_panels.PANELS,
    **{name: panel.widget for name, panel in panels.PANELS.items()},
    "compare": SideBySide, "first-token": FirstTokens, "origin": PromptOrigin, "why": Why,
}


def main(name: str) -> None:
    """Runs the application with the panel `name`."""
    panel = PANELS.get(name)
    if panel is None:
        sys.exit(f"there is no panel {name!r}: the panels are {', '.join(PANELS)}")
    Alone(panel).run()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["map"]))
