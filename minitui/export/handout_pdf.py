"""Lays a handout out as PDF, with fpdf2 (pip install '.[handout]').

The fonts that every PDF reader has contain no block characters. So the cells of a picture are drawn: shaded and partly
filled cells as rectangles, other characters as text. Characters outside Latin-1 are named by their code.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    **{eighth: (0, 1 - (i + 1) / 8, 1, (i + 1) / 8) for i, eighth in enumerate("▁▂▃▄▅▆▇")},
}  # fmt: skip


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
                pdf.set_font("courier", size=min(MONO, 9.0))
                pdf.multi_cell(0, 4.2, _latin(line), new_x="LMARGIN", new_y="NEXT", align="L")
            pdf.ln(2)
        else:
            pdf.set_font("helvetica", size=TEXT)
            pdf.set_x(MARGIN + (5 if part.kind == "item" else 0))
            pdf.multi_cell(0, 5.2, _latin(part.text), new_x="LMARGIN", new_y="NEXT", align="L")
            pdf.ln(0.5 if part.kind == "item" else 2)
    return bytes(pdf.output())


def _head(pdf: FPDF, part: Part) -> None:
    level = list(HEADS).index(part.kind)
    if (part.kind == "h1" and pdf.get_y() > MARGIN + 1) or pdf.will_page_break(30):
        pdf.add_page()
    pdf.ln(3 if level else 0)
    pdf.start_section(_latin(part.text), level)
    pdf.set_font("helvetica", style="B", size=HEADS[part.kind])
    pdf.multi_cell(0, HEADS[part.kind] * 0.5, _latin(part.text), new_x="LMARGIN", new_y="NEXT", align="L")
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
    pdf.set_font("courier", style="B" if bold else "", size=MONO)
    pdf.set_text_color(*_rgb(THEME[ink]))
    for character in text:
        width = cells(character) * CELL
        if character in SHADES or character in PARTS:
            left, above, wide, high = PARTS.get(character, (0, 0, 1, 1))
            _fill(pdf, THEME[ink], SHADES.get(character, 1.0))
            pdf.rect(x + left * CELL, y + above * LINE, wide * CELL, high * LINE, style="F")
        elif character != " ":
            shown = _latin(character)
            pdf.text(x, y + 0.75 * LINE, shown if len(shown) == 1 else "?")
        x += width


def _fill(pdf: FPDF, colour: str, share: float = 1.0) -> None:
    """Set the colour to fill with: a share of `colour`, the rest of the paper."""
    mixed = (round(share * a + (1 - share) * b) for a, b in zip(_rgb(colour), _rgb(PAPER), strict=True))
    pdf.set_fill_color(*mixed)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _latin(text: str) -> str:
    """Returns text in Latin-1: other typography as ASCII, all other characters by their code, such as <U+6F22>."""
    return "".join(c if ord(c) < 256 else _named(to_ascii(c)) for c in visible(text))


def _named(character: str) -> str:
    return character if character.isascii() else f"<U+{ord(character):04X}>"
