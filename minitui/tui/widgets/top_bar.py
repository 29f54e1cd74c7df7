"""The top bar: screens, model, and flags such as frozen, in the past, paused, slow motion or no connection."""

from __future__ import annotations

import textwrap

from textual.geometry import Size

from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.bar import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row, Run, clip
from minitui.viewmodel.view import View

NAME = " minitui "


class TopBar(Bar):
    """A line with screens, model and flags; below it, the story of a demo or a recording."""

    DEFAULT_CSS = "TopBar { height: auto; }"

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + len(self._story(width))

    def _story(self, width: int) -> list[str]:
        lines = self.app.story.split("\n")
        return [piece for line in lines for piece in textwrap.wrap(line, max(20, width - 4)) or [""] if line]

    def paint(self, view: View) -> int:
        """Paint the bar. If the height of the story has changed, ask Textual for a new layout."""
        if self.size.width and self.size.height != 1 + len(self._story(self.size.width)):
            self.refresh(layout=True)
        return super().paint(view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        row = Row(NAME, "bold ink")
        for mode, label in self.app.TABS:
            row.add(f" {label} ", "bold on-fill on hit" if self.app.current_mode == mode else "dim")
        flags = self._flags(view)
        room = width - row.width - sum(len(text) for text, _ in flags) - 2
        about = describe_engine(self.app.source.info, room - 3)
        if len(about) + 3 <= room:
            row.add("   " + about, "dim")
        elif room > 12:
            row.add("   " + clip(about, room - 3), "dim")
        row.to(width - sum(len(text) for text, _ in flags) - 1)
        rows = [row.extend(flags).done(width)]
        for line in self._story(width):
            story = Row("  ", "ink on select").add(line, "bold ink on select")
            rows.append(story.to(width, " ", "ink on select").done(width))
        return Picture(rows)

    def _flags(self, view: View) -> list[Run]:
        """Returns a flag for each reason why the picture does not show the present state of a running engine."""
        feed, condition = self.app.feed, self.app.condition
        flags: list[Run] = []
        if condition.hung:
            flags.append((" the engine does not answer: /restart ", "bold on-fill on bad"))
        elif condition.long:
            flags.append((f" {condition.long} ", "bold on-fill on running"))
        if feed.source.connection:
            flags.append((" no connection: trying again ", "bold on-fill on bad"))
        if feed.frozen:
            flags.append((f" FROZEN {glyphs().middot} {feed.steps_behind:,} steps behind ", "bold on-fill on hit"))
        times = [view.moment.travel_text, view.moment.gate_text, view.moment.pace_text]
        if view.moment.playback is not None:  # the bar of the replay says which moment is shown
            times = [f"recorded: {text}" for text in times[1:] if text]
        for text in times:
            if text:
                flags.append((f" {text} ", "bold on-fill on running"))
        return flags

    def clicked(self, view: View, column: int, row: int) -> None:
        start = len(NAME)
        for mode, label in self.app.TABS:
            if start <= column < start + len(label) + 2:
                self.app.open_mode(mode)
            start += len(label) + 2


def describe_engine(info: dict[str, object], room: int) -> str:
    """Returns the model, the device and the pool in a few words; empty before they are known. If they do not fit into
    `room` cells, the weights are left out, then the device and the pool."""
    if not info:
        return ""
    dot = f" {glyphs().middot} "
    weights = "dtype" if info.get("quantization", "none") == "none" else "quantization"
    known = [str(info[name]) for name in ("model", "device", weights) if name in info]
    if "num_blocks" in info:  # only minitui's servers report the pool
        small = " in fp8" if info.get("kv_cache_dtype") == "fp8" else ""
        null = " (1 null)" if str(info.get("engine", "")).startswith("vLLM") else ""  # vLLM counts its null block
        known.append(f"{info['num_blocks']:,} blocks of {info['block_size']}{small}{null}")
    while len(known) > 1 and len(dot.join(known)) > room:
        del known[-2 if len(known) > 2 else -1]
    return dot.join(known)
