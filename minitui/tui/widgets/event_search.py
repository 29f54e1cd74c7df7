"""The search in the texts of events."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from minitui.viewmodel.history.events import EVENTS_KEPT, KINDS, Event
from minitui.viewmodel.view import View

REQUEST = re.compile(r"r(\d+)")
SCANNED = 2_000  # events whose text is searched in one picture; the next pictures search the others


class Search:
    """The events that contain every word of a query: "r12" names a request, "evict" a kind, other words a text.

    Reading all texts would take a second, so each call of `update` reads at most SCANNED of them.
    """

    def __init__(self, query: str, filter: Callable[[Event], bool]) -> None:
        self._words = query.lower().split()
        self._filter = filter
        self._found: set[int] = set()  # seqs
        self._newest = -1  # seqs of the newest and the oldest event that were read
        self._oldest = sys.maxsize
        self.finished = False

    def update(self, view: View) -> None:
        """Read the new events, and some of the old ones."""
        read, newest = 0, self._newest
        for event in view.history.events.newest_first():
            if event.seq <= newest and (self.finished or event.seq >= self._oldest):
                if self.finished:
                    break
                continue
            if event.seq < self._oldest or newest < 0:
                read += 1
                if read > SCANNED:
                    break
                self._oldest = event.seq
            self._newest = max(self._newest, event.seq)
            if self._filter(event) and self._matches(view, event):
                self._found.add(event.seq)
        else:
            self.finished = True
        if len(self._found) > 2 * EVENTS_KEPT:
            self._found = {event.seq for event in view.history.events.newest_first() if event.seq in self._found}

    def _matches(self, view: View, event: Event) -> bool:
        text = ""
        for word in self._words:
            request = REQUEST.fullmatch(word)
            if request is not None:
                if event.request != int(request[1]):
                    return False
            elif word in KINDS:
                if event.kind != word:
                    return False
            else:
                lane = view.history.lanes.lanes.get(event.request)
                chat = view.texts.group_name(lane.group) if lane is not None else ""
                text = text or f"{event.kind} {view.texts.event(view.history, event)} {chat}"
                if word not in text.lower():
                    return False
        return True

    def __call__(self, event: Event) -> bool:
        return event.seq in self._found
