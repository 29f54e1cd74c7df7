"""The colourings of the block map: by state, owner, age or reference count. Each has its own glyphs and legend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import HEAT, OWNER_COLOURS, owner_style
from minitui.tui.widgets.chat import occupancy
from minitui.tui.widgets.rows import Run, runs_width
from minitui.viewmodel.state.annotated_state import STATE_NAMES
from minitui.viewmodel.view import View

FILLING = 4  # code of an active block with free places for tokens; the other codes are in engine.trace.views
AGES = (1.0, 5.0, 15.0, 60.0, 300.0)  # limits in seconds; a block's digit is the number of limits below its age
DIGITS = "0123456789"
SIGNED = "bold on-fill"  # the style of a letter that every cell of an owner has


@dataclass(slots=True)
class Layer:
    """A colouring: a code for each block, and the glyph and style of each code."""

    codes: np.ndarray
    looks: list[tuple[str, str]]  # (glyph, style) of each code
    legend: list[list[Run]]  # entries of the legend
    glows: bool = False  # changed blocks are highlighted


def by_state(view: View) -> Layer:
    shown = view.moment.shown
    looks = [occupancy.look(code) for code in (FREE, ACTIVE, SHARED, CACHED)]
    looks.append((glyphs().filling, "active"))
    return Layer(shown.codes, looks, occupancy.entries(shown), glows=True)


def with_filling(view: View) -> np.ndarray:
    """Returns the codes of the colouring by state for cells of one block: some blocks are FILLING."""
    codes = view.moment.shown.codes.copy()
    if filling := view.moment.shown.filling():
        codes[[block for block in filling if codes[block] == ACTIVE]] = FILLING
    return codes


def by_owner(view: View) -> Layer:
    shown = view.moment.shown
    groups: dict[str, int] = {}
    requests = [request for _, request in sorted(shown.state.requests.items()) if request.table]
    group_of = [groups.setdefault(request.group, len(groups)) for request in requests]
    sizes = np.array([len(request.table) for request in requests], np.int64)
    of = np.repeat(np.array(group_of, np.int64), sizes)
    blocks = np.fromiter(chain.from_iterable(request.table for request in requests), np.int64, len(of))
    owner = np.full(shown.state.num_blocks, -1, np.int64)
    owner[blocks] = of
    owner[blocks[owner[blocks] != of]] = -2  # held by several groups
    free, cached, shared = map(occupancy.look, (FREE, CACHED, SHARED))
    looks = [free, cached, shared]
    letters = [_letter(view.texts.group_name(group), i) for group, i in groups.items()]
    held = np.bincount(owner[owner >= 0], minlength=len(groups))
    fills, taken, names = ["on-fill on owner-none"] * len(groups), set(), list(groups)
    for i in np.argsort(-held, kind="stable")[:OWNER_COLOURS].tolist():
        if names[i]:
            colour = owner_style(view.texts.colour(names[i]))
            fills[i] = f"{SIGNED if colour in taken else 'on-fill'} on {colour}"  # chats 1 and 9 have one colour
            taken.add(colour)
    looks += list(zip(letters, fills, strict=True))
    codes = np.where(owner >= 0, owner + 3, np.where(owner == -2, 2, np.where(shown.node_of > 0, 1, 0)))
    legend = [_entry(*shared, "several"), _entry(*cached, "cached"), _free()]
    for group, i in sorted(groups.items(), key=lambda item: -held[item[1]]):
        name = view.texts.group_name(group)
        # The letter already shows the number in the name.
        named = name.removeprefix("#").removeprefix(letters[i] + " ")[:16].rstrip()
        legend.append(_entry(*looks[i + 3], named or "no name"))
    return Layer(codes, looks, legend)


def by_age(view: View) -> Layer:
    shown = view.moment.shown
    older = np.searchsorted(np.array(AGES), view.moment.picture_now - shown.changed)
    codes = np.where(shown.codes == FREE, 0, (shown.codes.astype(np.int64) - 1) * HEAT + older + 1)
    ages = [(DIGITS[i], f"on-fill on {STATE_NAMES[c]}-heat-{i}") for c in (ACTIVE, SHARED, CACHED) for i in range(HEAT)]
    words = ("changed <1 s ago", "<5 s", "<15 s", "<1 min", "<5 min", "longer ago")
    legend = [*(_entry(*age, word) for age, word in zip(ages[:HEAT], words, strict=True)), _free()]
    return Layer(codes, [_free()[0], *ages], legend)


def by_refs(view: View) -> Layer:
    shown = view.moment.shown
    holders = shown.holders
    free, cached = occupancy.look(FREE), occupancy.look(CACHED)
    one, several, many = (f"on-fill on {fill}" for fill in ("active", "shared", "shared-heat-0"))
    codes = np.where(holders > 0, np.minimum(holders, 10) + 1, np.where(shown.node_of > 0, 1, 0))
    shades = [(DIGITS[i], f"on-fill on shared-heat-{max(1, HEAT + 1 - i)}") for i in range(2, 10)]
    looks = [free, cached, ("1", one), *shades, ("+", many)]
    legend = [
        _entry("1", one, "held by one request"), _entry("2-9", several, "by 2 to 9"),
        _entry("+", many, "by ten or more"), _entry(*cached, "by none: cached"), _free(),
    ]
    return Layer(codes, looks, legend)


COLOURINGS = {"state": by_state, "owner": by_owner, "age": by_age, "refcount": by_refs}


def _letter(name: str, index: int) -> str:
    """Returns one character for an owner: for the number at the start of its name, else for its index."""
    lead = name.split(" ")[0].removeprefix("#")  # the names of older recordings have no sign
    number = int(lead) if lead.isdigit() else index + 10
    return "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[number % 62]


def _entry(glyph: str, style: str, word: str) -> list[Run]:
    return [(glyph, style), (f" {word}", "dim")]


def _free() -> list[Run]:
    return _entry(*occupancy.look(FREE), "free")


def lay_out(entries: list[list[Run]], width: int, frame: int) -> tuple[list[Run], list[Run]]:
    """Returns a legend in two parts: (for a row above the map, for the frame). The frame has room for `frame` cells. If
    all entries fit into the frame, the row is empty. Otherwise the row takes as many entries as fit, and the frame
    takes the others. "+n more" counts the entries left out."""

    def taken(some: list[list[Run]], room: int) -> tuple[list[Run], list[list[Run]]]:
        runs: list[Run] = []
        for i, entry in enumerate(some):
            longer = [*runs, *([("  ", "ink")] if runs else []), *entry]
            if runs_width(longer) > room:
                return runs, some[i:]
            runs = longer
        return runs, []

    in_frame, rest = taken(entries, frame)
    if not rest:
        return [], in_frame
    above, rest = taken(entries, width)
    below, left = taken(rest, frame)
    if left:
        if frame:
            below, left = taken(rest, frame - 10)
            below = [*below, (f"{'  ' if below else ''}+{len(left)} more", "dim")]
        else:
            above, left = taken(entries, width - 10)
            above = [*above, (f"  +{len(left)} more", "dim")]
    return above, below
