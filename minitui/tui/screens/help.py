"""The help: what the current screen shows, then every key and command. The palette has the same keys."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from textual import events, getters
from textual.actions import parse
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static

from minitui.text import match_reasons
from minitui.tui.actions import BY_ID, key_label
from minitui.tui.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.panels import PANELS
from minitui.tui.screens.base import BaseScreen
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.widgets.base import LinePanel

SAVED = """\
A chat is saved as soon as it has a question. F searches all saved chats; minitui chat --resume opens the last ones.
A chat that is open in another minitui opens here as a copy, so neither overwrites the other."""
MAX_WIDTH = 104  # columns, as in DEFAULT_CSS


def _panels() -> str:
    """Returns a line for each panel of the inspect screen, with its key."""
    keys = {name: f"({key_label(panel.key)}) " if panel.key else "" for name, panel in PANELS.items()}
    return "\n".join(f"  {panel.title:<13}  {keys[name]}{panel.help}" for name, panel in PANELS.items())


ABOUT = {
    "cached": """\
The server publishes which texts it stores in its prefix cache and removes from it (KV events). This screen is computed
from these events and from the server's /metrics. What neither of them tells is not shown.

  server         figures from /metrics
  pool           its size; the blocks that requests hold; the blocks with a cached text; what is not shown, and why
  cached texts   the tree of texts, decoded with the model's tokenizer
  events         what the server removed
""",
    "lesson": """\
A lesson has pages of text beside a real engine. The figures of an experiment are counted while it runs.

  right, left    the next page, the previous page. On the last page, right opens the next lesson
  page down, up  further down or up on this page, then the next or the previous page: the keys of a presenter's remote
  a b c d        predict the result, before the experiment has run
  enter          run the experiment; while it runs, go from picture to picture; on the last page, answer the question.
                 Another page stops a running experiment
  e              run the experiment to its end, without pauses
  r              run the experiment again, or without a prediction; an earlier prediction does not count then
  i              type your own text for the experiment, on pages that offer this
  tab            on the last page: the next question, and the panel that shows its answer; on a page with HTTP: up and
                 down then scroll the panel
  v              the installed code that this page explains
  L              all lessons, on each screen
  n              one step of the engine, while an experiment has requests
  0 1 2          the lesson, the chats of its experiment, the inspector. In the text box of a chat, press ctrl+g before
                 a digit or L""",
    "exercise": """\
Your file is at the left; on a narrow terminal, it is on top. Save it in any editor, and it runs at once: the real
scheduler, allocator and prefix tree, with your function in the place of one decision. The device is simulated: a step
takes 4 ms, and 0.05 ms for each token.

  e              open the file in your editor ($VISUAL or $EDITOR); one in the terminal takes the screen until it ends
  r              run the file again
  comma, .       one step back, one step forward; 2 and 3 show the step in the other panels
  4              the run of the reference and yours on one clock; tab shows the figures of both
  up, down       scroll the file

The result tells the first rule that is broken, and the panels show its step. If all rules are kept, the score is 100
for the figure of the reference, and 200 for half of it. What the code prints is shown below, and goes nowhere else.

The code runs in a process of its own: at most 5 s of processor time, 20 s and 256 MiB. It starts no processes, opens no
connections and changes no files. This stops accidents, not attacks: run only code that you trust.
""",
    "compare": """\
Two runs of the same work under two settings, on one clock: both begin at the left edge.

  left, right    move the cursor; it is at the same moment of both runs
  [ ]            zoom in and out; page up and page down move the picture; end shows the whole runs
  k              the clock: milliseconds, or steps
  up, down       choose the same request in both runs
  tab            the lanes, or the figures of both runs
  S              save new runs as recordings, for minitui compare A.trace B.trace""",
    "chat": f"""\
One engine answers all chats here. A step can compute the next tokens of many chats. The rest of the step's token budget
goes to prompts that are not computed yet.

A prompt is divided into blocks of tokens; a block usually has 16. Attention needs the keys and values of these tokens
(the KV cache); they are kept in a pool of blocks. A radix tree records the text of each full block, so a second prompt
with the same beginning can reuse the blocks instead of computing them. The line under an answer says how many tokens of
its prompt came from the cache, and why the rest did not:

{match_reasons()}

The chips on the right are this chat's block table. Each chip is one block; its number is the block in the pool. Two
chats with the same number share that memory.

{SAVED}

Try: ask a question, press esc, then r: the same question in a new chat uses the cached blocks.
The lessons explain the words of this screen from the beginning: minitui lesson 0, in a terminal.""",
    "foreign": f"""\
One server answers all chats here. It does not report what its engine does: its steps and its cache are not shown. The
panel beside the answer, or the line above a narrow one, shows the figures of the server's page /metrics. A figure that
this page does not have is unknown. The times under an answer are measured here.

{SAVED}""",
    "inspect": f"""\
The engine records what it does, step by step. This screen is computed from those records.

{_panels()}

Tab goes to the next panel, and ? explains the panel with the focus. Select an item with the arrow keys: every panel
marks it. z shows one panel alone. Enter in a list of steps or gaps goes to that moment and shows all panels; esc goes
back to the list.""",
    "lecture": """\
One sentence says what the step did and why. Below it are the step, the blocks and the tree; what has changed glows.

  n, page down    run the next step, then pause the engine; after going back, show the next step
  comma, page up  show the previous step; the engine's state does not change
  d               predict: you are asked about an arrival, an eviction or a preemption before it is shown; a, b
                  and c answer, n shows the step
  u               run until an admission, a hit, an eviction, a preemption, a finish, or a slow step
  < and >         slower, faster: slow motion shows every step without a pause

The other keys of a presenter's remote have no effect here.""",
    "replicas": """\
Several servers answer these chats. The first question of a chat goes to its home replica. A hash of the system prompt
selects it; a chat without system prompt uses a hash of the question. So chats with the same system prompt usually share
one cache. Later questions go to the replica that wrote the last answer, because its cache may hold the conversation. A
replica with at least four requests, and with more than 1.25 times the mean of all replicas, is skipped. The question
then goes to the next replica in the order of the hash.

  up, down   choose a replica; the lines under the table describe it
  enter      show this replica in the panels of the other screens; pressed again, the panels follow the current chat
             (only minitui servers report to the panels)
  P, U       pin the current chat to this replica; remove the pin

A dash means that the server does not report the figure; "ours" counts the requests of this application. A replica that
is down is tried again at growing intervals. Its requests go to the next replica. A request whose answer had begun ends
with an error.""",
}


def _signs() -> str:
    """Returns the meaning of the signs in the tabs of the chats."""
    g = glyphs()
    signs = f"{g.folded} is being answered   {g.middot} waits   {g.right} answered   {g.preempted} cancelled   ! failed"
    return f"In the tabs:  {signs}"


def panel_help(widget: object) -> list[tuple[str, str]]:
    """Returns a (title, text) pair for the panel with the focus, in a list; empty if it has no help text."""
    text = getattr(widget, "help_text", "")
    return [(f"The panel with the focus: {getattr(widget, 'TITLE', '')}", text)] if text else []


def reflow(text: str, width: int) -> str:
    """Returns the text in lines of at most `width` cells. A two-column entry is wrapped within its second column."""
    return "\n\n".join("\n".join(_reflowed(part.split("\n"), width)) for part in text.split("\n\n"))


def name_of_text(screen: Screen[Any], mode: str) -> str:
    """Returns the name of the text in ABOUT for a screen that is shown in `mode`."""
    name = (screen.ABOUT if isinstance(screen, BaseScreen) else "") or mode
    return name if name in ABOUT else "chat"


def _reflowed(lines: list[str], width: int) -> list[str]:
    if not lines[0].startswith(" "):
        return textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
    entries: list[str] = []
    for line in lines:
        if entries and line.startswith(" " * 8):  # continues the entry above
            entries[-1] += " " + line.strip()
        else:
            entries.append(line)
    rows = []
    for entry in entries:
        column = re.match(r" +\S.*? {2,}", entry)
        hang = " " * (column.end() if column else 2)
        rows += textwrap.wrap(entry, width, subsequent_indent=hang, break_on_hyphens=False)
    return rows


CURSOR_KEYS = {"up", "down", "left", "right", "pageup", "pagedown", "tab", "shift+tab", "escape"}


@dataclass(frozen=True)
class BindingGroup:
    """The bindings of one node; `name` is the node's title in the help."""

    name: str
    node: DOMNode
    bindings: tuple[Binding, ...]


def bindings_here(app: App[Any]) -> list[BindingGroup]:
    """Returns the bindings of the panel with the focus, of the screen, and of the application."""
    nodes: list[tuple[str, DOMNode]] = [(app.current_mode.capitalize(), app.screen), ("Application", app)]
    if isinstance(app.focused, LinePanel):
        nodes.insert(0, (app.focused.TITLE, app.focused))
    groups = (BindingGroup(name, node, _bindings(node)) for name, node in nodes)
    return [group for group in groups if group.bindings]


def _bindings(node: DOMNode) -> tuple[Binding, ...]:
    """Returns the bindings that minitui's classes declare for this node, without ACTIONS, system keys, and keys whose
    action the node refuses now."""
    ours = [kind for kind in type(node).__mro__ if kind.__module__.startswith("minitui")]
    declared = {b.id: b for kind in ours for b in vars(kind).get("BINDINGS", ()) if b.id not in BY_ID and not b.system}
    actions = {binding: parse(binding.action) for binding in declared.values()}
    return tuple(b for b, (_, name, given) in actions.items() if node.check_action(name, given) is not False)


class HelpScreen(Overlay[None]):
    """Shows `before` ((title, text) pairs), then ABOUT[`about`], then the keys `here`, then all actions."""

    app = getters.app(AppBase)

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

    def __init__(self, about: str, before: Sequence[tuple[str, str]], here: Sequence[BindingGroup]) -> None:
        super().__init__()
        self._about, self._before, self._here = about, before, here
        self._texts: list[tuple[Static, Callable[[int], Content]]] = []

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = "Help"
            with VerticalScroll():
                if not self.app.HELP_FIRST:  # which begins with keys, too
                    yield Static(f"Keys: {self.app.current_mode}", classes="head", markup=False)
                    yield Static(self._keys(), markup=False)
                for title, text in self._before:
                    yield Static(title, classes="head", markup=False)
                    yield self._fitted(partial(_text, text))
                yield Static("The whole screen", classes="head")
                yield self._fitted(partial(_text, ABOUT[self._about]))
                if self.app.current_mode == "chat":
                    yield Static(Content(_signs()))
                for group in self._here:
                    yield Static(f"Keys here: {group.name}", classes="head", markup=False)
                    rows = [
                        (b.id or "", b.key, "", ": ".join(filter(None, (b.description, b.tooltip))))
                        for b in group.bindings
                    ]
                    yield self._fitted(partial(self._rows, rows))
                if self.app.has_chats:
                    yield Static("The prompt", classes="head")
                    yield Static(PROMPT_HELP)
                outside = " (keys act outside the prompt; esc leaves it)" if self.app.has_chats else ""
                for name in dict.fromkeys(a.group for a in self.app.actions):
                    yield Static(f"{name}{outside}", classes="head", markup=False)
                    yield self._fitted(partial(self._table, name))
                names = "The first column is the name for the table [keys] of settings.toml."
                yield Static(names, classes="foot", markup=False)
            yield Static("up, down, page keys scroll · esc closes · other keys close the help and act", classes="foot")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def on_key(self, event: events.Key) -> None:
        """Close the help at another key of the screen below, and let the key act there."""
        if not self.is_current or event.key in self.active_bindings:
            return
        if event.key in self.app.screen_stack[-2].active_bindings:
            event.stop()
            self.dismiss()
            self.app.call_later(self.app.simulate_key, event.key)

    def _keys(self) -> Content:
        """Returns the hints of the screen below, all of them."""
        below = self.app.screen_stack[-1 if self.app.screen is not self else -2]
        hints = below.hints() if isinstance(below, BaseScreen) else []
        return Content(" · ").join([Content.assemble((key, "bold"), f" {what}") for key, what in hints])

    def _fitted(self, text: Callable[[int], Content]) -> Static:
        """Returns a widget whose text is made again for each width."""
        made = Static(text(self._width))
        self._texts.append((made, text))
        return made

    @property
    def _width(self) -> int:
        """The cells of a line, without border, padding and scrollbar."""
        return max(20, min(MAX_WIDTH, self.app.size.width * 96 // 100) - 7)

    def on_resize(self) -> None:
        for made, text in self._texts:
            made.update(text(self._width))

    def _table(self, group: str, width: int) -> Content:
        actions = (a for a in self.app.actions if a.group == group)
        prompt = self.app.has_chats  # without a prompt, no slash command can be typed
        return self._rows(
            [(a.id, a.key, f"/{a.slash} {a.takes}".rstrip() if a.slash and prompt else "", a.help) for a in actions],
            width,
        )

    def _rows(self, entries: Sequence[tuple[str, str, str, str]], width: int) -> Content:
        """Returns the lines for (id, key, slash command, explanation) entries."""
        rows: list[Content | str | tuple[str, str]] = []
        for id, key, slash, words in entries:
            key = key_label(self.app.settings.keys.get(id, key)) if key else ""
            lead = f"{id:<10}", f"{key:<7}", f"{slash:<19}" if slash or "." not in id else ""
            rows += [(lead[0], "dim"), " ", (lead[1], "bold"), " ", lead[2]]
            indent = "\n" + " " * (2 + sum(map(len, lead)))
            rows += [indent.join(textwrap.wrap(words, max(20, width - len(indent) + 1))), "\n"]
        return Content.assemble(*rows)


def _text(text: str, width: int) -> Content:
    return Content(reflow(text, width))


PROMPT_HELP = Content(
    "enter sends · ctrl+j breaks the line · tab or right accepts the completion · up and down move in the list, or "
    "recall earlier questions · page keys scroll the chat · esc closes the list, else cancels the answer, else leaves "
    "the prompt; while an answer waits or the engine is paused, esc leaves the prompt, and esc again cancels · "
    "ctrl+g leaves the prompt while the answer continues; alt and a letter do this, too, and the letter acts as a key"
)
