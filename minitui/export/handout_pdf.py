"""Lays a handout out as PDF, with fpdf2 (pip install '.[handout]').

The fonts that every PDF reader has contain only Latin-1. So the signs of a picture are drawn as rectangles, lines and
polygons. Other characters, such as 漢, come from the fonts of this machine; only a character that none of them has is
named by its code.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from math import cos, pi, sin
from pathlib import Path
from typing import Any

from engine.errors import EngineError, not_installed
from minitui.export.handout_parts import COLUMNS, Part, Picture
from minitui.tui.glyphs import to_ascii
from minitui.tui.theme import COLOURS, Palette
from minitui.tui.widgets.rows import Run, cells
from minitui.visible import visible

try:
    from fpdf import FPDF
except ImportError as error:
    raise EngineError(not_installed("a handout as PDF", error, "handout")) from error

THEME = COLOURS["minitui-light"]
PAPER = "#ffffff"
MARGIN = 15.0  # mm
CELL = 180.0 / COLUMNS  # width of a cell in mm: A4 is 210 mm wide
LINE = 3.9  # height of a cell
POINT = 0.352778  # mm
MONO = CELL / (0.6 * POINT)  # size of Courier whose characters are CELL wide
HEADS = {"h1": 20.0, "h2": 15.0, "h3": 12.0}  # font sizes
TEXT = 10.5
SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}
PARTS = {  # character -> the filled part of its cell: left, top, width, height, as shares of the cell
    "█": (0, 0, 1, 1), "■": (0.1, 0.2, 0.8, 0.6), "▌": (0, 0, 0.5, 1), "▀": (0, 0, 1, 0.5),
    "─": (0, 0.46, 1, 0.08), "═": (0, 0.4, 1, 0.2), "│": (0.46, 0, 0.08, 1),
    "▘": (0, 0, 0.5, 0.5),
    **{eighth: (0, 1 - (i + 1) / 8, 1, (i + 1) / 8) for i, eighth in enumerate("▁▂▃▄▅▆▇")},
}
CIRCLE = [(0.5 + 0.4 * cos(i * pi / 8), 0.5 + 0.24 * sin(i * pi / 8)) for i in range(17)]  # a cell is higher than wide
DIAMOND = [(0.5, 0.25), (0.95, 0.5), (0.5, 0.75), (0.05, 0.5)]
LINES: dict[str, list[list[tuple[float, float]]]] = {  # character -> its lines, each through points of the cell
    "╱": [[(0, 1), (1, 0)]], "╌": [[(0.1, 0.5), (0.4, 0.5)], [(0.6, 0.5), (0.9, 0.5)]],
    "├": [[(0.5, 0), (0.5, 1)], [(0.5, 0.5), (1, 0.5)]], "└": [[(0.5, 0), (0.5, 0.5), (1, 0.5)]],
    "→": [[(0.05, 0.5), (0.95, 0.5)], [(0.6, 0.35), (0.95, 0.5), (0.6, 0.65)]],
    "✓": [[(0.1, 0.55), (0.4, 0.75), (0.9, 0.25)]], "○": [CIRCLE], "◌": [CIRCLE[i : i + 2] for i in range(0, 16, 2)],
    "◇": [[*DIAMOND, DIAMOND[0]]],
}
POLYGONS: dict[str, list[list[tuple[float, float]]]] = {  # character -> its filled polygons
    "●": [CIRCLE], "◆": [DIAMOND],
    "▲": [[(0.5, 0.25), (0.95, 0.75), (0.05, 0.75)]], "▸": [[(0.2, 0.3), (0.8, 0.5), (0.2, 0.7)]],
    "▾": [[(0.1, 0.4), (0.9, 0.4), (0.5, 0.65)]], "◂": [[(0.8, 0.3), (0.2, 0.5), (0.8, 0.7)]],
    "▚": [[(0, 0), (0.5, 0), (0.5, 0.5), (0, 0.5)], [(0.5, 0.5), (1, 0.5), (1, 1), (0.5, 1)]],
    "▞": [[(0.5, 0), (1, 0), (1, 0.5), (0.5, 0.5)], [(0, 0.5), (0.5, 0.5), (0.5, 1), (0, 1)]],
}
DRAWN = {*SHADES, *PARTS, *LINES, *POLYGONS}
OTHER_FONTS = (  # of systems without fontconfig
    "/System/Library/Fonts/Supplemental/Arial Unicode.ttf", "/System/Library/Fonts/Apple Symbols.ttf",
    "C:/Windows/Fonts/msyh.ttc", "C:/Windows/Fonts/seguisym.ttf",
)


def to_pdf(parts: Sequence[Part]) -> bytes:
    """Returns the parts as a PDF of A4 pages with an outline."""
    pdf = FPDF(format="A4")
    pdf.set_margin(MARGIN)
    pdf.set_auto_page_break(True, MARGIN)
    pdf.set_title("How LLM inference works")
    pdf.add_page()
    for part in parts:
        if part.picture is not None:
            _picture(pdf, part.picture)
        elif part.kind in HEADS:
            _head(pdf, part)
        elif part.kind == "pre":
            for line in part.text.split("\n"):
                _lines(pdf, line, 4.2, "courier", min(MONO, 9.0))
            pdf.ln(2)
        else:
            pdf.set_left_margin(MARGIN + (5 if part.kind == "item" else 0))
            _lines(pdf, part.text, 5.2, "helvetica", TEXT)
            pdf.set_left_margin(MARGIN)
            pdf.ln(0.5 if part.kind == "item" else 2)
    return bytes(pdf.output())


def _head(pdf: FPDF, part: Part) -> None:
    level = list(HEADS).index(part.kind)
    if (part.kind == "h1" and pdf.get_y() > MARGIN + 1) or pdf.will_page_break(30):
        pdf.add_page()
    pdf.ln(3 if level else 0)
    pdf.start_section(_shown(pdf, part.text), level)
    _lines(pdf, part.text, HEADS[part.kind] * 0.5, "helvetica", HEADS[part.kind], "B")
    pdf.ln(1.5)


def _picture(pdf: FPDF, picture: Picture) -> None:
    rows = [[(picture.title, "bold ink")], *picture.rows, *([picture.legend] if picture.legend else [])]
    if pdf.will_page_break(len(rows) * LINE + 2):
        pdf.add_page()
    top = pdf.get_y()
    for y, row in enumerate(rows):
        x = 0
        for run in row:
            _run(pdf, run, MARGIN + x * CELL, top + y * LINE)
            x += cells(run[0])
    pdf.set_y(top + len(rows) * LINE + 3)
    pdf.set_text_color(0, 0, 0)


def _run(pdf: FPDF, run: Run, x: float, y: float) -> None:
    """Draws a run with its upper left corner at (x, y)."""
    text, words = run
    ink, ground, bold, _ = Palette.parts(words)
    if ground != "ground":
        _fill(pdf, THEME[ground])
        pdf.rect(x, y, cells(text) * CELL, LINE, style="F")
    pdf.set_text_color(*_rgb(THEME[ink]))
    for character in text:
        width = cells(character) * CELL
        if character in SHADES or character in PARTS:
            left, above, wide, high = PARTS.get(character, (0, 0, 1, 1))
            _fill(pdf, THEME[ink], SHADES.get(character, 1.0))
            pdf.rect(x + left * CELL, y + above * LINE, wide * CELL, high * LINE, style="F")
        elif character in DRAWN:
            _fill(pdf, THEME[ink])
            pdf.set_draw_color(*_rgb(THEME[ink]))
            for points in LINES.get(character, POLYGONS.get(character, [])):
                placed = [(x + across * CELL, y + down * LINE) for across, down in points]
                if character in LINES:
                    pdf.polyline(placed)
                else:
                    pdf.polygon(placed, style="F")
        elif character != " ":
            shown = _shown(pdf, character)
            other = _family(pdf, shown) if ord(shown[0]) > 255 else ""
            size = MONO * min(1.0, width / (CELL * len(shown)))
            pdf.set_font(other or "courier", style="B" if bold and not other else "", size=size)
            pdf.text(x, y + 0.75 * LINE, shown)
        x += width


def _fill(pdf: FPDF, colour: str, share: float = 1.0) -> None:
    """Set the colour to fill with: a share of `colour`, the rest of the paper."""
    mixed = (round(share * a + (1 - share) * b) for a, b in zip(_rgb(colour), _rgb(PAPER), strict=True))
    pdf.set_fill_color(*mixed)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _lines(pdf: FPDF, text: str, height: float, family: str, size: float, style: str = "") -> None:
    """Writes a text, broken into lines. Characters outside Latin-1 are in a font of the machine."""
    for other, run in groupby(_shown(pdf, text), lambda c: _family(pdf, c) if ord(c) > 255 else ""):
        pdf.set_font(other or family, style="" if other else style, size=size)
        pdf.write(height, "".join(run))
    pdf.ln(height)


def _shown(pdf: FPDF, text: str) -> str:
    """Returns text of which the PDF has all characters: other typography as ASCII, characters that no font has by
    their code, such as <U+6F22>."""
    return "".join(c if ord(c) < 256 else _named(pdf, to_ascii(c)) for c in visible(text))


def _named(pdf: FPDF, character: str) -> str:
    return character if character.isascii() or _family(pdf, character) else f"<U+{ord(character):04X}>"


def _family(pdf: FPDF, character: str) -> str:
    """Returns the name of a font of the machine with this character, which `pdf` then contains; empty if none has."""
    path = find_font(character)
    if path is None:
        return ""
    name = path.stem.lower()
    if name not in pdf.fonts:
        pdf.add_font(name, fname=path)
    return name


@cache
def find_font(character: str) -> Path | None:
    """Returns the file of a font on this machine that has this character, or None."""
    paths: Sequence[str] = OTHER_FONTS
    if listing := shutil.which("fc-list"):
        wanted = f":charset={ord(character):x}:fontformat=TrueType:color=False:variable=False"
        done = subprocess.run([listing, "-f", "%{file}\n", wanted], capture_output=True, text=True, timeout=30)
        paths = sorted(filter(None, done.stdout.split("\n")), key=lambda path: (len(path), path))
    return next((Path(path) for path in paths if ord(character) in _characters(path)), None)


@cache
def _characters(path: str) -> Any:
    """Returns the characters of a font that can be embedded; none if the file cannot be read."""
    try:
        probe: Any = FPDF()
        probe.add_font("probe", fname=path)
        return probe.fonts["probe"].cmap
    except Exception:  # fontTools raises errors of many kinds for files that it cannot read
        return {}
