"""The chat screen: transcript and prompt on the left, panels about this chat and the engine on the right."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual import getters
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical

from minitui.tui import markdown
from minitui.tui.actions import complete_slash
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.base import PHONE, BaseScreen, Hint
from minitui.tui.widgets.bars import Bar, Loading, StatusBar, TopBar
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.occupancy import Occupancy, PromptOrigin
from minitui.tui.widgets.chat.prompt import Completion, CompletionList, Prompt, complete_question
from minitui.tui.widgets.chat.session_tabs import SessionTabs
from minitui.tui.widgets.chat.transcript import LABEL, Transcript
from minitui.tui.widgets.hit_card import HitCard
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.rows import Run
from minitui.viewmodel.view import View

RAIL_FROM = 100  # columns; a narrower screen does not show the panels on the right (the rail)
TEXT_EVERY = 0.1  # seconds between two updates of the transcript


class ChatScreen(BaseScreen[None]):
    """Arranges the widgets and handles their messages. The chats are in `app.chats`, and the engine's state is in the
    view."""

    HORIZONTAL_BREAKPOINTS = [(0, "-phone"), (PHONE, "-narrow"), (RAIL_FROM, "-wide")]  # noqa: RUF012 (as in Textual)
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012
    DEFAULT_CSS = """
    ChatScreen {
        layout: vertical; background: $ground;
        & #left { width: 1fr; layers: base above; }
        & #rail { width: 42; padding-left: 1; display: none; }
        &.-wide #rail { display: block; }
        &.-wide #glance { display: none; }
        &.-phone Occupancy { height: 1; }
        &.-phone StepBar { height: 1; }
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
    LEAD = "Ask something. The panels beside the answer show how the engine writes it."
    WELCOME_KEYS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("r", "the same first question in a second chat: a cache hit"),
        ("2", "inspect the engine"),
    )  # `_welcome` adds the key ?
    transcript = getters.query_one(Transcript)
    prompt = getters.query_one(Prompt)
    completions = getters.query_one(CompletionList)

    def __init__(self) -> None:
        super().__init__()
        self._text_at = 0.0
        self._odd_frame = False
        self._painted_moment: object = None
        self._bars: list[LinePanel] = []
        self._rail: list[LinePanel] = []
        self._glance: list[LinePanel] = []

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield HitCard()
        yield SessionTabs()
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
        # Query only here: a query walks the widget tree, and paint is called twenty times a second.
        self._bars = list(self.query(Bar))
        self._rail = list(self.query("#rail LinePanel").results(LinePanel))
        self._glance = list(self.query("#glance LinePanel").results(LinePanel))
        self.prompt.complete = self.complete
        self.prompt.asked = self.app.chats.asked()
        self.transcript.speaker = self.app.speaker
        self.transcript.welcome = self._welcome
        self.prompt.focus()

    def complete(self, text: str) -> list[Completion]:
        """Returns the completions of the text in the prompt."""
        if text.startswith("/"):
            actions = complete_slash(text, self.app.actions)
            return [Completion(f"/{a.slash}", f"{a.takes}  {a.help}".strip()) for a in actions]
        return complete_question(text, self.app.known_questions)

    def hints(self) -> list[Hint]:
        """Returns the hints of BaseScreen, the most useful first: few hints fit on a small terminal."""
        hints = super().hints()
        first = [*hints[:4], *(hint for hint in hints if hint[1] in ("inspect", "help", "go to"))]
        return [*first, *(hint for hint in hints if hint not in first)]

    # ---- painting

    def paint(self, view: View) -> None:
        app = self.app
        now = time.monotonic()
        if now - self._text_at >= TEXT_EVERY or self.transcript.session is not app.session:
            self._text_at = now
            self.transcript.paused, self.transcript.notes = app.waits_text, app.source.info.notes
            self.transcript.show(app.session)
        # Each frame paints half of the panels: painting all panels would delay the handling of a key. When the picture
        # stops (frozen, paused, in the past), or a stopped picture shows another moment, all are painted at once.
        self._odd_frame = not self._odd_frame
        at = view.moment
        moment = (view.version, view.home, at.travel_text, at.shown.state.seq) if at.still else None
        at_once = moment is not None and moment != self._painted_moment
        self._painted_moment = moment
        panels = [*self._bars, *(self._rail if self.has_class("-wide") else self._glance)]
        for panel in panels if at_once else panels[self._odd_frame :: 2]:
            panel.paint(view)
        if self.completions.display:
            self.completions.paint(view)

    def _welcome(self, width: int) -> list[tuple[list[Run], Callable[[], object] | None]]:
        """Returns the lines that an empty chat shows, each with what a click on it does."""
        app = self.app
        lead = " " * LABEL
        rows: list[tuple[list[Run], Callable[[], object] | None]] = []
        rows.append(([("welcome".ljust(LABEL), "hit"), (self.HEADLINE, "bold ink")], None))

        def add(text: str, style: str, mark: str = "", click: Callable[[], object] | None = None) -> None:
            for number, line in enumerate(markdown.plain(text, width - len(mark))):
                first = mark if number == 0 else " " * len(mark)
                rows.append(([(lead, "ink"), (first, "running"), (line[0][0], style)], click))

        add(self.LEAD, "ink")
        rows.append(([], None))
        if app.known_questions:
            add("This tiny model knows how inference engines work:", "dim")
            for question in app.suggestions:
                add(question, "ink", f"{glyphs().middot} ", partial(app.ask_question, question))
            add(f"click one, or type a few letters, then tab; /ask lists all {len(app.known_questions)}", "dim")
            rows.append(([], None))
        for key, what in (*self.WELCOME_KEYS, ("?", "help on this screen, and all keys")):
            add(what, "dim", f"esc {key}  ", partial(app.press, f"esc {key}"))
        for note in self.transcript.notes:
            rows.append(([], None))
            add(note, "dim")
        return rows

    # ---- messages

    def on_prompt_offered(self, message: Prompt.Offered) -> None:
        self.completions.completions = message.completions
        self.completions.chosen = message.chosen
        self.completions.display = bool(message.completions)
        self.completions.styles.height = max(1, len(message.completions))
        self.completions.styles.margin = (0, 2, self.prompt.outer_size.height, 2)
        self.call_after_refresh(self.completions.paint, self.app.view)

    def on_prompt_left(self) -> None:
        app = self.app
        if app.answer_waits:
            self.transcript.focus()
            app.say("the answer waits; letters are now keys, i goes to the prompt, esc again cancels the answer")
        elif not app.chats.cancel(app.session):
            self.transcript.focus()

    def on_prompt_scroll(self, message: Prompt.Scroll) -> None:
        height = max(self.transcript.size.height - 2, 1)
        self.transcript.scroll_relative(y=message.pages * height, animate=False)
