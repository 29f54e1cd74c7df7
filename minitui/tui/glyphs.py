"""The glyphs that the panels draw, and the ASCII characters that replace them with `--ascii`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _glyph(unicode: str, ascii: str) -> Any:
    return field(default=unicode, metadata={"ascii": ascii})


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One glyph for each meaning. The ASCII set is for terminals and fonts that lack the Unicode glyphs."""

    free: str = _glyph("·", ".")
    cached: str = _glyph("○", "o")
    shared: str = _glyph("●", "S")
    active: str = _glyph("█", "#")
    filling: str = _glyph("▄", "+")
    unused: str = _glyph("╱", "/")  # unused budget
    spark: str = _glyph("▁▂▃▄▅▆▇█", "_.:-=+*#")
    rule: str = _glyph("─", "-")
    decode: str = _glyph("─", "-")
    gaining: str = _glyph("═", "=")  # decoding several tokens in a step, because drafts were accepted
    stall: str = _glyph("╌", "!")  # the longest gap between two tokens
    prefill: str = _glyph("▒", "%")
    queued: str = _glyph("·", ".")
    preempted: str = _glyph("×", "x")
    finished: str = _glyph("■", "*")
    in_use: str = _glyph("●", "*")
    evictable: str = _glyph("○", "o")
    pending: str = _glyph("◌", "?")
    checkpoint: str = _glyph("◆", "@")  # in the tree: a recurrent state is kept after this token
    window: str = _glyph("◇", "w")  # in the tree: the pages of a window are kept up to this token
    branch: str = _glyph("├", "|")
    last_branch: str = _glyph("└", "`")
    peak: str = _glyph("▲", "^")
    arrow: str = _glyph("→", "->")
    right: str = _glyph("✓", "ok")
    dots: str = _glyph("…", "~")
    dash: str = _glyph("–", "-")
    times: str = _glyph("×", "x")
    middot: str = _glyph("·", "|")
    busy: str = _glyph("█", "#")
    edge: str = _glyph("▌", "|")  # between two consecutive steps
    perhaps: str = _glyph("░", ":")  # the device may have computed the step here
    kernels: str = _glyph("▀", "k")  # of a device, beside a host's `plan` and `launch`
    pauses: str = _glyph("▘", "-")  # kernels with pauses between them
    # The waterfall's parts of a step. The letters of the ASCII set are the first letters of the parts.
    commit: str = _glyph("▓", "c")
    emit: str = _glyph("░", "e")
    gate: str = _glyph("═", "g")
    plan: str = _glyph("▒", "p")
    launch: str = _glyph("█", "l")
    wait: str = _glyph("·", ".")
    not_reported: str = _glyph("╱", "?")
    gc: str = _glyph("▚", "G")
    delayed: str = _glyph("▞", "d")
    stop: str = _glyph("■", "s")
    cut: str = _glyph("◂", "<")  # at the left edge: what begins before the picture
    folded: str = _glyph("▸", ">")
    unfolded: str = _glyph("▾", "v")


UNICODE = Glyphs()
ASCII = Glyphs(**{glyph.name: glyph.metadata["ascii"] for glyph in fields(Glyphs)})

_ascii = False


def use_ascii(on: bool) -> None:
    """Switch all drawing to ASCII, or back to Unicode."""
    global _ascii
    _ascii = on


def glyphs() -> Glyphs:
    """Returns the glyphs in use: ASCII or UNICODE."""
    return ASCII if _ascii else UNICODE


# Characters outside Glyphs: typography and frames in the help, in titles and in Textual's widgets.
# Each character becomes one character, so lines keep their width.
_TO_ASCII = str.maketrans({
    "·": "|", "…": "~", "×": "x", "÷": "/", "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'",
    "→": ">", "←": "<", "↑": "^", "↓": "v", "✓": "*", "✗": "x", "●": "*", "○": "o", "▲": "^", "▼": "v", "▶": ">",
    "▸": ">", "▾": "v", "•": "*", "─": "-", "━": "-", "│": "|", "┃": "|", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
    "┌": "+", "┐": "+", "└": "`", "┘": "+", "├": "|", "┤": "|", "▁": "_", "▔": "-", "▏": "|", "▌": "|", "▐": "|",
    "▊": "|", "▎": "|", "█": "#", "▂": "_", "▃": "_", "▄": "_", "▅": "#", "▆": "#", "▇": "#", "▀": "-", "░": ".",
    "▒": "o", "▓": "S", "▘": "-",
})


def to_ascii(text: str) -> str:
    """Returns `text` with typography, arrows and frames as ASCII; letters of all languages stay as they are."""
    return text if text.isascii() else text.translate(_TO_ASCII)
