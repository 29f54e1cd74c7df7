"""The tabs of the chats. A tab has the chat's number, its title and its state."""

from __future__ import annotations

from minitui.chat.conversation import Session
from minitui.text import ordinal
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import owner_style
from minitui.tui.widgets.bars import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row, Run, cells, clip, runs_width
from minitui.viewmodel.view import View

MIN_LETTERS = 10  # minimum letters of a title: fewer would not identify the chat
CURRENT_MIN_LETTERS = 18  # minimum letters of the current chat's title
NEW_CELLS = 8  # cells for "+ new"
MORE_CELLS = 20  # cells for "N more" at both ends


class SessionTabs(Bar):
    """Shows the tab of the current chat, and the tabs beside it that fit. The last tab opens a new chat."""

    def picture(self, view: View, width: int, height: int) -> Picture:
        sessions = self.app.chats.sessions
        states = [self._state(session) for session in sessions]
        entries = list(zip(sessions, self._entries(sessions, states, width - NEW_CELLS), strict=True))
        current = self._current(sessions)
        first = current
        sizes = [runs_width(runs) + 1 for _, runs in entries]
        room = width - NEW_CELLS - (0 if sum(sizes) <= width - NEW_CELLS else MORE_CELLS)
        used = sizes[current] if sizes else 0
        last = current + 1
        while True:  # add tabs at the left first, then at the right, so that tabs keep their places
            if first > 0 and used + sizes[first - 1] <= room:
                first -= 1
                used += sizes[first]
            elif last < len(entries) and used + sizes[last] <= room:
                used += sizes[last]
                last += 1
            else:
                break
        row = Row(" ")
        places: list[tuple[int, int, Session | str]] = []
        if first:
            row.add(f"{first} more {glyphs().middot} ", "dim")
        for session, runs in entries[first:last]:
            start = row.width
            row.extend(runs).add(" ")
            places.append((start, row.width, session))
        if last < len(entries):
            row.add(f"{glyphs().middot} {len(entries) - last} more ", "dim")
        start = row.width
        row.add("+ new", "dim")
        self.places = [*places, (start, row.width, "new")]
        return Picture([row.done(width)])

    def _entries(self, sessions: list[Session], states: list[tuple[str, str]], room: int) -> list[list[Run]]:
        """Returns the runs of each tab. All titles are cut to the same number of letters, as many as fit in `room`. If
        fewer than MIN_LETTERS would fit, only the current chat shows its state as text; the others show one sign. If
        there is still no room, only the current chat and the chats beside it have titles; the rest show a number and a
        sign."""
        titles = [cells(session.title) for session in sessions]
        numbers = sum(len(str(i + 1)) + 4 for i in range(len(sessions)))  # cells, with sign and spaces
        current = self._current(sessions)
        signs = [state if i == current else (_sign(*state), state[1]) for i, state in enumerate(states)]
        for shown in (states, signs):
            left = room - numbers - sum(cells(state) + 1 for state, _ in shown if state)
            for letters in range(max(titles, default=0), MIN_LETTERS - 1, -1):
                if sum(min(title, letters) + 1 for title in titles) <= left:
                    return [self._entry(s, state, letters) for s, state in zip(sessions, shown, strict=True)]
        letters_of = [0] * len(sessions)
        letters_of[current] = min(titles[current], max(CURRENT_MIN_LETTERS, left - 1))
        left -= letters_of[current] + 1
        for i in sorted(range(len(sessions)), key=lambda i: abs(i - current)):
            if i != current and left > MIN_LETTERS:
                letters_of[i] = min(titles[i], left - 1)
                left -= letters_of[i] + 1
        return [self._entry(*tab) for tab in zip(sessions, signs, letters_of, strict=True)]

    def _current(self, sessions: list[Session]) -> int:
        return next((i for i, session in enumerate(sessions) if session is self.app.session), 0)

    def _entry(self, session: Session, state_and_tone: tuple[str, str], letters: int) -> list[Run]:
        current = session is self.app.session
        ground = " on empty-chip" if current else ""
        title = f"{clip(session.title, letters)} " if letters else ""
        number = self.app.chats.number(session)
        runs: list[Run] = [
            (f" #{number} ", ("bold " if current else "") + owner_style(number - 1) + ground),
            (title, ("bold ink" if current else "dim") + ground),
        ]
        state, tone = state_and_tone
        if state:
            runs.append((state + " ", tone + ground))
        return runs

    def _state(self, session: Session) -> tuple[str, str]:
        """Returns (the chat's state as text, the style of this text)."""
        app = self.app
        g = glyphs()
        if session.state == "queued" or (session.state == "running" and not session.messages[-1].text):
            place = app.queue_place(session)
            if not app.source.info:
                return "waits for the engine", "waiting"
            state = "queued" if place is None else f"waiting, {ordinal(place)}" if place else "prefill"
            return state, "waiting"
        if session.state == "running":
            # In slow motion, tokens arrive more slowly, but the full rate is shown. A paused engine has no rate.
            pace = app.pace_of(session)
            rate = 0.0 if app.gated else session.rate(window=max(1.0, pace / 5)) * pace
            return f"{g.folded} {rate:,.0f} tok/s" if rate else g.folded, "decode"
        return {
            "done": (g.right, "good"),
            "cancelled": (g.preempted, "waiting"),
            "error": ("!", "bad"),
        }.get(session.state, ("", "dim"))

    def clicked(self, view: View, column: int, row: int) -> None:
        chosen = self.thing_at(column)
        if isinstance(chosen, Session):
            self.app.select_session(chosen)
        elif chosen is not None:
            self.call_later(self.app.run_action, "do('new')")


def _sign(state: str, tone: str) -> str:
    """Returns the state as one sign, without the chat's speed or its place in the queue."""
    return glyphs().middot if tone == "waiting" and len(state) > 1 else state[:1]
