"""The glyphs that the panels draw, and the ASCII characters that replace them with `--ascii`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One glyph for each meaning. The ASCII set is for terminals and fonts that lack the others."""

    free: str = "·"
    cached: str = "░"
    shared: str = "▓"
    active: str = "█"
    filling: str = "▄"
    unused: str = "╱"  # unused budget
    spark: str = "▁▂▃▄▅▆▇█"
    rule: str = "─"
    decode: str = "─"
    gaining: str = "═"  # decoding, several tokens in a step
    prefill: str = "█"
    queued: str = "·"
    preempted: str = "×"
    finished: str = "■"
    in_use: str = "●"
    evictable: str = "○"
    pending: str = "◌"
    branch: str = "├"
    last_branch: str = "└"
    peak: str = "▲"
    arrow: str = "→"
    right: str = "✓"
    dots: str = "…"
    dash: str = "–"
    times: str = "×"
    middot: str = "·"
    busy: str = "█"
    prompt: str = "▒"  # beside `busy`, where a bar is of both
    folded: str = "▸"
    unfolded: str = "▾"


UNICODE = Glyphs()
ASCII = Glyphs(
    free=".",
    cached="o",
    shared="S",
    active="#",
    filling="+",
    unused="/",
    spark="_.:-=+*#",
    rule="-",
    decode="-",
    gaining="=",
    prefill="#",
    queued=".",
    preempted="x",
    finished="*",
    in_use="*",
    evictable="o",
    pending="?",
    branch="|",
    last_branch="`",
    peak="^",
    arrow="->",
    right="ok",
    dots="~",
    dash="-",
    times="x",
    middot="|",
    busy="#",
    prompt="=",
    folded=">",
    unfolded="v",
)

_ascii = False


def use_ascii(on: bool) -> None:
    """Draw with ASCII only from now on, or with all glyphs."""
    global _ascii
    _ascii = on


def glyphs() -> Glyphs:
    """The glyphs in use: ASCII or UNICODE."""
    return ASCII if _ascii else UNICODE


# Typography and frames that are not glyphs of ours: words of the help, titles, Textual's own widgets.
# One character becomes one, so lines keep their width.
_TO_ASCII = str.maketrans({
    "·": "|", "…": "~", "×": "x", "÷": "/", "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'",
    "→": ">", "←": "<", "↑": "^", "↓": "v", "✓": "*", "✗": "x", "●": "*", "○": "o", "▲": "^", "▼": "v", "▶": ">",
    "▸": ">", "▾": "v", "•": "*", "─": "-", "━": "-", "│": "|", "┃": "|", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
    "┌": "+", "┐": "+", "└": "`", "┘": "+", "├": "|", "┤": "|", "▁": "_", "▔": "-", "▏": "|", "▌": "|", "▐": "|",
    "▊": "|", "▎": "|", "█": "#", "▂": "_", "▃": "_", "▄": "_", "▅": "#", "▆": "#", "▇": "#", "▀": "-", "░": ".",
    "▒": "o", "▓": "S",
})  # fmt: skip


def to_ascii(text: str) -> str:
    """`text` with typography, arrows and frames as ASCII; letters of every language stay."""
    return text if text.isascii() else text.translate(_TO_ASCII)
