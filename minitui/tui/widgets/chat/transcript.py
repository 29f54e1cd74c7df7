"""The transcript of one chat. The rows of each message are kept; only a changed message is rendered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Offset, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from minitui.chat.conversation import Message, Session
from minitui.chat.describe import describe_answer, split_thinking
from minitui.tui import markdown
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import palette
from minitui.tui.widgets.rows import Run, plain

LABEL = 9  # cells of the column with the speaker
WIDEST = 96  # the most cells of text in a line: longer lines are hard to read
MOST_SHOWN = 300_000  # characters of a chat, those of its newest messages first; they take about half a second
ROOM_STEP = 50_000  # characters: each time that the newer messages have this number more, an older one shows fewer

TONE_STYLES = {  # the style of each of markdown.TONES
    "text": "ink", "strong": "bold ink", "em": "ink", "code": "hit", "link": "underline hit", "heading": "bold hit",
    "bullet": "running", "quote": "dim", "rule": "dim", "fence": "hit on empty-chip", "strike": "dim", "dim": "dim",
}

_plain = lru_cache(maxsize=8)(markdown.plain)


@dataclass
class _Block:
    """The rows of one message. `key` identifies the version of the message that they show."""

    key: tuple[Any, ...] = ()
    rows: list[list[Run]] = field(default_factory=list)
    streamed: markdown.Streamed | None = None


class Transcript(ScrollView, can_focus=True):
    """Shows the chat `session`, in rows that `sync` updates. Follows the end of the text until the user scrolls up."""

    ALLOW_SELECT = True
    DEFAULT_CSS = """
    Transcript { background: $ground; color: $ink; padding: 1 1 0 1; overflow-x: hidden; scrollbar-size-vertical: 1;
        scrollbar-background: $ground; scrollbar-background-hover: $ground; scrollbar-color: $frame; }
    Transcript:focus { border-left: outer $accent; padding: 1 1 0 0; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None
        self.speaker = "model"
        self.paused = ""  # said where an answer waits: the engine is paused, and what lets it run
        self.notes: Sequence[str] = ()  # of the engine; an empty chat shows them
        self.welcome: Callable[[int], list[tuple[list[Run], Callable[[], object] | None]]] = lambda width: []
        self._blocks: list[_Block] = []
        self._rows: list[list[Run]] = []
        self._strips: dict[int, Strip] = {}
        self._look: tuple[Any, ...] = ()
        self._shown: tuple[Any, ...] = ()
        self._follow = True

    # ---- showing

    def show(self, session: Session) -> None:
        """Switch to another chat and scroll to its end."""
        if session is not self.session:
            self.session = session
            self._blocks = []
            self._follow = True
        self.sync()

    def go_to(self, words: list[str]) -> None:
        """Scroll to the first row that contains one of the words, and select the word; the first found word counts."""
        rows = ["".join(text for text, _ in row) for row in self._rows]
        for word in words:
            for y, row in enumerate(rows):
                at = row.lower().find(word.lower())
                if at >= 0:
                    self._follow = False
                    self.scroll_to(y=max(0, y - 2), animate=False, immediate=True)
                    found = Selection(Offset(at, y), Offset(at + len(word), y))
                    self.screen.selections = {self: found}
                    return

    def sync(self) -> None:
        """Update the rows from the session; cheap if nothing changed."""
        if self.session is None or not self.size.width:
            return
        width = min(self.scrollable_content_region.width - LABEL - 1, WIDEST)
        look = (width, palette(self.app), glyphs(), self.session.id)
        if look != self._look:
            self._look = look
            self._blocks = []
        state = (look, self._state())
        if state == self._shown:
            return
        self._shown = state
        rows = list(self._head(width))
        messages = self.session.messages
        self._blocks += [_Block() for _ in messages[len(self._blocks) :]]
        del self._blocks[len(messages) :]
        rooms = _rooms([len(message.text) for message in messages])
        for block, message, room in zip(self._blocks, messages, rooms, strict=True):
            rows += self._message_rows(block, message, room, width)
        if self.session.note:
            rows += [self._label("", "dim", line, "hit") for line in markdown.plain(self.session.note, width)]
        self._show_rows(rows)

    def _state(self) -> tuple[Any, ...]:
        """Returns a value that changes whenever the shown text may change."""
        session = self.session
        assert session is not None
        last = session.messages[-1] if session.messages else None
        versions = sum(m.version for m in session.messages)
        end = (last.state, len(last.text)) if last is not None else None
        paused = last is not None and last.busy and self.paused
        return len(session.messages), versions, end, session.system, session.note, paused, *self.notes

    def _show_rows(self, rows: list[list[Run]]) -> None:
        first = next(
            (y for y, (a, b) in enumerate(zip(rows, self._rows, strict=False)) if a != b),
            min(len(rows), len(self._rows)),
        )
        if first == len(rows) == len(self._rows):
            return
        self._rows = rows
        for y in [y for y in self._strips if y >= first]:
            del self._strips[y]
        size = Size(self.scrollable_content_region.width, len(rows))
        if size != self.virtual_size:
            self.virtual_size = size
        if self._follow:
            self.scroll_end(animate=False, immediate=True)
        self.refresh_lines(first, max(1, self.size.height + self.scroll_offset.y - first))

    def _head(self, width: int) -> list[list[Run]]:
        assert self.session is not None
        if not self.session.messages:
            return [row for row, _ in self.welcome(width)]
        lines = _plain(markdown.shortened(self.session.system, ROOM_STEP) or "(no system prompt)", width)
        if len(lines) > 2:
            second = lines[1][0][0]
            if len(second) > width - 2:  # a word ends before the dots
                second = second[: width - 1].rpartition(" ")[0] or second[: width - 3]
            lines = [lines[0], [(f"{second} {glyphs().dots}", "text")]]
        return [self._label("system" if i == 0 else "", "pool", line, "dim") for i, line in enumerate(lines)] + [[]]

    def _message_rows(self, block: _Block, message: Message, room: int, width: int) -> list[list[Run]]:
        paused = message.busy and self.paused
        size = len(message.text)
        key = (id(message), message.version, message.state, message.unfolded, size, min(size, room), paused)
        if key == block.key:
            return block.rows
        if block.key[:1] != key[:1]:
            block.streamed = None
        block.key = key
        if message.role == "user":
            lines = markdown.plain(markdown.shortened(message.text, room), width)
            block.rows = [self._label("you" if i == 0 else "", "hit", line, "bold ink") for i, line in enumerate(lines)]
        else:
            block.rows = self._answer_rows(block, message, room, width)
        block.rows.append([])
        return block.rows

    def _answer_rows(self, block: _Block, message: Message, room: int, width: int) -> list[list[Run]]:
        thinking, answer, open_ = split_thinking(message.text)
        rows: list[list[Run]] = []
        g = glyphs()
        if thinking:
            words = f"{len(thinking.split()):,} words"
            mark = g.unfolded if message.unfolded else g.folded
            state = "thinking so far:" if open_ and message.busy else "thinking:"
            action = "folds" if message.unfolded else "unfolds"
            rows.append(self._runs([(f"{mark} {state} {words} {g.middot} t {action}", "dim")]))
            if message.unfolded:
                lines = markdown.plain(markdown.shortened(thinking, room), width - 2)
                rows += [self._runs([("  " + text, "dim") for text, _ in line]) for line in lines]
            if answer:
                rows.append([])
        if message.busy:
            block.streamed = block.streamed or markdown.Streamed(width)
            lines = [list(line) for line in block.streamed.update(markdown.shortened(answer, room))] or [[]]
            lines[-1].append((g.active, "bullet") if message.text else (self._waiting_text(message), "dim"))
        else:
            lines, block.streamed = markdown.render(markdown.shortened(answer, room), width), None
        rows += [self._runs([(text, TONE_STYLES.get(tone, "ink")) for text, tone in line]) for line in lines]
        footer = [] if message.busy else describe_answer(message)
        if not rows and (message.state == "done" or not footer):
            rows.append(self._runs([("(empty reply)", "dim")]))
        if footer:
            if rows:
                rows.append([])
            rows += self._footer(footer, width)
        rows[0] = [(self.speaker[: LABEL - 2].ljust(LABEL), "decode"), *rows[0][1:]]
        return rows

    def _waiting_text(self, message: Message) -> str:
        if self.paused:
            return self.paused
        return "waiting for the first token" if message.state == "running" else "queued" + glyphs().dots

    def _footer(self, parts: list[tuple[str, str]], width: int) -> list[list[Run]]:
        """Returns the parts joined by dots; lines break between parts where possible."""
        rows: list[list[Run]] = []
        line: list[Run] = []
        used = 0
        for text, tone in parts:
            if used and used + 3 + len(text) > width:
                rows.append(self._runs(line))
                line, used = [], 0
            if used:
                line.append((f" {glyphs().middot} ", "dim"))
                used += 3
            for number, piece in enumerate(markdown.plain(text, width)):
                if number:
                    rows.append(self._runs(line))
                    line, used = [], 0
                line.append((plain(tuple(piece)), tone))
                used += len(plain(tuple(piece)))
        return [*rows, self._runs(line)]

    @staticmethod
    def _label(label: str, tone: str, line: markdown.Line, words: str) -> list[Run]:
        return [(label.ljust(LABEL), tone), *((text, words) for text, _ in line)]

    @staticmethod
    def _runs(runs: list[Run]) -> list[Run]:
        return [(" " * LABEL, "ink"), *runs]

    # ---- Textual

    @property
    def text(self) -> str:
        """The transcript as text."""
        return "\n".join(plain(tuple(row)).rstrip() for row in self._rows)

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        width = self.scrollable_content_region.width
        colours = palette(self.app)
        if y >= len(self._rows):
            return Strip.blank(width, colours.style("ink"))
        strip = self._strips.get(y)
        if strip is None:
            segments = [Segment(text, colours.style(words)) for text, words in self._rows[y]]
            strip = self._strips[y] = Strip(segments).adjust_cell_length(width, colours.style("ink"))
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            style = self.screen.get_component_rich_style("screen--selection")
            strip = _restyle(strip, start, width if end == -1 else end, style)
        return strip.apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Returns the selected text without the column of the speakers."""
        spans = ((line, selection.get_span(y)) for y, line in enumerate(self.text.split("\n")))
        lines = [
            line[max(LABEL, span[0]) : max(LABEL, span[1]) if span[1] >= 0 else None]
            for line, span in spans if span is not None
        ]
        return "\n".join(lines), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value < old_value:
            self._follow = False
        if round(new_value) >= self.max_scroll_y:
            self._follow = True

    def on_resize(self) -> None:
        self.sync()

    def on_click(self, event: events.Click) -> None:
        """Do what a row of the welcome says."""
        at = event.get_content_offset(self)
        if at is None or self.session is None or self.session.messages or not self._look:
            return
        for _, action in self.welcome(self._look[0])[at.y + self.scroll_offset.y :][:1]:
            if action is not None:
                action()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()


def _rooms(sizes: list[int]) -> list[int]:
    """Returns how many characters each message may show: the newest first, MOST_SHOWN in all."""
    rooms, room = [], MOST_SHOWN
    for size in reversed(sizes):
        rooms.append(room // ROOM_STEP * ROOM_STEP)
        room = max(0, room - size)
    return rooms[::-1]


def _restyle(strip: Strip, start: int, end: int, style: Style) -> Strip:
    left, middle, right = strip.crop(0, start), strip.crop(start, end), strip.crop(end)
    return Strip.join([left, middle.apply_style(style), right])
