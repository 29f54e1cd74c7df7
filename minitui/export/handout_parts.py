"""The parts of a handout, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitui.tui.widgets.rows import Run, Runs, plain, runs_width
from minitui.visible import visible

COLUMNS = 96  # of a picture, and of lines that are not joined
HEADS = {"h1": "# ", "h2": "## ", "h3": "### "}
FENCE = "~~~~"


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
