"""Equal blocks while the prefix cache is off: full blocks that hold the same tokens after the same prefix.

With the cache, the tree finds such blocks, and requests share one of them.
"""

from __future__ import annotations

import itertools

from engine.core.request import Request


class Copies:
    """Gives the full blocks of requests numbers: two blocks have the same number if their texts are equal.

    The record of a block has the number and not the hash of its text, because a hash would let a viewer test guesses of
    a hidden text.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._of: dict[int, list[int]] = {}  # hash of a text -> [its number, the number of blocks that hold the text]

    def add(self, request: Request, end: int, size: int) -> list[int]:
        """Number the request's blocks up to block `end`, which are full; return the new numbers."""
        ids, prefixes = request.ids, request.prefixes
        start = len(prefixes)
        for i in range(start, end):
            prefix = hash((prefixes[-1] if i else 0, tuple(ids[i * size : (i + 1) * size])))
            prefixes.append(prefix)
            entry = self._of.get(prefix)
            if entry is None:
                entry = self._of[prefix] = [next(self._numbers), 0]
            entry[1] += 1
            request.contents.append(entry[0])
        return request.contents[start:]

    def release(self, request: Request) -> None:
        """Forget the blocks of a request."""
        for prefix in request.prefixes:
            entry = self._of[prefix]
            entry[1] -= 1
            if not entry[1]:
                del self._of[prefix]
        request.prefixes, request.contents = [], []
