"""The tokens of a chat: choose a token of an answer, and see what else it could have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.errors import EngineError
from minitui.chat.alternatives import alternatives
from minitui.chat.sessions import Chats
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.dialogs import PanelDialog
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.lesson.tokens import NEW, candidates_picture, piece_lines
from minitui.tui.widgets.rows import Row, wrapped
from minitui.viewmodel.board import Candidate, Candidates, Pieces
from minitui.viewmodel.view import View

SHOWN = 8  # candidates
CANDIDATE_ROWS = SHOWN + 1


class TokenPanel(LinePanel):
    """The tokens of a chat, and the candidates at the position of the chosen token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1)", "token before", show=False, id="tokens.left"),
        Binding("right,l", "move(1)", "next token", show=False, id="tokens.right"),
        Binding("up,pageup", "move(-10)", "ten tokens back", show=False, id="tokens.up"),
        Binding("down,pagedown", "move(10)", "ten tokens on", show=False, id="tokens.down"),
    ]

    def __init__(self, ids: list[int], prompt: int, text_of: Callable[[int], str]) -> None:
        """`prompt`: how many of the ids came before the last answer."""
        super().__init__()
        self._ids, self._prompt, self._text_of = ids, prompt, text_of
        self._pieces = tuple(map(text_of, ids))
        self.at = min(max(1, prompt), len(ids) - 1)
        self.found: dict[int, list[tuple[int, float]] | str] = {}  # position -> candidates, or why there are none

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = Pieces("", self._pieces, lit=frozenset({self.at}), prompt=self._prompt)
        lines = piece_lines(board, width)
        here = next((y for y, line in enumerate(lines) if any(style == NEW for _, style in line)), 0)
        room = max(1, height - CANDIDATE_ROWS - 1)
        top = max(0, min(here - room // 2, len(lines) - room))
        rows = lines[top : top + room]
        found = self.found.get(self.at)
        if isinstance(found, list):
            below = candidates_picture(self._candidates(found), width, CANDIDATE_ROWS).rows
        else:
            words = found or "the engine has not answered yet; a paused engine answers when it runs again (key p)"
            below = wrapped(words, "dim", width)
        g = glyphs()
        title = f"What else could it have been? {g.middot} token {self.at + 1:,} of {len(self._ids):,}"
        legend = [(f"arrows choose a token {g.middot} the engine computes each again {g.middot} esc closes", "dim")]
        return Picture([*rows, Row().done(width), *below], title, legend=legend)

    def _candidates(self, found: list[tuple[int, float]]) -> Candidates:
        own = self._ids[self.at]
        listed = dict(found)
        shown = [token for token, _ in found[:SHOWN]]
        if own not in shown:
            shown = [*shown[:-1], own]
        least = found[-1][1]
        tokens = tuple(
            Candidate(self._text_of(token), listed.get(token, least), listed.get(token, least), token not in listed)
            for token in shown
        )
        rank = next((str(n) for n, (token, _) in enumerate(found, 1) if token == own), f"below {len(found)}")
        line = f"{glyphs().arrow} the token of the chat: rank {rank} in the model's own distribution"
        return Candidates("", tokens, line, shown.index(own))

    def action_move(self, tokens: int) -> None:
        self.at = max(1, min(len(self._ids) - 1, self.at + tokens))
        screen = self.screen
        assert isinstance(screen, TokensScreen)
        screen.look()


class TokensScreen(PanelDialog):
    """The dialog with a TokenPanel. Every chosen token is a request for one token, which the panels show too."""

    panel: TokenPanel
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,k", "dismiss", "close", show=False, id="tokens.close")]
    DEFAULT_CSS = "TokensScreen TokenPanel { max-width: 112; max-height: 30; }"

    def __init__(self, chats: Chats, ids: list[int], prompt: int) -> None:
        self._chats, self._ids, codec = chats, ids, chats.codec
        assert codec is not None
        super().__init__(TokenPanel(ids, prompt, lambda token: codec.decode([token], skip_special_tokens=False)))

    def on_mount(self) -> None:  # Textual calls the parent's handler too
        self.look()

    def look(self) -> None:
        """Ask the engine for the candidates of the chosen token, unless they are known."""
        if not isinstance(self.panel.found.get(self.panel.at), list):
            self.run_worker(self._ask(self.panel.at), group="tokens", exclusive=True)

    async def _ask(self, at: int) -> None:
        try:
            self.panel.found[at] = await alternatives(self._chats, self._ids, at)
        except EngineError as error:
            self.panel.found[at] = str(error)
        self.panel.repaint()
