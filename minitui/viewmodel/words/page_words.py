"""The records about the pages and slots of side groups as sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.trace.side_pool import SideGroup
from minitui.text import count, ranges
from minitui.viewmodel.history.events import PAGES
from minitui.viewmodel.state.side_groups import place_words, unit

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
