"""Texts that name requests: a request has its label, "#4·r5", in the colour of its chat, in all panels."""

from __future__ import annotations

import textwrap

from minitui.tui.theme import owner_style
from minitui.tui.widgets.rows import Row, Run, Runs, clean
from minitui.viewmodel.view import View
from minitui.viewmodel.words.texts import REQUEST


def named(view: View, text: str, style: str = "ink") -> list[Run]:
    """Returns a text in which requests have their labels (Texts.labelled), with the labels in their chats' colours."""
    runs: list[Run] = []
    words, on, ground = style.partition(" on ")
    bold, at = "bold " * ("bold" in words), 0
    for found in REQUEST.finditer(text):
        lane = view.history.lanes.lanes.get(int(found[2])) if found[2] else None
        if lane is not None and (colour := view.texts.colour(lane.group)) is not None:
            runs += [(text[at : found.start()], style), (found[0], bold + owner_style(colour) + on + ground)]
            at = found.end()
    return [*runs, (text[at:], style)]


def named_rows(view: View, text: str, style: str, width: int) -> list[Runs]:
    """Returns untrusted text as rows of `width` cells, as `wrapped`, with the labels of its requests."""
    lines = textwrap.wrap(clean(view.texts.labelled(text)), max(10, width))
    return [Row().extend(named(view, line, style)).done(width) for line in lines]
