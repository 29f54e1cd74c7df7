"""The parts of a handout, and the same as Markdown and as a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from minitui.export.svg import FONTS
from minitui.tui.theme import COLOURS, Palette
from minitui.tui.widgets.rows import Run, Runs, cells, plain, runs_width
from minitui.visible import visible

COLUMNS = 96  # of a picture, and of lines that are not joined
HEADS = {"h1": "# ", "h2": "## ", "h3": "### "}
FENCE = "~~~~"
THEME = COLOURS["minitui-light"]
CELL, LINE = 6, 12  # width and height of a cell, in units of a picture's SVG
STYLE = f"""
@page {{ size: A4; margin: 15mm; }}
body {{ font: 10.5pt/1.4 system-ui, sans-serif; max-width: 180mm; margin: auto; }}
h1 {{ break-before: page; }} h1:first-of-type {{ break-before: auto; }} h1, h2, h3 {{ break-after: avoid; }}
p {{ margin: 0 0 2mm; }} .item {{ margin: 0 0 .5mm 5mm; }} pre, code {{ font: 9pt {FONTS}; }}
figure {{ margin: 0 0 3mm; break-inside: avoid; }} figcaption {{ font: bold 8pt {FONTS}; }}
svg {{ width: 100%; display: block; }} svg text {{ font: 10px {FONTS}; white-space: pre; }}
"""


@dataclass(frozen=True)
class Picture:
    """A panel as rows of styled text."""

    title: str
    rows: list[Runs]
    legend: list[Run]


@dataclass(frozen=True)
class Part:
    """A part of the handout. `kind`: "h1", "h2", "h3", "text", "pre" (its lines stay), "item" or "picture"."""

    kind: str
    text: str = ""
    picture: Picture | None = None


def to_markdown(parts: Sequence[Part]) -> str:
    """Returns the parts as Markdown. Pictures are blocks of text."""
    lines: list[str] = []
    before = ""
    for part in parts:
        if lines and not part.kind == before == "item":
            lines.append("")
        before = part.kind
        if part.kind in HEADS:
            lines.append(HEADS[part.kind] + part.text)
        elif part.kind == "text":
            lines.append(_escaped(part.text))
        elif part.kind == "item":
            lines.append("- " + _escaped(part.text))
        else:
            text = [part.text] if part.picture is None else _picture_lines(part.picture)
            lines += [FENCE + "text", *text, FENCE]
    return visible("\n".join(lines)) + "\n"


def _picture_lines(picture: Picture) -> list[str]:
    legend = "".join(text for text, _ in picture.legend)
    rows = [plain(row).rstrip() for row in picture.rows]
    return [f"{picture.title}", *rows, *([legend.rjust(min(COLUMNS, runs_width(picture.legend)))] if legend else [])]


def _escaped(text: str) -> str:
    """Returns text in which Markdown sees no tags, emphasis or lists; text between backticks stays."""
    quoted = text.split("`")
    for i in range(0, len(quoted), 2):
        for character in "\\<*_[":
            quoted[i] = quoted[i].replace(character, "\\" + character)
    head, dot, rest = "`".join(quoted).partition(". ")
    return f"{head}\\{dot}{rest}" if head.isdigit() else "`".join(quoted)


def to_html(parts: Sequence[Part]) -> str:
    """Returns the parts as a page that needs no other file. Pictures are SVG."""
    body = "\n".join(_element(part) for part in parts)
    head = f"<meta charset='utf-8'><title>How LLM inference works</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def _element(part: Part) -> str:
    if part.picture is not None:
        return f"<figure><figcaption>{escape(visible(part.picture.title))}</figcaption>{_svg(part.picture)}</figure>"
    text = escape(visible(part.text), quote=False)
    if part.kind in (*HEADS, "pre"):
        return f"<{part.kind}>{text}</{part.kind}>"
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return f"<p class='item'>– {text}</p>" if part.kind == "item" else f"<p>{text}</p>"


def _svg(picture: Picture) -> str:
    """Returns a picture as SVG. The length of each text is given, so that columns stay below each other in any font."""
    rows, drawn = [*picture.rows, *([tuple(picture.legend)] if picture.legend else [])], []
    for y, row in enumerate(rows):
        x = 0
        for text, words in row:
            ink, ground, bold, _ = Palette.parts(words)
            place, width = x * CELL, cells(text) * CELL
            x += cells(text)
            if ground != "ground":
                box = f"x='{place}' y='{y * LINE}' width='{width}' height='{LINE}'"
                drawn.append(f"<rect {box} fill='{THEME[ground]}'/>")
            if text.strip():
                weight = " font-weight='bold'" * bold
                drawn.append(
                    f"<text x='{place}' y='{(y + 0.8) * LINE:g}' textLength='{width}' lengthAdjust='spacingAndGlyphs' "
                    f"fill='{THEME[ink]}'{weight}>{escape(visible(text), quote=False)}</text>"
                )
    return f"<svg viewBox='0 0 {COLUMNS * CELL} {len(rows) * LINE}'>{''.join(drawn)}</svg>"
