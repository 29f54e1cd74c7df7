"""The code dialog: shows a function, a class or a file of the installed source."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from minitui.teaching.lessons.page import Code
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.widgets.base import Picture, ScrollPanel
from minitui.tui.widgets.rows import Row, Runs
from minitui.viewmodel.view import View

MIN_CODE = 16  # cells; if fewer are left beside the indent, a line of code is cut off instead of wrapped


class CodePanel(ScrollPanel):
    """Source code with line numbers; comments and docstrings are dim."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "up", show=False, id="code.up"),
        Binding("down,j", "scroll(1)", "down", show=False, id="code.down"),
        Binding("pageup", "scroll(-20)", "page up", show=False, id="code.page_up"),
        Binding("pagedown,space", "scroll(20)", "page down", show=False, id="code.page_down"),
    ]

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code

    def picture(self, view: View, width: int, height: int) -> Picture:
        rows = code_rows([line.expandtabs(4) for line in self.code.lines], self.code.first, width)
        shown, below = self.window(rows, height)
        name = self.code.reference.partition(":")[2]
        legend = [(f"{below} more lines" if below else "esc closes", "dim")]
        return Picture(shown, f"{self.code.path}  {name}".rstrip(), legend=legend)


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


class CodeScreen(Overlay[None]):
    """The dialog with a CodePanel."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,v", "dismiss", "close", show=False, id="code.close")]
    DEFAULT_CSS = """
    CodeScreen { align: center middle; & CodePanel { width: 96%; max-width: 132; height: 94%; } }
    """

    def __init__(self, code: Code) -> None:
        super().__init__()
        self._code = code

    def compose(self) -> ComposeResult:
        yield CodePanel(self._code)

    def on_mount(self) -> None:
        self.query_one(CodePanel).focus()

    def paint(self, view: View) -> None:
        """Draw the code."""
        self.query_one(CodePanel).paint(view)
