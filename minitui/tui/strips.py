"""Keeps Textual from storing a Strip in a cache of its own.

Textual divides, crops and pads every line that it draws, and each Strip caches the results. If nothing is cut off, the
result is the strip itself. Such a strip refers to itself, so it is freed by a full garbage collection only, and these
are rare here (each is a visible pause): the process would grow by megabytes a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.style import Style
from textual.strip import Strip

_divide, _crop_extend, _adjust = Strip.divide, Strip.crop_extend, Strip.adjust_cell_length


def _divide_acyclic(self: Strip, cuts: Iterable[int]) -> Sequence[Strip]:
    cuts = [cut for cut in cuts if cut <= self.cell_length]
    return [self] if cuts == [self.cell_length] else _divide(self, cuts)


def _crop_extend_acyclic(self: Strip, start: int, end: int, style: Style | None) -> Strip:
    return self if start == 0 and end == self.cell_length else _crop_extend(self, start, end, style)


def _adjust_acyclic(self: Strip, cell_length: int, style: Style | None = None) -> Strip:
    return self if cell_length == self.cell_length else _adjust(self, cell_length, style)


def keep_strips_acyclic() -> None:
    """Replace the three methods; their results stay the same."""
    Strip.divide, Strip.crop_extend, Strip.adjust_cell_length = (  # type: ignore[method-assign]
        _divide_acyclic, _crop_extend_acyclic, _adjust_acyclic,
    )  # fmt: skip
