"""Three colour themes in the Okabe-Ito hues. Each meaning has a glyph too (glyphs.py), so colours are not needed.

A style is a few words, for example `"bold ink on select"`: `bold` (optional), `underline` (optional), the name of a
colour, and a background (optional). Widgets build rows of `(text, style)`. `Palette.style` makes a Rich style from the
words, once per theme.

A block that has just changed has a bright colour, which then becomes muted: a block that becomes active is drawn in
`active-glow`, then in `active-warm`, then in `active`. A selected block keeps its hue and is drawn in `active-lit`.
"""

from __future__ import annotations

from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.theme import Theme

from minitui.visible import visible_line

# name: (colour in the dark theme, in the light theme, in the theme for projectors)
_COLOURS = {
    "ground": ("#0e1116", "#fbfaf8", "#000000"),
    "ink": ("#e4e8ee", "#1b1f24", "#ffffff"),
    "dim": ("#8b949e", "#5b636d", "#c6ccd4"),
    "faint": ("#49515c", "#b3b8bf", "#7f8894"),  # decoration only: dots of free blocks, rules, hatching; never text
    "frame": ("#2b323b", "#d3d6da", "#7f8894"),
    "select": ("#15283a", "#e2eff9", "#003f7a"),  # background of the selection
    "accent": ("#f0e442", "#0b62a8", "#fff04d"),  # for the frame of the focused panel and for the selection
    "decode": ("#34b58c", "#00795a", "#2fe0a4"),
    "prefill": ("#f0803c", "#b04a00", "#ff8b3d"),
    "prefill-2": ("#d97a3a", "#8a3a00", "#ffb380"),  # for every second chunk in the step bar
    "running": ("#f2b134", "#8a5a00", "#ffc53d"),
    "waiting": ("#b9a36b", "#75622c", "#e6d59a"),
    "hit": ("#6cc0f5", "#0a6aa8", "#7fd0ff"),
    "host": ("#4fc4c4", "#00707a", "#6fe6e6"),  # what the host does in a step
    "draft": ("#b3a4f5", "#5a4fb0", "#c8bcff"),  # drafts, and the tokens that they gain
    "pool": ("#e59ac4", "#a2457c", "#ffa8da"),
    "step": ("#c9d1d9", "#4a525c", "#ffffff"),
    "bad": ("#ff7b72", "#b3261e", "#ff9a93"),
    "good": ("#34b58c", "#00795a", "#2fe0a4"),
    "on-fill": ("#0b0d11", "#ffffff", "#000000"),  # for text on a background in one of the colours above
    # blocks: not changed; just changed (glow). Each has a contrast of 3 or more to the ground, and of 4.5 to `on-fill`.
    # All that is cached is blue: `hit` as ink, `cached` as fill. No other colour of a panel is blue.
    "free": ("#606975", "#878f98", "#6c7580"),
    "free-glow": ("#c9d1d9", "#1b1f24", "#ffffff"),
    "cached": ("#3a86ca", "#2f75ab", "#3585d0"),
    "cached-glow": ("#8ad3ff", "#0a4670", "#a5deff"),
    "shared": ("#d081bb", "#8a3a70", "#e594c6"),
    "shared-glow": ("#ffc4ea", "#5a0f42", "#ffd0ee"),
    "active": ("#ac7709", "#94620a", "#bd8410"),
    "active-glow": ("#ffc653", "#5e3b00", "#ffd67a"),
    # backgrounds of the chips in the block table
    "cached-chip": ("#1c4463", "#d8eaf7", "#0e3f66"),
    "shared-chip": ("#5d3a51", "#f6dfec", "#632f50"),
    "active-chip": ("#59410f", "#fae8c2", "#5c4000"),
    "empty-chip": ("#1d232b", "#eceae6", "#22272e"),
    # eight colours of chats; a fill for the blocks of other owners
    "owner-none": ("#8b949e", "#5b636d", "#c6ccd4"),
    "owner-0": ("#e69f00", "#8a5a00", "#ffb52e"),
    "owner-1": ("#2fb48a", "#00795a", "#2fe0a4"),
    "owner-2": ("#d886b4", "#a2457c", "#ffa8da"),
    "owner-3": ("#f0e442", "#6b6300", "#fff04d"),
    "owner-4": ("#b3a4f5", "#5a4fb0", "#c8bcff"),
    "owner-5": ("#ef7f3d", "#b04a00", "#ff8b3d"),
    "owner-6": ("#4fc4c4", "#00707a", "#6fe6e6"),
    "owner-7": ("#b8c0ca", "#4a525c", "#ffffff"),
}

OWNER_COLOURS = 8
SEGMENTS_KEPT = 8192
STATES = ("free", "active", "shared", "cached")
LIT = "cached-glow"  # the fill of blocks, nodes and chips that have just been reused
HEAT = 6  # shades of a state for ages and numbers of users: active-heat-0 has just changed


def owner_style(colour: int | None) -> str:
    """Returns the name of a chat's colour (see Texts.colour); of no chat: that of text."""
    return "ink" if colour is None else f"owner-{colour % OWNER_COLOURS}"


def _mixed(one: str, other: str, share: float) -> str:
    """Returns a colour between two, with this share of the other."""
    pairs = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def _with_derived(colours: dict[str, str]) -> dict[str, str]:
    """Returns the colours of a theme, with those between a state and its glow (`warm`), shades (`heat-0` to `-5`),
    and of selected blocks (`lit`), which are near the colour of the text."""
    for state in STATES:
        colours[f"{state}-warm"] = _mixed(colours[state], colours[f"{state}-glow"], 0.5)
        for i in range(HEAT):
            colours[f"{state}-heat-{i}"] = _mixed(colours[f"{state}-glow"], colours[state], i / (HEAT - 1))
    for fill in [*STATES, *(name for name in colours if name.startswith("owner-") or "-heat-" in name)]:
        colours[f"{fill}-lit"] = _mixed(colours.get(f"{fill}-glow", colours[fill]), colours["ink"], 0.15)
    return colours


def _theme(name: str, colours: dict[str, str]) -> Theme:
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
        dark=name != "minitui-light",
        variables=dict(colours),
    )


COLOURS: dict[str, dict[str, str]] = {
    f"minitui-{theme}": _with_derived({name: colours[column] for name, colours in _COLOURS.items()})
    for column, theme in enumerate(("dark", "light", "projector"))
}
THEMES = [_theme(name, colours) for name, colours in COLOURS.items()]


class Palette:
    """The styles of one theme. Each style is made at its first use."""

    def __init__(self, colours: dict[str, str]) -> None:
        self.colours = colours
        self._styles: dict[str, Style] = {}
        self._segments: dict[tuple[str, str], Segment] = {}

    def segment(self, run: tuple[str, str]) -> Segment:
        """Returns the Rich segment of a run (text, style in words). It is cached, because most runs are drawn again."""
        segment = self._segments.get(run)
        if segment is None:
            if len(self._segments) > SEGMENTS_KEPT:
                self._segments.clear()
            segment = self._segments[run] = Segment(visible_line(run[0]), self.style(run[1]))
        return segment

    def style(self, words: str) -> Style:
        """Returns the Rich style of `"[bold] [underline] colour [on colour]"`. Raises KeyError if the colour is
        unknown."""
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
        """Returns (colour, background, bold, underline) of a style in words."""
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
    """Returns the palette of the app's theme; the dark palette if there is no app or its theme is not in THEMES."""
    return _PALETTES.get(getattr(app, "theme", ""), _PALETTES["minitui-dark"])
