"""The texts of a view: of tokens, the names of chats, and events as sentences."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

from engine.trace.eviction import RECORDED_POLICIES
from engine.trace.side_pool import SideGroup
from minitui.text import count, ranges
from minitui.viewmodel.explain.cut_hits import CUT, why_ended
from minitui.viewmodel.history.events import PAGES, Event, describe
from minitui.viewmodel.history.history import History
from minitui.viewmodel.state.side_groups import place_words, unit
from minitui.viewmodel.state.tree import is_hidden, quoted, without_markup

QUOTE_WIDTH = 28
# Names of chats: "#4 long notes"; "4 long notes" in older recordings. Names of users: "user 53".
_NUMBERED = re.compile(r"(?:(#)?|user )(\d{1,6})(?: |$)")
REQUEST = re.compile(r"“.*?(?:”|$)|(?<![\w·#])(#\d{1,6}·)?r(\d{1,9})\b")  # what is quoted names no request
EVENTS_KEPT = 2000  # sentences


class Texts:
    """`ids_to_text`: the tokenizer; None: not known yet. `group_names`: the titles of chats by their groups."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.ids_to_text: Callable[[list[int]], str] | None = None
        self.group_names: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the sentences: the history was reset."""
        self._events: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; without a tokenizer, the ids as numbers."""
        if self.ids_to_text is None:
            return " ".join(map(str, ids))
        return self.ids_to_text(list(ids))

    def group_name(self, group: str) -> str:
        return self.group_names.get(group, group)

    def request(self, id: int) -> str:
        """Returns the label of a request in all panels: "#4·r5" for one of chat #4; "r5" if its chat has no number."""
        lane = self.history.lanes.lanes.get(id)
        found = _NUMBERED.match(self.group_name(lane.request.group)) if lane is not None else None
        return f"#{found[2]}·r{id}" if found and found[1] else f"r{id}"

    def labelled(self, text: str) -> str:
        """Returns a text about requests, "r5 takes 96 tokens", with their labels: "#4·r5 takes 96 tokens"."""
        return REQUEST.sub(lambda found: self.request(int(found[2])) if found[2] and not found[1] else found[0], text)

    def title(self, group: str) -> str:
        """Returns the name of a chat without the number that the labels of its requests have."""
        name = self.group_name(group)
        found = _NUMBERED.match(name)
        return name[found.end() :] if found and found[1] else name

    def colour(self, group: str) -> int | None:
        """Returns the number of a chat's colour in all panels; None: the request belongs to no chat."""
        found = _NUMBERED.match(self.group_name(group))
        return (int(found[2]) - 1 if found else crc32(group.encode())) if group else None

    def evicted(self, ids: bytes, most: int = QUOTE_WIDTH) -> str:
        """Returns the beginning of an evicted text, of which these are the first token ids; empty: not readable."""
        found = array("i", ids)
        return "" if not ids or is_hidden(found, self.decode) else quoted(without_markup(self.decode(found)), most)

    def event(self, event: Event, short: bool = False) -> str:
        """Returns the event as a sentence, or in few words for narrow panels if `short`."""
        if event.kind == "refuse" and event.record.group:  # a refused request has no number: name its chat
            return f"chat {self.group_name(event.record.group)} · {event.record.reason}"
        history = self.history
        if event.kind in PAGES:
            state, record = history.live.state, event.record
            return page_event(record, state.groups[record.group].group, state.block_size, short)
        lane = history.lanes.lanes.get(event.request)
        if short:
            return describe(event, lane, short=True)
        words = self._events.get(event.seq)
        if words is None:
            if len(self._events) > EVENTS_KEPT:
                self._events.clear()
            if event.kind == "finish" and lane is not None:
                stats = history.tokens.stats(lane, lane.finish_step)
                words = describe(event, lane, tok_s=None if stats is None else stats.tok_s)
                if lane.finish_step > history.steps.committed:  # its last token has no time yet
                    return words
            elif event.kind == "hit" and event.record.stop in CUT:
                record = event.record
                why = why_ended(history, lane, record.stop, record.at, record.tokens, record.detail)
                return describe(event, lane, why=why)  # not kept: the time is known when its prefill ends
            else:
                order = RECORDED_POLICIES[history.live.state.eviction_policy].words
                words = describe(event, lane, self.evicted(event.evicted), order=order)
            self._events[event.seq] = words
        return words


DONE = dict(zip(PAGES, ("taken", "read from the tree", "released", "kept for later prompts", "evicted"), strict=True))


def page_event(record: Any, group: SideGroup, size: int, short: bool = False) -> str:
    """Returns one of these records as a sentence; in few words if `short`. `size`: tokens of a block."""
    kind, of = record.kind, f"of {group.name}"
    items = record.places if kind == "drop" else record.pages
    what = count(len(items), unit(group))
    if short or kind == "lose":
        who = "" if kind == "lose" else f"r{record.request} "
        why = f" · {record.reason}" if kind == "lose" else ""
        return f"{who}{what} {of} {DONE[kind]}{why}"
    name = f"r{record.request}"
    if kind == "drop":
        why = "behind its window" if group.kind == "window" else "later states replaced them"
        soon = ", which are evicted first" if record.soon else ""
        return f"{name} releases {what} {of}{soon} · {why}: {_places(group, items, size)}"
    if kind == "keep":
        return f"the tree keeps {what} {of} for later prompts · computed by {name}: {ranges([p for _, p in items])}"
    verb = {"take": "takes", "borrow": "begins from"}[kind]
    kept = " that the tree kept" if kind == "borrow" else ""
    return f"{name} {verb} {what} {of}{kept} · {_places(group, [place for place, _ in items], size)}"


def _places(group: SideGroup, places: list[int], size: int) -> str:
    first = place_words(group, places[0], size)
    if group.kind == "window":
        return f"tokens {min(places) * size:,} to {(max(places) + 1) * size - 1:,}"
    return first if len(places) == 1 else f"{first} and {len(places) - 1} more"


def page_sentences(records: Iterable[Any], groups: list[SideGroup]) -> list[str]:
    """Returns a sentence for each group with what happened to its pages in a step."""
    counts: dict[int, dict[str, int]] = {}
    for record in records:
        of_kind = counts.setdefault(record.group, dict.fromkeys(PAGES, 0))
        of_kind[record.kind] += len(record.places if record.kind == "drop" else record.pages)
    sentences = []
    for index, of_kind in sorted(counts.items()):
        group = groups[index]
        parts = [f"{count(n, unit(group))} {DONE[kind]}" for kind, n in of_kind.items() if n]
        sentences.append(f"{group.name[0].upper()}{group.name[1:]}: {', '.join(parts)}.")
    return sentences
