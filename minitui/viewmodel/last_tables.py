"""The block tables of finished requests: for each group (a chat, for example), that of its last request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GROUPS_KEPT = 512
LAST_BLOCKS_KEPT = 4_000_000  # blocks in all kept tables together


@dataclass(frozen=True, slots=True)
class LastTable:
    """The block table of the last request of a group, when this request finished (record `seq`)."""

    request: int
    table: list[int]
    computed: int
    seq: int


class LastTables:
    """The last tables by group. If there are too many, those of the requests that finished first are forgotten."""

    def __init__(self) -> None:
        self._tables: dict[str, LastTable] = {}  # in the order in which the requests finished
        self._blocks = 0  # in all tables

    def __iter__(self) -> Iterator[LastTable]:
        return iter(self._tables.values())

    def get(self, group: str) -> LastTable | None:
        return self._tables.get(group)

    def add(self, group: str, last: LastTable) -> None:
        self._forget(group)  # so that the new entry becomes the last
        self._tables[group] = last
        self._blocks += len(last.table)
        while len(self._tables) > GROUPS_KEPT or self._blocks > LAST_BLOCKS_KEPT:
            self._forget(next(iter(self._tables)))

    def copy(self) -> LastTables:
        other = LastTables()
        other._tables, other._blocks = dict(self._tables), self._blocks
        return other

    def _forget(self, group: str) -> None:
        last = self._tables.pop(group, None)
        if last is not None:
            self._blocks -= len(last.table)
