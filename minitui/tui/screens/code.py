"""The code dialog: shows a function, a class or a file of the installed source."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from minitui.teaching.lessons.page import Code
from minitui.text import count
from minitui.tui.screens.dialogs import PanelDialog
from minitui.tui.widgets.base import Picture, ScrollPanel
from minitui.tui.widgets.rows import Row, Runs
from minitui.viewmodel.view import View
from minitui.visible import visible_line

MIN_CODE = 16  # cells; if fewer are left beside the indent, a line of code is cut off instead of wrapped


class CodePanel(ScrollPanel):
    """Source code with line numbers; comments and docstrings are dim."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll(-1)", "up", show=False, id="code.up"),
        Binding("j", "scroll(1)", "down", show=False, id="code.down"),
        Binding("pageup", "scroll(-20)", "page up", show=False, id="code.page_up"),
        Binding("pagedown,space", "scroll(20)", "page down", show=False, id="code.page_down"),
    ]

    heading = ""
    lines: Sequence[str] = ("",)
    first = 1  # the number of the first line
    marked = 0  # the number of the line that is marked; 0: none
    end = ""  # the legend at the end
    begin = 0  # the index of the line that the next picture has at its top; 0: where it is

    def show(self, heading: str, lines: Sequence[str], first: int = 1, marked: int = 0, top: int = 0) -> None:
        """Show these lines, with the marked one in sight, else with the one of index `top` at the top (0: as it is)."""
        self.heading, self.lines, self.first, self.marked = heading, lines, first, marked
        self.begin = max(0, marked - 8) if marked else top
        self.repaint()

    def picture(self, view: View, width: int, height: int) -> Picture:
        lines = [visible_line(line.expandtabs(4)) for line in self.lines]
        if self.begin:
            self.top, self.begin = len(code_rows(lines[: self.begin], self.first, width)), 0
        shown, below = self.window(code_rows(lines, self.first, width, self.marked), height)
        more = [f"{count(n, 'more line')} {where}" for n, where in ((self.top, "above"), (below, "below")) if n]
        end = ", ".join(more) or self.end
        return Picture(shown, self.heading, legend=[(end, "dim")] * bool(end))


def code_rows(lines: list[str], first: int, width: int, marked: int = 0) -> list[Runs]:
    """Returns lines of code with their numbers, from `first` on; the line with the number `marked` is marked."""
    rows: list[Runs] = []
    for number, (line, style) in enumerate(zip(lines, code_styles(lines), strict=True), first):
        lead = f"{number:>5}  "
        for piece in wrap_code(line, width - len(lead)):
            rows.append(Row(lead, "bad" if number == marked else "faint").add(piece, style).done(width))
            lead = " " * len(lead)
    return rows


def wrap_code(line: str, width: int) -> list[str]:
    """Returns a line of code in pieces of at most `width` cells. After the first piece, the indent is 8 cells wider."""
    indent = len(line) - len(line.lstrip()) + 8
    if len(line) <= width or width - indent < MIN_CODE:
        return [line]
    pieces = textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return pieces or [line]


def code_styles(lines: list[str]) -> list[str]:
    """Returns a style for each line of Python: comments and docstrings are dim, definitions are bold."""
    styles, in_docstring = [], False
    for line in lines:
        text = line.strip()
        marks = text.count('"""')
        if in_docstring or text.startswith(('"""', 'r"""')):
            styles.append("dim")
            in_docstring = in_docstring != (marks == 1)
        elif text.startswith("#"):
            styles.append("dim")
        else:
            styles.append("bold ink" if text.startswith(("def ", "class ", "async def ")) else "ink")
    return styles


class CodeScreen(PanelDialog):
    """The dialog with a CodePanel."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,v", "dismiss", "close", show=False, id="code.close")]
    DEFAULT_CSS = "CodeScreen CodePanel { max-width: 132; }"

    def __init__(self, code: Code) -> None:
        panel = CodePanel()
        super().__init__(panel)
        panel.end = "esc closes"
        panel.show(f"{code.path}  {code.reference.partition(':')[2]}".rstrip(), code.lines, code.first)
