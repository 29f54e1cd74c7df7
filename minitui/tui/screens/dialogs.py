"""The dialogs: one asks for a text, one offers a list, and one offers a restart when the engine is down."""

from __future__ import annotations

import textwrap
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from minitui.tui.terminal.textual_insides import SizedScreen
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.prompt import Prompt
from minitui.viewmodel.view import View
from minitui.visible import visible, visible_line

Result = TypeVar("Result")
MAX_ROWS = 18  # the largest height of a list
FRAME_ROWS = 8  # rows of a dialog besides its list: border, padding, filter, hint
FRAME_COLUMNS = 7  # columns of a dialog besides its list: border, padding, scrollbar
MIN_EXPLANATION = 20  # columns; with fewer columns, an explanation is cut off instead of wrapped
FRAME_CSS = """
    align: center middle;
    & > Vertical {
        width: 80; max-width: 94%; height: auto; max-height: 90%;
        border: round $accent; border-title-color: $ink; border-title-style: bold; background: $ground; padding: 1 2;
    }
    & .hint { color: $dim; margin-top: 1; }
"""


class Overlay(ModalScreen[Result], SizedScreen[Result]):
    """A dialog. `dismiss` has no effect if the dialog is closed already, for example when a key is pressed twice."""

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_current else AwaitComplete()


class PanelDialog(Overlay[None]):
    """A dialog with one panel."""

    DEFAULT_CSS = "PanelDialog { align: center middle; & LinePanel { width: 96%; height: 94%; } }"

    def __init__(self, panel: LinePanel) -> None:
        super().__init__()
        self.panel = panel

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_mount(self) -> None:
        self.panel.focus()

    def paint(self, view: View) -> None:
        self.panel.paint(view)


class TextDialog(Overlay[str | None]):
    """Asks for a text. With `lines`, the text may have several lines. With `selected`, typing replaces the text. The
    result is the text, or None after Escape."""

    DEFAULT_CSS = "TextDialog {" + FRAME_CSS + "}"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Cancel", id="dialog.cancel", show=False)]

    def __init__(self, title: str, text: str, lines: bool = False, selected: bool = False) -> None:
        super().__init__()
        self._title, self._text, self._selected = title, text, selected
        self._hint = f"enter accepts · {'ctrl+j breaks the line · ' if lines else ''}esc cancels"

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = Content(self._title)
            yield Prompt()
            yield Static(self._hint, classes="hint", markup=False)

    def on_mount(self) -> None:
        prompt = self.query_one(Prompt)
        prompt.put(self._text)
        if self._selected:
            prompt.select_all()
        prompt.focus()

    def on_prompt_sent(self, message: Prompt.Sent) -> None:
        message.stop()
        self.dismiss(message.text)

    def on_prompt_left(self) -> None:
        self.dismiss(None)


CHOOSE, NOTHING = "enter accepts · up, down choose · esc cancels", "nothing here has these words · esc cancels"


class ChoiceDialog(Overlay[str | None]):
    """Offers a list of (choice, explanation) pairs, with a filter. The result is a choice, or None after Escape.
    `searched`: what the filter searches instead of choice and explanation, a text for each pair. `first`: the index of
    the pair that is highlighted first. `hang`: the indent of further lines of an explanation."""

    DEFAULT_CSS = (
        "ChoiceDialog {"
        + FRAME_CSS
        + """
        & OptionList { height: auto; border: none; background: $ground; padding: 0; margin-top: 1;
            scrollbar-size-vertical: 1; }
        & OptionList > .option-list--option-highlighted { background: $select; color: $ink; text-style: bold; }
        & Input, & Input:focus { background: $empty-chip; padding: 0 1; }
    }"""
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Cancel", id="choice.cancel", show=False),
        Binding("down", "move(1)", "Down", id="choice.down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", id="choice.up", show=False, priority=True),
        Binding("pagedown", "move(10)", "Page down", id="choice.pagedown", show=False, priority=True),
        Binding("pageup", "move(-10)", "Page up", id="choice.pageup", show=False, priority=True),
    ]

    def __init__(
        self, title: str, choices: list[tuple[str, str]], searched: list[str] | None = None, first: int = 0,
        hang: int = 0,
    ) -> None:
        super().__init__()
        self._title, self._choices, self._first, self._hang = title, choices, first, hang
        self._searched = [text.lower() for text in searched or [f"{choice} {why}" for choice, why in choices]]
        self._shown: list[str] = []

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = Content(f"{self._title} · {len(self._choices)}")
            yield Input(placeholder="type to search", compact=True)
            yield OptionList()
            yield Static(CHOOSE, classes="hint", markup=False)

    def on_mount(self) -> None:
        self._fill("")
        self.query_one(OptionList).highlighted = self._first if self._choices else None
        self.query_one(Input).focus()

    def on_resize(self) -> None:
        """Limit the height of the list so that the hint below it is visible, and wrap the explanations again."""
        options = self.query_one(OptionList)
        options.styles.max_height = max(2, min(MAX_ROWS, self.size.height * 9 // 10 - FRAME_ROWS))
        at = options.highlighted
        self._fill(self.query_one(Input).value)
        options.highlighted = at if self._shown else None
        self.call_after_refresh(options.scroll_to_highlight)

    def _fill(self, words: str) -> None:
        typed = words.lower().split()
        fits = [(n, c) for n, c in enumerate(self._choices) if all(word in self._searched[n] for word in typed)]
        self._shown = [choice for _, (choice, _) in fits]
        options = self.query_one(OptionList)
        options.clear_options()
        widest = max((len(choice) for _, (choice, why) in fits if why), default=0)
        room = min(80, self.size.width * 94 // 100) - FRAME_COLUMNS - widest - 2
        for n, (choice, why) in fits:
            choice, why = visible_line(choice), visible_line(why)
            lines = [why]
            if room >= MIN_EXPLANATION + self._hang:
                lines = textwrap.wrap(why, room, subsequent_indent=" " * self._hang)
            below = f"\n{' ' * (widest + 2)}".join(lines)
            parts = [choice.ljust(widest), (f"  {below}", "$dim")] if why else [choice]
            options.add_option(Option(Content.assemble(*parts), id=str(n)))
        options.highlighted = 0 if fits else None
        self.query_one(".hint", Static).update(CHOOSE if fits or not typed else NOTHING)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def action_move(self, by: int) -> None:
        """Move the highlight; the filter keeps the focus."""
        options = self.query_one(OptionList)
        if self._shown:
            options.highlighted = min(max((options.highlighted or 0) + by, 0), len(self._shown) - 1)

    def on_input_submitted(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self.dismiss(self._shown[at])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        # Find the choice by id, not by row: a new filter may have changed the rows while this message was queued.
        self.dismiss(self._choices[int(event.option_id or 0)][0])


class EngineDownDialog(Overlay[str | None]):
    """Says why the engine is down and where its log is. The result is "restart", "quit", or None after Escape."""

    DEFAULT_CSS = "EngineDownDialog {" + FRAME_CSS + " & > Vertical { border: round $bad; } & .error { color: $bad; } }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r,enter", "dismiss('restart')", "Restart", id="death.restart", show=False),
        Binding("q", "dismiss('quit')", "Quit", id="death.quit", show=False),
        Binding("escape", "dismiss", "Close", id="death.close", show=False),
    ]

    def __init__(self, title: str, error: str, log: str, hang: bool = False) -> None:
        """`hang`: the process runs but does not answer. The dialog then closes when the process answers again."""
        super().__init__()
        self._title, self._error, self._log, self.hang = title, error, log, hang

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = Content(self._title)
            yield Static(Content(visible(self._error)), classes="error")
            if self._log not in self._error:
                yield Static(Content(f"The engine's log: {self._log}"), classes="hint")
            keys = "r restarts the engine · q quits · esc closes this dialog (/restart still works)"
            yield Static(f"The chats are kept. {keys}", classes="hint", markup=False)
