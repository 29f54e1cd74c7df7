"""The themes for terminals of sixteen colours, chosen by hand: the nearest of sixteen to each of our hues are too few,
and what should differ becomes one. The numbers are those of ANSI; what they look like is the terminal's affair.
"""

from __future__ import annotations

# As Rich maps true colours to the sixteen: these map to themselves.
ANSI = (
    "#000000", "#aa0000", "#00aa00", "#aa5500", "#0000aa", "#aa00aa", "#00aaaa", "#aaaaaa",
    "#555555", "#ff5555", "#55ff55", "#ffff55", "#5555ff", "#ff55ff", "#55ffff", "#ffffff",
)  # fmt: skip

_DARK = {
    0: "ground on-fill",
    3: "prefill waiting active active-warm owner-4",
    4: "select cached-chip empty-chip",
    5: "shared shared-warm shared-chip",
    6: "cached cached-warm",
    7: "dim step free-warm owner-7",
    8: "faint frame free active-chip",
    9: "bad prefill-2 owner-5",
    10: "decode good owner-2",
    11: "accent running active-glow owner-1",
    12: "owner-6",
    13: "pool shared-glow owner-3",
    14: "hit cached-glow owner-0",
    15: "ink free-glow",
}
_LIGHT = {
    0: "ink free-glow",
    1: "prefill bad owner-1 active-glow",
    2: "decode good owner-2",
    3: "active active-warm owner-4",
    4: "accent hit cached-glow owner-0",
    5: "prefill-2 running pool shared shared-warm shared-glow owner-3",
    6: "cached cached-warm owner-5",
    7: "faint frame free empty-chip",
    8: "dim waiting step free-warm owner-7",
    11: "active-chip",
    12: "owner-6",
    13: "shared-chip",
    14: "select cached-chip",
    15: "ground on-fill",
}


def _colours(numbers: dict[int, str]) -> dict[str, str]:
    return {name: ANSI[number] for number, names in numbers.items() for name in names.split()}


DARK, LIGHT = _colours(_DARK), _colours(_LIGHT)
