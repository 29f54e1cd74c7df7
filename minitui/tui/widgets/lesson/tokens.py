"""Tokens: into which pieces is a text cut, how likely is each possible next token, and which tokens were cut off?"""

from __future__ import annotations

from minitui.text import count, percent
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, cells, clip, legend, wrapped
from minitui.viewmodel.board import Candidate, Candidates, Pieces
from minitui.viewmodel.view import View
from minitui.visible import visible_line

PLAIN = ("ink on empty-chip", "ink on cached-chip")  # neighbouring pieces look different
REPLY = ("ink on active-chip", "ink on shared-chip")
NEW = "bold on-fill on accent"


class TextPieces(LinePanel):
    """Shows the pieces of a text, separated by bars, with their token ids under them if they are known."""

    TITLE = "Tokens"

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, Pieces):
            return Picture(wrapped("no text yet: the experiment has not run", "dim", width))
        below = wrapped(board.line, "bold ink", width)
        rows = piece_lines(board, width)
        hidden = len(rows) - (height - len(below))
        if hidden > 0:  # the end of the text is where it changes
            rows = rows[hidden:]
        key = legend(("  ", PLAIN[1], "prompt"), ("  ", REPLY[0], "reply"), ("  ", NEW, "new"))
        note = [(f"{glyphs().dots}{count(hidden, 'line')} above", "dim")] if hidden > 0 else []
        return Picture([*rows, *below], board.title, note, key if board.prompt is not None else [])


def piece_lines(board: Pieces, width: int) -> list[Runs]:
    """Returns the pieces in lines of `width` cells, each with a line of ids under it if the ids are known."""
    lines: list[Runs] = []
    text, numbers = Row(), Row()

    def end() -> None:
        nonlocal text, numbers
        lines.append(text.done(width))
        if board.ids:
            lines.append(numbers.done(width))
        text, numbers = Row(), Row()

    for i, piece in enumerate(board.pieces):
        shown = clip(visible_line(piece), width - 1)
        number = str(board.ids[i]) if board.ids else ""
        room = max(cells(shown), len(number)) + 1
        if text.width + room > width:
            end()
        looks = PLAIN if board.prompt is None or i < board.prompt else REPLY
        text.add(shown, NEW if i in board.lit else looks[i % 2])
        numbers.add(number, "dim").to(numbers.width + room - len(number))
        text.to(numbers.width - 1).add("│", "faint")
    if text.width:
        end()
    return lines


LONGEST_TOKEN = 16  # cells
VISIBLE = 0.0005  # a smaller probability has no bar
FIGURES = 18  # cells for the two probabilities after a bar


class CandidateBars(LinePanel):
    """Shows a bar for each candidate, with its probability now and, in brackets, in the model's own distribution."""

    TITLE = "Candidates"

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, Candidates):
            return Picture(wrapped("no candidates yet: the experiment has not run", "dim", width))
        return candidates_picture(board, width, height)


def candidates_picture(board: Candidates, width: int, height: int) -> Picture:
    """Returns the picture of the candidates in `height` rows. A full bar is 100 %. The last row is the sentence."""
    names = [clip(visible_line(f"“{token.text}”"), LONGEST_TOKEN) for token in board.tokens]
    label = max(map(cells, names), default=0) + 3
    room = width - label - FIGURES
    rows = [
        _row(token, name, label, room, i == board.drawn, width)
        for i, (token, name) in enumerate(zip(board.tokens, names, strict=True))
    ][: max(0, height - 1)]
    if board.line:
        rows.append(Row(clip(visible_line(board.line), width), "bold ink").done(width))
    g = glyphs()
    key = legend((g.active, "hit", "now"), (g.times, "bad", "cut"), ("(%)", "dim", "without settings"))
    return Picture(rows, f"Candidates {g.middot} {visible_line(board.title)}", legend=key)


def _row(token: Candidate, name: str, label: int, room: int, drawn: bool, width: int) -> Runs:
    g = glyphs()
    line = Row(f"{g.arrow} " if drawn else "  ", "accent").to(2)
    line.add(name, "bold accent" if drawn else "dim" if token.now is None else "ink").to(label)
    if token.now is None:
        line.add(g.times * max(1, round(token.before * room)), "bad")
    else:
        line.add(g.active * (max(1, round(token.now * room)) if token.now >= VISIBLE else 0), "hit")
    now = "cut" if token.now is None else percent(token.now, token.at_most)
    line.to(label + max(0, room)).right(now, label + max(0, room) + 8, "bad" if token.now is None else "ink")
    if token.before != token.now:
        line.right(f"({percent(token.before)})", width, "dim")
    return line.done(width)
