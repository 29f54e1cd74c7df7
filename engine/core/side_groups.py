"""The side groups of a model with several kinds of memory (engine/trace/side_pool.py): who gets their pages and slots.

A hit is the longest prefix that every group can serve: full attention needs all blocks of the prefix, a window the
pages of its last tokens, and a recurrent state a checkpoint after its last token. So both kinds of side group answer
the same questions: which prefix they can serve, which pages a step needs, and what a request may drop.

A request drops a page when it plans a step that does not need it. A later step may write the page at once, because the
device runs steps in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.request import Request
from engine.trace.records import RecordLog
from engine.trace.side_pool import NULL, OWN, SideGroup, SidePool, window_pages

# row << 32 | column -> page, not yet sent to the device's copy of a block table. numpy reads numbers faster than pairs.
Changes = dict[int, int]


class Side:
    """The pool of one side group, number `index`, and what both kinds of group have in common."""

    def __init__(self, index: int, group: SideGroup, block_size: int, log: RecordLog) -> None:
        self.index, self.group, self.block_size = index, group, block_size
        self.pool = SidePool(group)
        self._log = log

    def held(self, request: Request) -> dict[int, int]:
        """Returns the request's pages in this group."""
        return request.side[self.index]

    def keep_published(self, request: Request) -> None:
        """Let the tree keep the request's pages for the blocks that it has published, where the tree has none yet."""
        kept, block_of, table, shared = self.pool.kept, self.pool.block_of, request.table, request.shared_blocks
        pairs = [
            (table[place], page) for place, page in self.held(request).items()
            if 0 <= place < shared and table[place] not in kept and page not in block_of
        ]
        if pairs:
            self.pool.keep(pairs)
            self._log.append("keep", self.index, request.id, pairs)

    def release(self, request: Request) -> None:
        """Release all pages of a request; the record of its end or preemption says so."""
        self.pool.release(self.held(request).values())
        self.held(request).clear()

    def _take(self, request: Request, places: Sequence[int]) -> bool:
        """Take a page for each place, with evictions if necessary. Returns False, and takes none, if too few exist."""
        missing = len(places) - len(self.pool.free)
        if missing > len(self.pool.idle):
            return False
        if missing > 0:
            self._evict(missing, f"r{request.id} needs {len(places)}")
        pages = list(zip(places, self.pool.take(len(places)), strict=True))
        self.held(request).update(pages)
        self._log.append("take", self.index, request.id, pages)
        return True

    def _evict(self, n: int, reason: str) -> int:
        pages = self.pool.next_idle(n)
        if pages:
            self.pool.evict(pages)
            self._log.append("lose", self.index, pages, reason)
        return len(pages)

    def clear(self, reason: str) -> int:
        """Evict all idle pages; return their number."""
        return self._evict(len(self.pool.idle), reason)

    def _borrow(self, request: Request, places: Iterable[int]) -> None:
        """Hold what the tree keeps for these blocks of the request."""
        pages = [(place, self.pool.kept[request.table[place]]) for place in places]
        self.pool.hold(page for _, page in pages)
        self.held(request).update(pages)
        self._log.append("borrow", self.index, request.id, pages)

    def _drop(self, request: Request, places: list[int], soon: bool = False) -> None:
        if places:
            held = self.held(request)
            self.pool.release([held.pop(place) for place in places], soon)
            self._log.append("drop", self.index, request.id, places, soon)


class Window(Side):
    """A group of layers that see only the last tokens. A request has the pages of consecutive blocks."""

    def __init__(self, index: int, group: SideGroup, block_size: int, log: RecordLog) -> None:
        super().__init__(index, group, block_size, log)
        self.changes: Changes = {}

    def serves(self, blocks: list[int], most: int) -> int:
        """Returns the largest number of `blocks`, up to `most`, after which a request can go on."""
        kept = self.pool.kept
        while most > 0:
            first = self.group.first_page(most * self.block_size, self.block_size)
            hole = next((i for i in range(most - 1, first - 1, -1) if blocks[i] not in kept), None)
            if hole is None:
                break
            most = hole
        return most

    def needs(self, tokens: int) -> int:
        """Returns how many pages a request with this many tokens takes at most between two steps, and one to go on."""
        return min(-(-tokens // self.block_size), window_pages(self.group.window, self.block_size))

    def make_room(self, request: Request, start: int, end: int) -> bool:
        """Drop what the tokens from `start` on do not see. Returns False if the pages up to `end` are not available."""
        first, held = self.group.first_page(start, self.block_size), self.held(request)
        self._drop(request, [place for place in held if place < first])
        return len(self._missing(request, start, end)) <= self.pool.available

    def grow(self, request: Request, start: int, end: int) -> None:
        """Take the pages of the tokens up to `end`, which `make_room` found available."""
        places = self._missing(request, start, end)
        if places and self._take(request, places):
            self._changed(request, places)

    def _missing(self, request: Request, start: int, end: int) -> range:
        return range(self._next(request, start), -(-end // self.block_size))

    def _next(self, request: Request, start: int) -> int:
        """Returns the first block behind the request's pages. `start`: its next token, if it has no pages."""
        held = self.held(request)
        return next(reversed(held)) + 1 if held else self.group.first_page(start, self.block_size)

    def room(self, request: Request) -> int:
        """Returns up to which token the request can grow."""
        return (self._next(request, request.planned) + self.pool.available) * self.block_size

    def resume(self, request: Request, blocks: int) -> None:
        """Take what a hit of `blocks` blocks has, instead of the request's own pages."""
        self._drop(request, list(self.held(request)))
        places = range(self.group.first_page(blocks * self.block_size, self.block_size), blocks)
        self._borrow(request, places)
        self._changed(request, places)

    def _changed(self, request: Request, places: Iterable[int]) -> None:
        held, row = self.held(request), request.row << 32
        self.changes.update({row | place: held[place] for place in places})

    def resend(self, request: Request) -> None:
        """Send the request's whole table to the device with the next plan."""
        self._changed(request, self.held(request))


class States(Side):
    """The group of layers with recurrent states.

    A request has one slot of its own, at OWN, and checkpoints at the places of the blocks after which they were made.
    A checkpoint costs no copy: the step that reaches the end of the block writes its state there instead of to the own
    slot, and the next step reads it there. `Request.state_at` is the place of its newest state.

    Checkpoints are made at multiples of `interval` tokens, at the end of a prompt's last full block, where its hit in
    full attention ended (others share the prompt up to there), and after every block of a reply. Those of a reply are
    given up as the next ones are made, except at multiples of `interval`.
    """

    def __init__(self, index: int, group: SideGroup, block_size: int, log: RecordLog, interval: int) -> None:
        super().__init__(index, group, block_size, log)
        self._interval = max(1, interval // block_size) * block_size

    def serves(self, blocks: list[int], most: int) -> int:
        """As Window.serves. A step cannot read a checkpoint that it writes: checkpoints are kept once the whole step is
        planned."""
        kept = self.pool.kept
        while most > 0 and blocks[most - 1] not in kept:
            most -= 1
        return most

    def needs(self, tokens: int) -> int:
        """Returns how many slots an admission needs: its own, and the checkpoint that it reads."""
        return 1 + (tokens > self.block_size)

    def make_room(self, request: Request, start: int, end: int) -> bool:
        """Returns False if the request has no slot of its own and none is available."""
        return OWN in self.held(request) or self.pool.available > 0

    def grow(self, request: Request, start: int, end: int) -> None:
        """Take the request's own slot, if it has none."""
        if OWN not in self.held(request):
            self._take(request, [OWN])

    def room(self, request: Request) -> int:
        """A state has the same size after any number of tokens."""
        return request.max_total

    def resume(self, request: Request, blocks: int) -> None:
        """Begin from the checkpoint after `blocks` blocks."""
        self._drop(request, [place for place in self.held(request) if place != OWN])
        self._borrow(request, [blocks - 1])
        request.state_at = blocks - 1

    def slots_for_drafts(self, request: Request, most: int) -> int:
        """Take the slots of the states after each draft; return how many of `most` drafts have one."""
        held = self.held(request)
        for i in range(1, most + 1):
            if OWN - i not in held and not self._take(request, [OWN - i]):
                return i - 1
        return most

    def segments(
        self, request: Request, start: int, n: int, drafted: bool, caching: bool
    ) -> list[tuple[int, int, int]]:
        """Returns [(tokens, source, target)] for the tokens [start, start + n) that a step computes. Each segment
        begins with the state in the slot `source`, and leaves the state after its tokens in `target`."""
        held, at, size = self.held(request), request.state_at, self.block_size
        done = [place for place in held if 0 <= place < request.shared_blocks and place != at]
        lasting = [place for place in done if self._lasts(request, (place + 1) * size)]
        self._drop(request, lasting)
        self._drop(request, [place for place in done if place not in lasting], soon=True)
        places: list[tuple[int, int]] = []  # (end, place) of each segment
        for end in range(start + 1, start + n + 1) if drafted else self._ends(request, start, start + n):
            place = end // size - 1
            if caching and end % size == 0 and (place in held or self._take(request, [place])):
                places.append((end, place))
            elif drafted:
                places.append((end, OWN - (end - start - 1)))
        if not places or places[-1][0] < start + n:
            places.append((start + n, OWN))
        if drafted:
            request.draft_places = [place for _, place in places]
        segments, source, begin = [], held[at] if start else NULL, start
        for end, place in places:
            segments.append((end - begin, source, held[place]))
            source, begin = held[place], end
        request.state_at = places[-1][1]
        if caching:
            self.keep_published(request)
        return segments

    def _ends(self, request: Request, start: int, end: int) -> list[int]:
        """Returns where the tokens [start, end) have checkpoints, ascending."""
        size = self.block_size
        if end - start == 1:
            return [end] if end % size == 0 else []
        step = self._interval
        ends = {*range(start // step * step + step, end + 1, step)}
        ends |= {(len(request.ids) - 1) // size * size, request.branch}
        return sorted(each for each in ends if start < each <= end)

    def _lasts(self, request: Request, end: int) -> bool:
        return end % self._interval == 0 or end <= request.prompt_len


def make_sides(groups: Iterable[SideGroup], block_size: int, log: RecordLog, interval: int) -> list[Window | States]:
    """Returns the pools of the groups; the groups of windows come first."""
    return [
        States(i, group, block_size, log, interval) if group.kind == "state" else Window(i, group, block_size, log)
        for i, group in enumerate(groups)
    ]
