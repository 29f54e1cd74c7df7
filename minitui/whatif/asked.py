"""What was asked in a recording: the arrivals, lengths and contents of its requests.

A record of a request tells its length. Its contents are in the tree: the texts of all its full blocks. The last tokens,
which fill no block, are not recorded; they get numbers that no other request has, so that nothing shares them. Without
a prefix cache the records number equal blocks (`full`), and these numbers stand for the texts. With hidden texts every
token has the same id: then two requests have the same text if they hold the same block.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from engine.errors import EngineError
from engine.trace.kind import Reader, Record, kind_of, named
from engine.trace.state import State
from engine.trace.views import ACTIVE, SHARED, RequestView
from minitui.trace.play_clock import PlayClock
from minitui.trace.reader import TraceReader
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.history.tokens import TokenTimes

UNKNOWN = 1 << 26  # ids from here on stand for tokens that the recording does not tell


@dataclass(slots=True)
class Asked:
    """One request. `at`, `ended`: seconds of the engine's working time since the recording began; None: not known.
    `reply`: its tokens. `most`: of prompt and reply. `reason`: as in the record `finish`; "open": it had not ended."""

    id: int
    group: str
    prompt: int
    most: int
    at: float
    reply: int = 0
    reason: str = "length"
    ended: float | None = None
    salt: int = 0
    priority: int = 0
    recorded_salt: int = 0
    known: array[int] = field(default_factory=lambda: array("i"))  # the ids at its beginning
    before: int = 0  # tokens with KV when the recording began, of a request that had been admitted before
    after: Asked | None = None  # the request of the same chat whose answer came before it
    cached: int = 0  # tokens of the prompt that came from the cache
    match: tuple[str, int, str] = ("", 0, "")  # as in the record `match`; "" if it was not admitted
    at_step: int = -1  # the last step planned when it came
    ended_step: int = -1

    @property
    def total(self) -> int:
        return self.prompt + self.reply

    @property
    def thought(self) -> float:
        """Seconds between the answer before it in its chat and this question; 0 if no step began between both."""
        assert self.after is not None and self.after.ended is not None
        return self.at - self.after.ended if self.at_step > self.after.ended_step else 0.0


@dataclass(slots=True)
class Recorded:
    """The requests of a recording in the order of their arrival. `warm`: texts that were cached at the beginning, the
    one used last at the end, each with its salt. `lanes`, `tokens` (their arrivals) and `evicted` (blocks) are known if
    no records are missing. `notes`: sentences about what the recording does not tell."""

    requests: list[Asked]
    warm: list[tuple[array[int], int]]
    block_size: int
    hidden: bool  # the ids stand for texts, and are no tokens: drafts cannot be made from them
    steps: Steps  # the last ones
    notes: list[str]
    unknown: int  # the first id that no text has
    lanes: Lanes | None = None
    tokens: TokenTimes | None = None
    evicted: int = 0  # blocks
    sides: bool = False  # the model has windows or recurrent states, which are not played

    def ids(self, asked: Asked, unknown: Iterator[int]) -> list[int]:
        """Returns the ids of a prompt and its reply; `unknown`: ids for the tokens that are not known."""
        known = asked.known[: asked.total].tolist()
        return known + list(itertools.islice(unknown, asked.total - len(known)))


Kept = Iterable[tuple[dict[str, Any] | None, Iterable[Record]]]
"""Records in order, in pieces. A snapshot comes where records are missing before it, and with the first piece."""


def asked_in(reader: TraceReader) -> Recorded:
    """Returns what was asked in a recording. Raises TraceError if a part of the file cannot be read, and EngineError if
    it has no requests."""
    info = reader.header["info"]
    parts = ((None if missing is None else part.snapshot, part.records) for part, missing in reader.parts(True))
    kept, first = itertools.tee(parts)
    hidden = hides_texts(first)
    del first  # else all parts stay in memory
    recorded = asked_of(kept, hidden, exact=not info.engine and not info.overlap)
    if not recorded.requests:
        raise EngineError("the recording has no requests: record, or watch a server, while some run")
    return recorded


def asked_of(kept: Kept, hidden: bool, exact: bool) -> Recorded:
    """Returns what was asked in these records. `exact`: the engine is minitui's, and its steps do not overlap."""
    taken: dict[int, Asked] = {}
    steps = Steps()
    folding: _Folding | None = None
    warm: list[tuple[array[int], int]] = []
    gaps = -1
    for snapshot, records in kept:
        if snapshot is not None:
            base = 0.0
            if folding is not None:
                folding.close()
                base = folding.clock.now
            gaps += 1
            folding = _Folding(State.from_snapshot(snapshot), steps, base, taken, hidden, exact)
            warm = warm if gaps else folding.cached()
        assert folding is not None
        for record in records:
            folding.take(record)
    assert folding is not None
    folding.close()
    requests = sorted(taken.values(), key=lambda one: (one.at, one.id))
    _find_chats(requests, folding.state.block_size)
    if any(one.recorded_salt for one in requests):
        for one in requests:
            one.salt = one.recorded_salt
    notes = []
    if gaps:
        notes.append(f"records are missing in {gaps} places: requests that arrived there are left out")
    if folding.state.groups:
        notes.append(
            "windows and recurrent states are not played: with them, a hit can be shorter. So the run beside is no "
            "recorded one, but the recorded setting, played in the same way"
        )
    if hidden:
        notes.append("texts are hidden: what was evicted and computed again counts as another text")
    unknown = UNKNOWN + folding.numbered
    recorded = Recorded(requests, warm, folding.state.block_size, hidden, steps, notes, unknown)
    recorded.sides = bool(folding.state.groups)
    if not gaps:
        recorded.lanes, recorded.tokens, recorded.evicted = folding.lanes, folding.tokens, folding.evicted
    return recorded


def hides_texts(kept: Kept) -> bool:
    """Returns True if the ids of the first texts are no tokens: all are equal, or there are none."""
    seen: set[int] = set()
    for snapshot, records in kept:
        for view in snapshot["nodes"].values() if snapshot is not None else ():
            seen.update(view["ids"])
        for record in records:
            if len(seen) > 1:
                return False
            if kind_of(record) in ("insert", "extend"):
                seen.update(named(record).ids)
    return len(seen) <= 1


TIMED = Steps.READS.keys() | Lanes.READS.keys()  # the kinds of records whose time counts


class _Folding(Reader):
    """Folds records, and takes what each request asked from the state before it loses its blocks."""

    def __init__(
        self, state: State, steps: Steps, base: float, taken: dict[int, Asked], hidden: bool, exact: bool
    ) -> None:
        self.state, self.taken, self._steps, self._exact = state, taken, steps, exact
        self.lanes = Lanes()
        self.tokens = TokenTimes(steps, self.lanes)
        self.lanes.step = state.step
        steps.adopt(state)
        self.clock = PlayClock(state.t, base, state, pause=0.0, idle=inf)
        self._salts: dict[int, int] = {}  # the first block of a text -> its salt
        self._hidden = hidden
        self._texts: dict[int, int] = {}  # with hidden texts: block -> the number of its text
        self.numbered = 1
        self.evicted = 0  # blocks
        self._together: list[Asked] = []
        self._waiting = False  # the engine was idle, and has not planned a step since
        for view in state.requests.values():
            self._note(view, base, 0 if view.state == "waiting" else max(1, state.computed(view)))
            self.lanes.adopt(view, state.computed(view))
        if hidden:
            for node in state.nodes.values():
                self._number(node.blocks)
        self._started = state.t > 0

    def take(self, record: Record) -> None:
        if not self._started:
            self._started = True
            self.clock._t = record[1]  # the snapshot before the first record has no time
        kind = kind_of(record)
        if kind in TIMED:
            self.clock.advance(record)
            if kind == "step":
                self.tokens.before_step(named(record).step)
            self._steps.read(record)
            self.lanes.read_at(record, self.clock.now)
        self.read(record)
        self.state.apply(record)
        if kind == "submit":
            self._waiting |= len(self.state.requests) == 1
            submitted = named(record)
            view = self.state.requests[submitted.request]
            self.lanes.submit(view)
            one = self._note(view, self.clock.now)
            one.priority, one.recorded_salt = submitted.priority, submitted.salt
            if self._waiting:
                self._together.append(one)

    def cached(self) -> list[tuple[array[int], int]]:
        """Returns the cached texts that no longer text contains, the one used last at the end."""
        nodes = self.state.nodes
        leaves = sorted((node for node in nodes.values() if node.id and not node.children), key=lambda n: n.last_used)
        return [self._text(leaf.id) for leaf in leaves]

    def close(self) -> None:
        """Take what is known about the requests that have not finished."""
        for view in self.state.requests.values():
            one = self.taken[view.id]
            self._look(view)
            one.reply = max(one.reply, self.state.computed(view) + 1 - view.prompt_tokens, 1)
            one.reason = "open"

    # ---- records, before they change the state

    def on_finish(self, kind: str, request: int, reason: str, output_tokens: int) -> None:
        self.on_preempt(kind, request)
        view, one = self.state.requests[request], self.taken[request]
        one.ended, one.ended_step, one.reason = self.clock.now, self.state.step, reason
        # Tokens after a stop string were drawn, and are not in the reply. With overlap nothing tells how many.
        drawn = max(output_tokens, self.state.computed(view) + 1 - view.prompt_tokens if self._exact else 0)
        one.reply = min(drawn, view.max_total - view.prompt_tokens)

    def on_preempt(self, kind: str, request: int) -> None:
        view = self.state.requests[request]
        self._look(view)
        self.lanes.release(kind, request, self.state.computed(view), len(view.table), self._steps.committed)

    on_requeue = on_preempt

    def on_time(self, step: int) -> None:
        self.lanes.ended_step = step

    def on_fail(self, step: int) -> None:
        self.lanes.ended_step = step - 1

    def on_step(self, step: int) -> None:
        state = self.state
        self._steps.note_in_use(step, (state.counts[ACTIVE] + state.counts[SHARED]) * state.block_size)
        # An idle engine takes all requests that came before it plans a step: they came together.
        for one in self._together:
            one.at = self._together[-1].at
        self._together, self._waiting = [], False

    def on_evict(self, blocks: int) -> None:
        self.evicted += blocks

    def on_insert(self, parent: int, ids: list[int], blocks: list[int]) -> None:
        if not parent:
            self._salts[blocks[0]] = self._salt(ids)
        self._number(blocks)

    def on_extend(self, blocks: list[int]) -> None:
        self._number(blocks)

    # ----

    def _note(self, view: RequestView, at: float, before: int = 0) -> Asked:
        one = Asked(view.id, view.group, view.prompt_tokens, view.max_total, at, before=before, at_step=self.state.step)
        return self.taken.setdefault(view.id, one)

    def _look(self, view: RequestView) -> None:
        """Keep the text of a request's full blocks, if it is longer than what is known."""
        one = self.taken[view.id]
        one.cached, one.match = view.cached_tokens, view.match
        size = self.state.block_size
        if view.contents:
            if len(view.contents) * size > len(one.known):
                one.known = _spelled(view.contents, size)
                self.numbered = max(self.numbered, (max(view.contents) + 1) * size)
        elif view.node and view.shared_blocks * size > len(one.known):
            one.known, one.salt = self._text(view.node)

    def _text(self, node: int) -> tuple[array[int], int]:
        path = list(self.state.path(node))[::-1]
        if not path:
            return array("i"), 0
        salt = self._salts.get(path[0].blocks[0], 0)
        if self._hidden:
            return _spelled([self._texts.get(b, 0) for view in path for b in view.blocks], self.state.block_size), 0
        text = array("i")
        for view in path:
            text += view.ids
        return text, salt

    def _salt(self, ids: list[int]) -> int:
        """Returns the salt of a new text: a number, because another text begins alike and was not shared; else 0."""
        size, nodes = self.state.block_size, self.state.nodes
        first = array("i", ids[:size])
        others = (nodes[id] for id in nodes[0].children if nodes[id].ids[0] == first[0])
        used = {self._salts.get(view.blocks[0], 0) for view in others if view.ids[:size] == first}
        return 0 if self._hidden else next(n for n in itertools.count() if n not in used)

    def _number(self, blocks: list[int]) -> None:
        if self._hidden:
            size = self.state.block_size
            for block in blocks:
                self._texts[block] = self.numbered // size + 1
                self.numbered += size


def _spelled(numbers: list[int], size: int) -> array[int]:
    """Returns ids for blocks with numbers: equal for equal numbers only."""
    ids = array("i")
    for number in numbers:
        first = UNKNOWN + number * size
        ids.extend(range(first, first + size))
    return ids


def _find_chats(requests: list[Asked], size: int) -> None:
    """Set `after` of each request: the last one of its group that had finished when it came. A request has the salt of
    the one before it, if both texts begin alike: when a salt's text was evicted, the tree does not tell its salt."""
    ended: dict[str, deque[Asked]] = defaultdict(lambda: deque(maxlen=64))
    for one in requests:
        earlier = [other for other in ended[one.group] if other.ended is not None and other.ended <= one.at]
        if one.group and earlier:
            one.after = max(earlier, key=lambda other: other.ended or 0.0)
            if one.after.known[:size] == one.known[:size]:
                one.salt = one.after.salt
        ended[one.group].append(one)
