"""The help: what is being looked at, in plain words, then every key and command."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from minitui.tui.actions import Action, key_label, offered
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.screens.keys import KeysOf
from minitui.tui.theme import glyphs

WIDEST = 104  # columns: as wide as DEFAULT_CSS says
ABOUT = {
    "lesson": """\
A lesson is read page by page, and the engine beside it is real: what an experiment shows was counted in that moment.

  right, left    the next page, the page before (also page down, page up: a presenter's remote)
  a b c d        predict, before an experiment is run
  enter, r       run it, or run it again; on the last page, answer the question
  tab            on the last page: the next question, and the panel on which its answer stands
  v              the code of this page, as it is installed
  L              all lessons
  0 1 2          the lesson, the chats of its experiment, and the inspector""",
    "chat": """\
Every chat here is answered by one engine, all of them at once. In each step it takes one token further everybody who is
writing, and spends what is left of the step's token budget on the prompts of those who wait.

A prompt is cut into blocks of 16 tokens. The keys and values that attention needs of them (the KV cache) are kept in a
pool of such blocks. A radix tree remembers which text each block holds: a second prompt with the same beginning takes
those blocks over instead of computing them. The line under each answer says how many of its prompt's tokens came that
way, and why not more did:

  all that can be shared            all whole blocks; a prompt's last token is always computed
  differs at token n                from there on no cached text is the same
  no more is cached                 the cached text ends there: a block is kept once it is full
  shorter than a block              what is left of the prompt does not fill one
  nothing cached begins like this   the first block differs
  evicted at step n                 it was there, and was given up to make room

The chips on the right are this chat's block table: the position in the text, in steps of 16, says which chip; the
number on it is the block in the pool. The same numbers in two chats are the same memory.

Chats in which something was asked are kept. F searches all of them; minitui chat --resume brings back those that were
open last. What another minitui has open now opens here as a fork: neither overwrites the other.

Try: ask something, press esc and then r.""",
    "inspect": """\
Everything on this screen is folded from the engine's own record of what it did, step by step.

  vitals         is it healthy: speed, who runs and waits, hits, the pool, a step's time
  step           what it computes: one token of each who decodes, prompts in chunks
  KV blocks      the pool: free, cached (the tree alone), active (one request), shared (several)
  block table    the selected request's positions → blocks; the last one is partly filled
  radix tree     which text stands in the cache, who uses it, how much it saved, what goes next
  lanes          who waited and who ran, over time
  timings        decode, mixed and prefill steps apart; a first token is queue + prefill + sample
  events         every decision with its reason, the newest on top

Tab goes from panel to panel, and ? tells more of the one that has the focus. Select something with the arrows: the same
thing is marked in every panel. z makes one panel large.""",
    "lecture": """\
One sentence tells what the step did and why; under it the step, the blocks and the tree it changed. What changed glows.

  n, page down    the next step (the engine stops before it); in the past, one step forward
  comma, page up  one step back in time; the engine is not touched
  d               predict: a step with something to guess (an arrival, an eviction, a preemption) is asked about first
  u               run until an admission, a hit, an eviction, a preemption, a finish, a slow step
  < and >         slow motion, for watching without stopping

A presenter's remote is safe here: its other keys do nothing.""",
    "replicas": """\
Several servers answer these chats. A chat's first question goes to its home: the replica that comes first by a hash of
the chat's system prompt (without one, of the question). So chats that begin alike meet in one cache. From then on a
chat stays where its last answer was written, for there lies the whole conversation. A replica with more than 1.25 times
the mean number of requests, and at least four, is passed over for the next by that hash.

  up, down   choose a replica; under the table stands what there is to know about it
  enter      hold the panels of the other screens to it, and again: they follow the chat that is shown, from replica
             to replica (of minitui servers only; others do not tell)
  P, U       pin the chat that is shown to it; let any replica answer it again

A dash means that a server does not tell; "ours" are this application's requests. A replica that is away is tried again,
more and more seldom; what was asked of it goes to the next, or ends with a sentence if an answer had begun to come.""",
}


def _signs() -> str:
    """What the tabs of the chats say of them."""
    g = glyphs()
    done = (g.right, "answered"), (g.preempted, "cancelled"), ("!", "failed")
    signs = (g.folded, "is being answered"), (g.middot, "waits"), *done
    return "In the tabs:  " + "   ".join(f"{sign} {word}" for sign, word in signs)


def of_panel(widget: object) -> list[tuple[str, str]]:
    """Title and text of the panel that has the focus, if it has a text."""
    text = getattr(widget, "help_text", "")
    return [(f"The panel with the focus: {getattr(widget, 'TITLE', '')}", text)] if text else []


def reflow(text: str, width: int) -> str:
    """The text in lines of at most `width` cells: paragraphs are broken anew, and what stands in two columns goes on
    in its second."""
    return "\n\n".join("\n".join(_reflowed(part.split("\n"), width)) for part in text.split("\n\n"))


def _reflowed(lines: list[str], width: int) -> list[str]:
    if not lines[0].startswith(" "):
        return textwrap.wrap(" ".join(lines), width)
    entries: list[str] = []
    for line in lines:
        if entries and line.startswith(" " * 8):  # it goes on with what stands above
            entries[-1] += " " + line.strip()
        else:
            entries.append(line)
    rows = []
    for entry in entries:
        column = re.match(r" +\S.*? {2,}", entry)
        hang = " " * (column.end() if column else 2)
        rows += textwrap.wrap(entry, width, subsequent_indent=hang)
    return rows


class HelpScreen(Overlay[None]):
    """`about` is a key of ABOUT; `before` stands above it: titles and texts, of the panel that has the focus;
    `here` are keys that only act where the reader is."""

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > Vertical { width: 104; max-width: 96%; height: 92%; border: round $accent; background: $ground;
            border-title-color: $ink; border-title-style: bold; }
        & VerticalScroll { padding: 1 2; scrollbar-size-vertical: 1; }
        & .head { color: $hit; text-style: bold; margin-top: 1; }
        & .foot { color: $dim; padding: 0 2; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "Close", id="help.close", show=False)
    ]

    def __init__(
        self, about: str, keys: dict[str, str], before: Sequence[tuple[str, str]] = (), here: Sequence[KeysOf] = ()
    ) -> None:
        super().__init__()
        self._about, self._keys, self._before, self._here = about, keys, before, here
        self._texts: list[tuple[Static, Callable[[int], Content]]] = []

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = "Help"
            with VerticalScroll():
                for title, text in self._before:
                    yield Static(title, classes="head", markup=False)
                    yield Static(Content(text))
                if self._before:
                    yield Static("The whole screen", classes="head")
                yield self._fitted(lambda width: Content(reflow(ABOUT[self._about], width)))
                if self._about == "chat":
                    yield Static(Content(_signs()))
                for those in self._here:
                    yield Static(f"Keys here: {those.name}", classes="head", markup=False)
                    told = [(b.id or "", b.key, "", _told(b)) for b in those.bindings]
                    yield self._fitted(partial(self._rows, told))
                yield Static("The prompt", classes="head")
                yield Static(PROMPT_HELP)
                for group in dict.fromkeys(a.group for a in self._offered):
                    yield Static(f"{group} (keys act outside the prompt; esc leaves it)", classes="head", markup=False)
                    yield self._fitted(partial(self._table, group))
                names = "Names in the first column are those of settings.toml, table [keys]."
                yield Static(names, classes="foot", markup=False)
            yield Static("up, down, page keys scroll · esc closes", classes="foot")

    @property
    def _offered(self) -> list[Action]:
        return offered(getattr(self.app, "FEATURES", ()))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def _fitted(self, text: Callable[[int], Content]) -> Static:
        """A text that is made anew for every width in which it is shown."""
        made = Static(text(self._width))
        self._texts.append((made, text))
        return made

    @property
    def _width(self) -> int:
        """Cells of a line: without border, padding and scrollbar."""
        return max(20, min(WIDEST, self.app.size.width * 96 // 100) - 7)

    def on_resize(self) -> None:
        for made, text in self._texts:
            made.update(text(self._width))

    def _table(self, group: str, width: int) -> Content:
        of_it = (a for a in self._offered if a.group == group)
        return self._rows(
            [(a.id, a.key, f"/{a.slash} {a.takes}".rstrip() if a.slash else "", a.help) for a in of_it], width
        )

    def _rows(self, told: Sequence[tuple[str, str, str, str]], width: int) -> Content:
        """Of (id, key, slash command, what it does)."""
        rows: list[Content | str | tuple[str, str]] = []
        for id, key, slash, words in told:
            key = key_label(self._keys.get(id, key)) if key else ""
            lead = f"{id:<10}", f"{key:<7}", f"{slash:<19}" if slash or "." not in id else ""
            rows += [(lead[0], "dim"), " ", (lead[1], "bold"), " ", lead[2]]
            indent = "\n" + " " * (2 + sum(map(len, lead)))
            rows += [indent.join(textwrap.wrap(words, max(20, width - len(indent) + 1))), "\n"]
        return Content.assemble(*rows)


def _told(binding: Binding) -> str:
    return f"{binding.description}: {binding.tooltip}" if binding.tooltip else binding.description


PROMPT_HELP = Content(
    "enter sends · ctrl+j breaks the line · tab or right takes the completion · up and down go through the list, then "
    "through what you asked · page keys scroll the chat · esc closes the list, else cancels the answer, else leaves "
    "the prompt · ctrl+g leaves it while the answer goes on"
)
