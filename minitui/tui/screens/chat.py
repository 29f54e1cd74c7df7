"""The chat screen: transcript and prompt on the left, on the right what the engine does about this chat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual import getters
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical

from minitui.tui import markdown
from minitui.tui.actions import complete_slash
from minitui.tui.screens.one_size import OneSize
from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.block_table import BlockTable
from minitui.tui.widgets.chrome import Bar, SessionStrip, StatusBar, TopBar, host
from minitui.tui.widgets.events import Events
from minitui.tui.widgets.loading import Loading
from minitui.tui.widgets.occupancy import Occupancy
from minitui.tui.widgets.origin import PromptOrigin
from minitui.tui.widgets.prompt import Completion, CompletionList, Prompt, complete_question
from minitui.tui.widgets.rows import Run
from minitui.tui.widgets.step_bar import StepBar
from minitui.tui.widgets.transcript import LABEL, Transcript
from minitui.tui.widgets.vitals import Vitals

if TYPE_CHECKING:
    from minitui.viewmodel.model import View

RAIL_FROM = 100  # columns: with fewer there is no rail
TEXT_EVERY = 0.1  # seconds between two updates of the transcript


class ChatScreen(OneSize[None]):
    """Composes and routes; the chats are in `app.chats`, the engine's picture in the view it paints."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (RAIL_FROM, "-wide")]  # noqa: RUF012 (Textual declares it so)
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012
    DEFAULT_CSS = """
    ChatScreen {
        layout: vertical; background: $ground;
        & #left { width: 1fr; layers: base above; }
        & #rail { width: 42; padding-left: 1; }
        &.-wide #glance { display: none; }
        &.-narrow #rail { display: none; }
        &.-low #rail Events { display: none; }
        & #glance { height: auto; padding: 0 1; }
        & Transcript { height: 1fr; }
        & CompletionList { layer: above; dock: bottom; margin: 0 2; }
        & #rail Vitals { height: 8; }
        & #rail BlockTable { height: 1fr; min-height: 6; }
        & #rail PromptOrigin { height: 6; }
        & #rail Events { height: 9; }
    }
    """
    RAIL: ClassVar[tuple[type[LinePanel], ...]] = (Vitals, BlockTable, PromptOrigin, Events)
    HEADLINE = "Several chats, one engine."
    LEAD = "Ask something, and watch beside the answer what the engine does to write it."
    HINTS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("r", "the system prompt again, in a second chat: a cache hit"),
        ("2", "inspect the engine"),
        ("?", "what everything here means, and every key"),
    )
    transcript = getters.query_one(Transcript)
    prompt = getters.query_one(Prompt)
    completions = getters.query_one(CompletionList)

    def __init__(self) -> None:
        super().__init__()
        self._text_at = 0.0
        self._turn = False
        self._painted_moment: object = None
        self._bars: list[LinePanel] = []
        self._rail: list[LinePanel] = []
        self._glance: list[LinePanel] = []

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield SessionStrip()
        with Horizontal():
            with Vertical(id="left"):
                with Container(id="glance"):
                    yield Occupancy()
                    yield StepBar(frame="none")
                yield Loading()
                yield Transcript()
                yield CompletionList()
                yield Prompt(placeholder="Ask, or / for commands")
            with Vertical(id="rail"):
                yield from (panel() for panel in self.RAIL)
        yield StatusBar()

    def on_mount(self) -> None:
        # Asked for once: a query walks the tree, and paint comes twenty times a second.
        self._bars = [*self.query(Bar), self.query_one(Loading)]
        self._rail = list(self.query("#rail LinePanel").results(LinePanel))
        self._glance = list(self.query("#glance LinePanel").results(LinePanel))
        self.prompt.complete = self.complete
        self.prompt.asked = host(self.app).chats.asked()
        self.transcript.speaker = host(self.app).speaker
        self.transcript.welcome = self._welcome
        self.prompt.focus()

    def complete(self, text: str) -> list[Completion]:
        """What the prompt may become."""
        if text.startswith("/"):
            fits = complete_slash(text, host(self.app).FEATURES)
            return [Completion(f"/{a.slash}", f"{a.takes}  {a.help}".strip()) for a in fits]
        return complete_question(text, host(self.app).known_questions)

    # ---- painting

    def paint(self, view: View) -> None:
        """Show the view and the chat as they stand; called once a frame while this screen is visible."""
        app = host(self.app)
        now = time.monotonic()
        if now - self._text_at >= TEXT_EVERY or self.transcript.session is not app.session:
            self._text_at = now
            self.transcript.show(app.session)
        # Every panel at every second frame, one half at a time: a key never waits for all of them. Where the picture
        # stands, those of one moment are painted at once.
        self._turn = not self._turn
        moment = (view.version, view.home, view.travel_text, view.shown.state.seq) if view.still else None
        at_once = moment is not None and moment != self._painted_moment
        self._painted_moment = moment
        panels = [*self._bars, *(self._glance if self.has_class("-narrow") else self._rail)]
        for panel in panels if at_once else panels[self._turn :: 2]:
            panel.paint(view)
        if self.completions.display:
            self.completions.paint(view)

    def _welcome(self, width: int) -> list[list[Run]]:
        """What an empty chat shows."""
        app = host(self.app)
        lead = " " * LABEL
        rows: list[list[Run]] = [[("welcome".ljust(LABEL), "hit"), (self.HEADLINE, "bold ink")]]

        def add(text: str, tone: str, mark: str = "") -> None:
            for number, line in enumerate(markdown.plain(text, width - len(mark))):
                rows.append([(lead, "ink"), (mark if number == 0 else " " * len(mark), "running"), (line[0][0], tone)])

        add(self.LEAD, "ink")
        rows.append([])
        if app.known_questions:
            add("This tiny model knows how inference engines work:", "dim")
            for question in app.suggestions:
                add(question, "ink", f"{glyphs().middot} ")
            add(f"a few letters, then tab; /ask lists all {len(app.known_questions)}", "dim")
            rows.append([])
        for key, what in self.HINTS:
            add(what, "dim", f"esc {key}  ")
        return rows

    # ---- routing

    def on_prompt_offered(self, message: Prompt.Offered) -> None:
        self.completions.completions = message.completions
        self.completions.chosen = message.chosen
        self.completions.display = bool(message.completions)
        self.completions.styles.height = max(1, len(message.completions))
        self.completions.styles.margin = (0, 2, self.prompt.outer_size.height, 2)
        self.call_after_refresh(self.completions.paint, host(self.app).view)

    def on_prompt_sent(self, message: Prompt.Sent) -> None:
        host(self.app).submit(message.text)

    def on_prompt_left(self) -> None:
        app = host(self.app)
        if not app.chats.cancel(app.session):
            self.transcript.focus()

    def on_prompt_scroll(self, message: Prompt.Scroll) -> None:
        height = max(self.transcript.size.height - 2, 1)
        self.transcript.scroll_relative(y=message.pages * height, animate=False)
