"""The phones of a class: their address, what they see, and their answers. Only an application that a browser mirrors
has an audience.

The process of the web page counts the answers, one for each phone (minitui/web/phones.py). This one sends it what the
phones show, at most four times a second, and gets the counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Static

from minitui.teaching.prediction import LETTERS, Poll
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.dialogs import Overlay
from minitui.viewmodel.words.narrate import narrate
from minitui.web.mirror_driver import MirrorDriver

EVERY_S = 0.25  # between two states
LONGEST = 1200  # characters of a text on a phone
BAR = 12  # cells of the longest bar of the counts


@dataclass
class Ballot:
    """A question to the class and how often each choice was taken. `number`: the questions are numbered from 1."""

    number: int
    poll: Poll
    counts: list[int] = field(default_factory=list)
    phones: int = 0  # phones that are connected, at least as many as have answered
    scene: str = ""
    right: int | None = None  # the right choice; None: not shown yet

    @property
    def answers(self) -> int:
        return sum(self.counts)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * len(self.poll.choices)

    def told(self) -> str:
        """Returns a line with a bar and the count of each choice. The right one is marked once it was shown."""
        most, g = max(self.counts) or 1, glyphs()
        bars = (
            f"{g.right + ' ' if choice == self.right else ''}{LETTERS[choice]} {g.active * round(BAR * n / most)} {n}"
            for choice, n in enumerate(self.counts)
        )
        return "   ".join([f"Phones: {self.answers} of {self.phones} have answered", *bars])


class Audience:
    """The audience of one application. `ballots`: all questions, the newest last."""

    def __init__(self, app: AppBase) -> None:
        self._app = app
        self.link = ""  # the address for the phones; empty without them
        self.ballots: list[Ballot] = []
        self.open: Ballot | None = None  # the question that waits for answers now
        self._asked = 0  # questions so far
        self._sent: dict[str, Any] = {}
        self._sent_at = float("-inf")

    def refresh(self) -> None:
        """Open or close a question, and tell the phones what has changed."""
        poll = self._app.poll
        if (self.open.poll if self.open is not None else None) != poll:
            self.open = None
            last = self.ballots[-1] if self.ballots else None
            if last is not None and (last.poll, last.scene) == (poll, self._app.scene_name):
                self.open = last  # the question is on the screen again
            elif poll is not None:
                self._asked += 1
                self.open = Ballot(self._asked, poll, scene=self._app.scene_name)
                self.ballots.append(self.open)
        shows = self._app.asking or (self._app.screen_stack[0] if self._app.screen_stack else None)
        if (answered := getattr(shows, "answered", None)) is not None:
            for ballot in self.ballots:
                if ballot.poll == answered[0]:
                    ballot.right = answered[1]
        driver, now = self._app._driver, time.monotonic()
        if isinstance(driver, MirrorDriver) and now - self._sent_at >= EVERY_S:
            state = self.state()
            if state != self._sent:
                self._sent, self._sent_at = state, now
                driver.publish(state)

    def state(self) -> dict[str, Any]:
        """Returns what the phones show ("all"), and what only the lecturer's page shows ("lecturer")."""
        view = self._app.view
        row = view.shown_step()
        step: dict[str, Any] = {}
        if row is not None:
            chunks = [[view.texts.request(request), n] for request, _, n, _ in row.chunks[:8]]
            step = {"step": row.step, "decodes": row.decodes, "chunks": chunks, "tokens": row.tokens,
                    "budget": view.moment.shown.state.budget}
        at = row.step if row is not None else view.moment.horizon
        lesson, label = hasattr(self._app._asks(), "told_answer"), view.texts.labelled  # a lesson shows no labels
        said = label(self._app.story) or getattr(self._app._asks(), "told_answer", "")
        said = said or (label(narrate(view, at)) if at >= 0 else "")
        said = "\n".join(line for line in said.splitlines() if not line.startswith("Press "))  # phones have no keys
        ask = None
        if self.open is not None:
            texts = (self.open.poll.question, *self.open.poll.choices)
            question, *choices = ((text if lesson else label(text))[:LONGEST] for text in texts)
            ask = {"number": self.open.number, "question": question, "choices": choices}
        shown = {"say": said[:LONGEST], "bar": step, "ask": ask, "paused": self._app.gated}
        return {"all": shown | self._app.scene_for_phones(), "lecturer": self._app.scene_for_lecturer()}

    def forget(self) -> None:
        """Forget all questions: their answers are kept elsewhere."""
        self.ballots, self.open = [], None

    def counted(self, number: int, counts: list[int], phones: int) -> None:
        """Take the counts of a question."""
        for ballot in self.ballots:
            if ballot.number == number and len(counts) == len(ballot.counts):
                ballot.counts, ballot.phones = counts, phones


QUIET = 2  # modules of white around the code


def qr_rows(link: str) -> list[str]:
    """Returns a QR code as rows of text, two modules in a cell, dark on light; empty without the package segno."""
    try:
        import segno
    except ImportError:
        return []
    code = segno.make(link, error="m", micro=False)
    modules = [[bool(dark) for dark in row] for row in code.matrix_iter(border=QUIET)]
    if len(modules) % 2:
        modules.append([False] * len(modules[0]))
    cells = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    pairs = zip(modules[::2], modules[1::2], strict=True)
    return ["".join(cells[both] for both in zip(upper, lower, strict=True)) for upper, lower in pairs]


class JoinScreen(Overlay[None]):
    """Any of its keys closes it."""

    BINDINGS: ClassVar = [Binding("escape,J,enter,space,q", "dismiss", "Close", show=False)]
    DEFAULT_CSS = """
    JoinScreen {
        align: center middle;
        & > Vertical { width: auto; height: auto; border: round $accent; background: $ground; padding: 1 2; }
        & Static { width: auto; }
    }
    """

    def __init__(self, link: str) -> None:
        super().__init__()
        self.link = link

    def compose(self) -> ComposeResult:
        code = qr_rows(self.link)
        without = "" if code else "\n\nThe package segno draws a QR code here: pip install segno"
        address = f"Answer on your phone: {self.link}"
        picture = Static(Text("\n".join(code), style="black on white", no_wrap=True), markup=False)
        picture.styles.margin = (0, 0, 0, max(0, len(address) - len("".join(code[:1]))) // 2)
        with Vertical():
            yield picture
            yield Static(Text(f"\n{address}{without}", style="bold"), markup=False)
