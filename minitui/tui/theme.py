"""Three colour themes in the Okabe-Ito hues. Every meaning also has a glyph (glyphs.py), so hue is never needed.

A style is a few words, `"bold ink on select"`: an optional `bold`, the name of a colour, an optional background.
Widgets build rows of `(text, style)` with these names; `Palette.style` makes a Rich style of the words, once per theme.

Steady state is muted; a change glows: a block that becomes active is drawn in `active-glow`, then in `active-warm`
while it fades.
"""

from __future__ import annotations

from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.theme import Theme

from minitui.visible import visible_line

DARK = {
    "ground": "#0e1116",
    "ink": "#e4e8ee",
    "dim": "#8b949e",
    "faint": "#49515c",  # decoration only: dots of free blocks, rules, hatching; never text
    "frame": "#2b323b",
    "select": "#15283a",  # background of the selection
    "accent": "#f0e442",  # the focus and the selection
    "decode": "#34b58c",
    "prefill": "#f0803c",
    "prefill-2": "#d97a3a",  # every second chunk of the step bar
    "running": "#f2b134",
    "waiting": "#b9a36b",
    "hit": "#6cc0f5",
    "pool": "#e59ac4",
    "step": "#c9d1d9",
    "bad": "#ff7b72",
    "good": "#34b58c",
    "on-fill": "#0b0d11",  # text on the colours above
    # blocks: steady, glowing, fading
    "free": "#49515c",
    "free-glow": "#c9d1d9",
    "free-warm": "#8b949e",
    "cached": "#2f6d9d",
    "cached-glow": "#7cccff",
    "cached-warm": "#4a97cb",
    "shared": "#9c5a88",
    "shared-glow": "#ffa6d8",
    "shared-warm": "#c97bab",
    "active": "#976c10",
    "active-glow": "#ffc04a",
    "active-warm": "#cc9428",
    # backgrounds of text: chips of the block table
    "cached-chip": "#1c4463",
    "shared-chip": "#5d3a51",
    "active-chip": "#59410f",
    "empty-chip": "#1d232b",
    # eight owners
    "owner-0": "#56b4e9",
    "owner-1": "#e69f00",
    "owner-2": "#2fb48a",
    "owner-3": "#d886b4",
    "owner-4": "#f0e442",
    "owner-5": "#ef7f3d",
    "owner-6": "#7c9cf0",
    "owner-7": "#b8c0ca",
}

LIGHT = {
    "ground": "#fbfaf8",
    "ink": "#1b1f24",
    "dim": "#5b636d",
    "faint": "#b3b8bf",
    "frame": "#d3d6da",
    "select": "#e2eff9",
    "accent": "#0b62a8",
    "decode": "#00795a",
    "prefill": "#b04a00",
    "prefill-2": "#8a3a00",
    "running": "#8a5a00",
    "waiting": "#75622c",
    "hit": "#0a6aa8",
    "pool": "#a2457c",
    "step": "#4a525c",
    "bad": "#b3261e",
    "good": "#00795a",
    "on-fill": "#ffffff",
    "free": "#a6abb2",
    "free-glow": "#1b1f24",
    "free-warm": "#6c747e",
    "cached": "#5496c4",
    "cached-glow": "#005a8f",
    "cached-warm": "#2f86bd",
    "shared": "#b95a93",
    "shared-glow": "#8f1f66",
    "shared-warm": "#b3508c",
    "active": "#bd8214",
    "active-glow": "#8a5a00",
    "active-warm": "#a87210",
    "cached-chip": "#d8eaf7",
    "shared-chip": "#f6dfec",
    "active-chip": "#fae8c2",
    "empty-chip": "#eceae6",
    "owner-0": "#0a6aa8",
    "owner-1": "#8a5a00",
    "owner-2": "#00795a",
    "owner-3": "#a2457c",
    "owner-4": "#6b6300",
    "owner-5": "#b04a00",
    "owner-6": "#3f52b5",
    "owner-7": "#4a525c",
}

PROJECTOR = {
    "ground": "#000000",
    "ink": "#ffffff",
    "dim": "#c6ccd4",
    "faint": "#7f8894",
    "frame": "#7f8894",
    "select": "#003f7a",
    "accent": "#fff04d",
    "decode": "#2fe0a4",
    "prefill": "#ff8b3d",
    "prefill-2": "#ffb380",
    "running": "#ffc53d",
    "waiting": "#e6d59a",
    "hit": "#7fd0ff",
    "pool": "#ffa8da",
    "step": "#ffffff",
    "bad": "#ff9a93",
    "good": "#2fe0a4",
    "on-fill": "#000000",
    "free": "#6f7884",
    "free-glow": "#ffffff",
    "free-warm": "#c6ccd4",
    "cached": "#3d93d1",
    "cached-glow": "#a5deff",
    "cached-warm": "#6cb8ec",
    "shared": "#d583b5",
    "shared-glow": "#ffc2e5",
    "shared-warm": "#e89ac8",
    "active": "#c98f1b",
    "active-glow": "#ffd67a",
    "active-warm": "#efb23f",
    "cached-chip": "#0e3f66",
    "shared-chip": "#632f50",
    "active-chip": "#5c4000",
    "empty-chip": "#22272e",
    "owner-0": "#6fc6ff",
    "owner-1": "#ffb52e",
    "owner-2": "#2fe0a4",
    "owner-3": "#ffa8da",
    "owner-4": "#fff04d",
    "owner-5": "#ff8b3d",
    "owner-6": "#a4b8ff",
    "owner-7": "#ffffff",
}

OWNER_COLOURS = 8
SEGMENTS_KEPT = 8192


def _theme(name: str, colours: dict[str, str], dark: bool) -> Theme:
    return Theme(
        name=name,
        primary=colours["hit"],
        secondary=colours["pool"],
        accent=colours["accent"],
        warning=colours["running"],
        error=colours["bad"],
        success=colours["good"],
        foreground=colours["ink"],
        background=colours["ground"],
        surface=colours["ground"],
        panel=colours["empty-chip"],
        dark=dark,
        variables=dict(colours),
    )


THEMES: list[Theme] = [
    _theme("minitui-dark", DARK, dark=True),
    _theme("minitui-light", LIGHT, dark=False),
    _theme("minitui-projector", PROJECTOR, dark=True),
]
COLOURS: dict[str, dict[str, str]] = {theme.name: dict(theme.variables) for theme in THEMES}


class Palette:
    """The styles of one theme, each made at its first use."""

    def __init__(self, colours: dict[str, str]) -> None:
        self.colours = colours
        self._styles: dict[str, Style] = {}
        self._segments: dict[tuple[str, str], Segment] = {}

    def segment(self, run: tuple[str, str]) -> Segment:
        """The Rich segment of a run (text, style in words), cached: most runs repeat from frame to frame."""
        segment = self._segments.get(run)
        if segment is None:
            if len(self._segments) > SEGMENTS_KEPT:
                self._segments.clear()
            segment = self._segments[run] = Segment(visible_line(run[0]), self.style(run[1]))
        return segment

    def style(self, words: str) -> Style:
        """The Rich style for `"[bold] [underline] colour [on colour]"`. Raises KeyError for an unknown colour."""
        style = self._styles.get(words)
        if style is None:
            ink, ground, bold, underline = self.parts(words)
            style = Style(
                color=self.colours[ink],
                bgcolor=self.colours[ground],
                bold=bold or None,
                underline=underline or None,
            )
            self._styles[words] = style
        return style

    @staticmethod
    def parts(words: str) -> tuple[str, str, bool, bool]:
        """(colour, ground, bold, underline) of a style in words."""
        names = words.split()
        ground = "ground"
        if "on" in names:
            ground = names[names.index("on") + 1]
            names = names[: names.index("on")]
        bold, underline = "bold" in names, "underline" in names
        inks = [name for name in names if name not in ("bold", "underline")]
        return (inks[0] if inks else "ink"), ground, bold, underline


_PALETTES = {name: Palette(colours) for name, colours in COLOURS.items()}


def palette(app: Any = None) -> Palette:
    """The palette of the app's theme; the dark palette without an app, or with a theme that is not ours."""
    return _PALETTES.get(getattr(app, "theme", ""), _PALETTES["minitui-dark"])
