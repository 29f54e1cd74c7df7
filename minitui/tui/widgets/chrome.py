"""The three one-line bars that every screen has: where one is, which chats there are, what the keys do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, cast

from textual.app import App
from textual.geometry import Size
from textual.widgets import TextArea

from minitui.chat.conversation import Session
from minitui.text import ordinal
from minitui.tui.actions import BY_ID, key_label, offered
from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, cells, clip, runs_width

if TYPE_CHECKING:
    from minitui.tui.app import MinituiApp
    from minitui.viewmodel.model import View

FEWEST_LETTERS = 10  # of a chat's title: fewer say nothing
OWN_LETTERS = 18  # of the title of the chat that is shown, at least
SCREENS = (("chat", "1 Chat"), ("inspect", "2 Inspect"), ("lecture", "3 Lecture"))


def host(app: App[object]) -> MinituiApp:
    """The running application, with its own type."""
    return cast("MinituiApp", app)


def has_chats(app: App[Any]) -> bool:
    """Can anything be asked here, or is it a recording?"""
    return "chat" in dict(getattr(app, "TABS", SCREENS))


class Bar(LinePanel, can_focus=False):
    """One line, drawn by rows."""

    FRAME = "none"
    DEFAULT_CSS = "Bar { height: 1; }"


class TopBar(Bar):
    """Which screen, which model on what, and every way in which the picture is not the engine running freely now.

    Under it, while a demo runs, what it tells.
    """

    DEFAULT_CSS = "TopBar { height: auto; }"

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + len(self._story(width))

    def _story(self, width: int) -> list[str]:
        lines = host(self.app).story.split("\n")
        return [piece for line in lines for piece in textwrap.wrap(line, max(20, width - 4)) or [""] if line]

    def paint(self, view: View) -> int:
        """Grows and shrinks with the story."""
        if self.size.width and self.size.height != 1 + len(self._story(self.size.width)):
            self.refresh(layout=True)
        return super().paint(view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        app = host(self.app)
        row = Row(" minitui ", "bold ink")
        for mode, label in getattr(app, "TABS", SCREENS):
            row.add(f" {label} ", "bold on-fill on hit" if app.current_mode == mode else "dim")
        flags = self._flags(view)
        room = width - row.width - sum(len(text) for text, _ in flags) - 2
        about = describe_engine(app.source.info)
        if len(about) + 3 <= room:
            row.add("   " + about, "dim")
        elif room > 12:
            row.add("   " + clip(about, room - 3), "dim")
        row.to(width - sum(len(text) for text, _ in flags) - 1)
        rows = [row.extend(flags).done(width)]
        for line in self._story(width):
            rows.append(
                Row("  ", "ink on select").add(line, "bold ink on select").to(width, " ", "ink on select").done(width)
            )
        return Picture(rows)

    def _flags(self, view: View) -> list[Run]:
        feed = host(self.app).feed
        condition = host(self.app).condition
        flags: list[Run] = []
        if condition.hung:
            flags.append((" the engine does not answer: /restart ", "bold on-fill on bad"))
        elif condition.long:
            flags.append((f" {condition.long} ", "bold on-fill on running"))
        if getattr(feed.source, "connection", ""):
            flags.append((" no connection: trying again ", "bold on-fill on bad"))
        if feed.frozen:
            flags.append((f" FROZEN {glyphs().middot} {feed.steps_behind:,} steps behind ", "bold on-fill on hit"))
        for text in (view.travel_text, view.gate_text, view.pace_text):
            if text:
                flags.append((f" {text} ", "bold on-fill on running"))
        return flags

    def clicked(self, view: View, column: int, row: int) -> None:
        start = 9
        for mode, label in getattr(host(self.app), "TABS", SCREENS):
            if start <= column < start + len(label) + 2:
                host(self.app).open_mode(mode)
            start += len(label) + 2


def describe_engine(info: dict[str, object]) -> str:
    """The model, where it runs, and its pool, in a few words; empty before it is known."""
    if not info:
        return ""
    dot = f" {glyphs().middot} "
    weights = "dtype" if info.get("quantization", "none") == "none" else "quantization"
    known = [str(info[name]) for name in ("model", "device", weights) if name in info]
    if "num_blocks" in info:  # a server of another make does not tell
        small = " in fp8" if info.get("kv_cache_dtype") == "fp8" else ""
        known.append(f"{info['num_blocks']:,} blocks of {info['block_size']}{small}")
    return dot.join(known)


class SessionStrip(Bar):
    """Every chat: its number, title, and what it is doing."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._places: list[tuple[int, int, Session | None]] = []  # columns of what was drawn, for clicks

    def picture(self, view: View, width: int, height: int) -> Picture:
        app = host(self.app)
        sessions = app.chats.sessions
        states = [self._state(session) for session in sessions]
        entries = list(zip(sessions, self._entries(sessions, states, width - 8), strict=True))
        current = next((i for i, (s, _) in enumerate(entries) if s is app.session), 0)
        first = current
        sizes = [runs_width(runs) + 1 for _, runs in entries]
        room = width - (8 if sum(sizes) <= width - 8 else 28)
        used = sizes[current] if sizes else 0
        last = current + 1
        while True:  # widen to both sides while there is room, to the left first: chats keep their places
            if first > 0 and used + sizes[first - 1] <= room:
                first -= 1
                used += sizes[first]
            elif last < len(entries) and used + sizes[last] <= room:
                used += sizes[last]
                last += 1
            else:
                break
        row = Row(" ")
        self._places = []
        if first:
            row.add(f"{first} more {glyphs().middot} ", "dim")
        for session, runs in entries[first:last]:
            start = row.width
            row.extend(runs).add(" ")
            self._places.append((start, row.width, session))
        if last < len(entries):
            row.add(f"{glyphs().middot} {len(entries) - last} more ", "dim")
        start = row.width
        row.add("+ new", "dim")
        self._places.append((start, row.width, None))
        return Picture([row.done(width)])

    def _entries(self, sessions: list[Session], states: list[tuple[str, str]], room: int) -> list[list[Run]]:
        """What is written of each. Every title gets as many letters as any other can have. Before that is hardly a
        word, what the others do becomes a sign; where that is not enough, the chat that is shown has a title, then
        those beside it, and of the others number and sign are left."""
        titles = [cells(session.title) for session in sessions]
        numbers = sum(len(str(i + 1)) + 3 for i in range(len(sessions)))  # and the spaces around
        current = next((i for i, session in enumerate(sessions) if session is host(self.app).session), 0)
        signs = [state if i == current else (_sign(*state), state[1]) for i, state in enumerate(states)]
        for told in (states, signs):
            left = room - numbers - sum(cells(state) + 1 for state, _ in told if state)
            for letters in range(max(titles, default=0), FEWEST_LETTERS - 1, -1):
                if sum(min(title, letters) + 1 for title in titles) <= left:
                    return [self._entry(s, state, letters) for s, state in zip(sessions, told, strict=True)]
        given = [0] * len(sessions)
        given[current] = min(titles[current], max(OWN_LETTERS, left - 1))
        left -= given[current] + 1
        for i in sorted(range(len(sessions)), key=lambda i: abs(i - current)):
            if i != current and left > FEWEST_LETTERS:
                given[i] = min(titles[i], left - 1)
                left -= given[i] + 1
        return [self._entry(*one) for one in zip(sessions, signs, given, strict=True)]

    def _entry(self, session: Session, doing: tuple[str, str], letters: int) -> list[Run]:
        app = host(self.app)
        chosen = session is app.session
        ground = " on empty-chip" if chosen else ""
        title = f"{clip(session.title, letters)} " if letters else ""
        runs: list[Run] = [(f" {app.chats.number(session)} {title}", ("bold ink" if chosen else "dim") + ground)]
        state, tone = doing
        if state:
            runs.append((state + " ", tone + ground))
        return runs

    def _state(self, session: Session) -> tuple[str, str]:
        app = host(self.app)
        g = glyphs()
        if session.state == "queued" or (session.state == "running" and not session.messages[-1].text):
            place = app.queue_place(session)
            if not app.source.info:
                return "waits for the engine", "waiting"
            told = "asked" if place is None else f"waiting, {ordinal(place)}" if place else "prefill"
            return told, "waiting"
        if session.state == "running":
            # Arrivals are stretched by slow motion; the figure shown is the real one. Between two steps there is none.
            pace = app.pace_of(session)
            rate = 0.0 if app.gated else session.rate(window=max(1.0, pace / 5)) * pace
            return f"{g.folded} {rate:,.0f} tok/s" if rate else g.folded, "decode"
        return {
            "done": (g.right, "good"),
            "cancelled": (g.preempted, "waiting"),
            "error": ("!", "bad"),
        }.get(session.state, ("", "dim"))

    def clicked(self, view: View, column: int, row: int) -> None:
        for start, end, session in self._places:
            if start <= column < end:
                if session is None:
                    host(self.app).commands.run("new")
                else:
                    host(self.app).select_session(session)


def _sign(state: str, tone: str) -> str:
    """What a chat is doing in one letter: its speed or its place in the queue are left out."""
    return glyphs().middot if tone == "waiting" and len(state) > 1 else state[:1]


class StatusBar(Bar):
    """Whether letters are text or keys, what can be done now, and whether the picture keeps up."""

    def picture(self, view: View, width: int, height: int) -> Picture:
        app = host(self.app)
        typing = isinstance(app.focused, TextArea)
        row = Row(" TYPING " if typing else " KEYS ", "bold on-fill on running" if typing else "bold on-fill on decode")
        dot = glyphs().middot
        feed = app.feed
        numbers = ""  # but for Inspect the room is the hints', as long as the picture keeps up
        if app.current_mode not in ("chat", "lecture", "lesson", "replicas") or feed.backlog or feed.dropped:
            numbers = f"{view.steps_per_frame:,.0f} steps/frame {dot} "
            if width >= 100 or feed.backlog:
                numbers += f"backlog {feed.backlog:,} {dot} "
            numbers += f"{feed.dropped:,} dropped "
        room = width - len(numbers) - 1
        for key, what in self._hints(app, typing):
            if row.width + len(key) + len(what) + 4 > room:
                break
            row.add("  " + key, "bold ink").add(" " + what, "dim")
        lost = feed.dropped > 0
        return Picture([row.right(numbers, width, "bad" if lost else "dim").done(width)])

    def _hints(self, app: MinituiApp, typing: bool) -> list[tuple[str, str]]:
        keys = app.settings.keys
        if typing:
            if app.session is not None and app.session.busy:
                escape = [("esc", "cancel"), (key_label(keys.get("keys", BY_ID["keys"].key)), "keys")]
            else:
                escape = [("esc", "keys")]
            return [("enter", "send"), *escape, ("/", "commands"), ("tab", "complete"), ("ctrl+j", "new line")]
        there = offered(getattr(app, "FEATURES", ()))
        hints = [(key_label(keys.get(a.id, a.key)), a.footer) for a in there if a.footer]
        if app.current_mode == "chat":  # where there is little room, the ways on come first
            ways = [hint for hint in hints if hint[1] in ("inspect", "help")]
            hints = [*hints[:4], *ways, *(hint for hint in hints[4:] if hint not in ways)]
        if app.current_mode == "inspect":
            first = [("tab", "panel"), *(h for h in hints if h[1] in ("pause", "step", "help"))]
            hints = [*first, ("z", "maximise"), ("1", "chat")] + [
                h for h in hints if h not in first and h[1] not in ("write", "chats", "inspect", "fork", "new")
            ]
        if app.current_mode == "replicas":
            hints = [("up, down", "choose"), ("enter", "show its panels"), ("P", "pin"), ("U", "unpin")] + [
                h for h in hints if h[1] in ("write", "new", "chats", "help", "commands")
            ]
        if app.current_mode == "lecture":
            first = [("n", "next step"), (",", "back"), ("d", "predict"), ("p", "pause"), ("X", "start over")]
            first += [h for h in hints if h[1] == "help"]
            hints = first + [h for h in hints if h[1] in ("until", "slow motion", "replay", "commands")]
        if app.view.travel_text:
            hints.insert(0, (key_label(keys.get("now", BY_ID["now"].key)), "now"))
        if not has_chats(app):
            other = ("3", "lecture") if app.current_mode == "inspect" else ("2", "inspect")
            hints = [other if what == "chat" else (key, what) for key, what in hints if what != "replay"]
        return hints
