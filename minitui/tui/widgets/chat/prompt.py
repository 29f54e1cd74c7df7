"""The prompt: Enter sends, Ctrl+J breaks the line; it completes known questions and slash commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, fit
from minitui.viewmodel.view import View

ROWS = 6  # the largest number of rows of the completion list


@dataclass(frozen=True)
class Completion:
    """A completion. `text` replaces the text of the prompt; `hint` explains the completion."""

    text: str
    hint: str = ""


def complete_question(typed: str, known: Sequence[str]) -> list[Completion]:
    """Returns the known questions that begin with `typed`, then the others that contain all words of `typed`."""
    wanted = typed.strip().lower()
    if len(wanted) < 2:
        return []
    begins = [q for q in known if q.lower().startswith(wanted)]
    words = wanted.split()
    holds = [q for q in known if not q.lower().startswith(wanted) and all(w in q.lower() for w in words)]
    return [Completion(q) for q in begins + holds]


class Prompt(TextArea):
    """A text area that sends on Enter. `complete(text)` returns the completions, best first."""

    DEFAULT_CSS = """
    Prompt {
        height: auto; min-height: 3; max-height: 9; border: round $frame; padding: 0 1;
        background: $ground; color: $ink;
        scrollbar-size-vertical: 1;
        &:focus { border: round $accent; }
        & .text-area--cursor-line { background: $ground; }
        & .text-area--suggestion { color: $dim; text-style: none; }
        & .text-area--placeholder { color: $dim; text-style: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+j,shift+enter", "new_line", "New line", id="prompt.newline", tooltip="Break the line", show=False
        ),
        Binding("tab", "accept", "Complete", id="prompt.accept", tooltip="Accept the completion", show=False),
        Binding("pageup", "scroll_transcript(-1)", "Scroll up", id="prompt.pageup", show=False),
        Binding("pagedown", "scroll_transcript(1)", "Scroll down", id="prompt.pagedown", show=False),
    ]

    @dataclass
    class Sent(Message):
        """Enter was pressed, and the text is not empty."""

        text: str

    class Left(Message):
        """Escape was pressed while the completion list was closed."""

    @dataclass
    class Scroll(Message):
        """A page key was pressed; it scrolls the transcript."""

        pages: int

    @dataclass
    class Offered(Message):
        """The completions have changed; `chosen` is the index of the highlighted completion, -1 for none."""

        completions: list[Completion]
        chosen: int

    def __init__(self, placeholder: str = "") -> None:
        super().__init__(placeholder=placeholder, soft_wrap=True, show_line_numbers=False, tab_behavior="focus")
        self.complete: Callable[[str], list[Completion]] = lambda text: []
        self.asked: list[str] = []  # the history: the texts that were sent, oldest first
        self._recalled: int | None = None  # index in the history while the user recalls from it
        self._unsent = ""  # the text that was in the prompt before the user recalled another text from the history
        self._offers: list[Completion] = []
        self._chosen = -1
        self._quiet = False  # True while `put` sets the text: then no completions are offered

    def render_line(self, y: int) -> Strip:
        """Returns a blank line at width 0, where Textual fails. A prompt in a shrinking terminal may be laid out so."""
        return super().render_line(y) if self.content_size.width > 0 else Strip.blank(0)

    # ---- completion

    def update_suggestion(self) -> None:
        """Update the completions and the ghost text: the rest of the first completion that begins with the text.
        Textual calls this after every edit."""
        text = self.text
        at_end = self.cursor_location == self.document.end
        offers = [] if self._quiet or not at_end else self.complete(text)
        self._quiet = False
        ghost = next((c.text[len(text) :] for c in offers if text and c.text.lower().startswith(text.lower())), "")
        self.suggestion = ghost
        if len(offers) == 1 and offers[0].text == text:
            offers = []
        self._offer(offers[:ROWS], -1)

    def _offer(self, offers: list[Completion], chosen: int) -> None:
        if offers != self._offers or chosen != self._chosen:
            self._offers, self._chosen = offers, chosen
            self.post_message(self.Offered(offers, chosen))

    def put(self, text: str) -> None:
        """Replace the text and move the cursor to its end; offer no completions."""
        self._quiet = True
        self.load_text(text)
        self._quiet = True
        self.move_cursor(self.document.end)
        self._quiet = False
        self.suggestion = ""
        self._offer([], -1)

    def close_list(self) -> bool:
        """Close the completion list; return False if it was closed already."""
        was_open = bool(self._offers)
        self._offer([], -1)
        self.suggestion = ""
        return was_open

    # ---- keys

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default().stop()
            if self._chosen >= 0:
                self.action_accept()
            elif self.text.strip():
                text = self.text.strip()
                self.asked.append(text)
                self._recalled = None
                self.put("")
                self.post_message(self.Sent(text))
        elif event.key == "escape":
            event.prevent_default().stop()
            if not self.close_list():
                self.post_message(self.Left())
        else:
            await super()._on_key(event)

    def action_new_line(self) -> None:
        self.insert("\n")

    def action_accept(self) -> None:
        if self._offers:
            chosen = self._offers[max(self._chosen, 0)]
            self.put(chosen.text + (" " if chosen.text.startswith("/") else ""))

    def action_scroll_transcript(self, pages: int) -> None:
        """Scroll the transcript: page keys do not scroll the prompt."""
        self.post_message(self.Scroll(pages))

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up in the open completion list, else in the text, else in the history."""
        if self._offers and not select:
            self._offer(self._offers, max(self._chosen - 1, -1))
        elif not select and self.cursor_location[0] == 0 and (self.asked or self._recalled is not None):
            self._recall(-1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down in the open completion list, else in the text, else in the history."""
        if self._offers and not select:
            self._offer(self._offers, min(self._chosen + 1, len(self._offers) - 1))
        elif not select and self._recalled is not None and self.cursor_location[0] == self.document.line_count - 1:
            self._recall(1)
        else:
            super().action_cursor_down(select)

    def _recall(self, by: int) -> None:
        if self._recalled is None:
            self._unsent, self._recalled = self.text, len(self.asked)
        at = min(max(self._recalled + by, 0), len(self.asked))
        self.put(self.asked[at] if at < len(self.asked) else self._unsent)
        self._recalled = at if at < len(self.asked) else None


class CompletionList(LinePanel, can_focus=False):
    """The completions, above the prompt."""

    FRAME = "none"
    DEFAULT_CSS = "CompletionList { height: auto; max-height: 6; display: none; }"

    completions: Sequence[Completion] = ()
    chosen = -1

    def picture(self, view: View, width: int, height: int) -> Picture:
        rows = []
        for number, completion in enumerate(self.completions[:height]):
            room = width - 2
            text = completion.text.ljust(14) if completion.hint else completion.text
            row = Row(" ").add(fit(text, min(len(text), room)))
            if completion.hint:
                row.add(fit("  " + completion.hint, room - row.width), "dim")
            elif number == max(self.chosen, 0):
                row.add("   tab", "dim")
            rows.append(row.done(width, "select" if number == self.chosen else "empty-chip"))
        return Picture(rows)
