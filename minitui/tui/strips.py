"""Keeps Textual and Rich from caching the lines that they draw: most lines are drawn only once.

Textual divides, crops and pads every line, and each Strip caches the results. If nothing is cut off, the result is the
strip itself. Such a strip refers to itself, so only a full garbage collection frees it. Full collections are rare here,
because each causes a visible pause. So the process would grow by megabytes per minute. Rich caches the last 16,384
segments that it cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

_divide, _crop_extend, _adjust = Strip.divide, Strip.crop_extend, Strip.adjust_cell_length
_split_cells = Segment._split_cells.__wrapped__  # without the cache


def _divide_acyclic(self: Strip, cuts: Iterable[int]) -> Sequence[Strip]:
    cuts = [cut for cut in cuts if cut <= self.cell_length]
    return [self] if cuts == [self.cell_length] else _divide(self, cuts)


def _crop_extend_acyclic(self: Strip, start: int, end: int, style: Style | None) -> Strip:
    return self if start == 0 and end == self.cell_length else _crop_extend(self, start, end, style)


def _adjust_acyclic(self: Strip, cell_length: int, style: Style | None = None) -> Strip:
    return self if cell_length == self.cell_length else _adjust(self, cell_length, style)


def keep_no_lines() -> None:
    """Replace caching methods of Strip and Segment by methods with the same results."""
    setattr(Segment, "_split_cells", classmethod(_split_cells))  # noqa: B010  (mypy allows no assignment here)
    Strip.divide, Strip.crop_extend, Strip.adjust_cell_length = (  # type: ignore[method-assign]
        _divide_acyclic, _crop_extend_acyclic, _adjust_acyclic,
    )  # fmt: skip
