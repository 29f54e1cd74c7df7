"""Events: admissions, cache hits, evictions, preemptions, finishes and others, in words with the engine's reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import Any, NamedTuple

from engine.trace.eviction import EVICTION_POLICIES
from engine.trace.kind import Record, named
from engine.trace.records import CLEARED
from minitui.text import count, duration, match_reason
from minitui.trace.foreign import REMOVED
from minitui.viewmodel.history.lane import Lane

EVENTS_KEPT = 20_000
SHORTEST_PAUSE_MS = 1.0  # shorter pauses are not mentioned
EVENTS_ALWAYS = 4_000  # this many of the newest events are kept even after their records are dropped
MOST_AHEAD = 8  # the most steps that are planned before the results of a step
PAGES = ("take", "borrow", "drop", "keep", "lose")  # kinds of records about the pages and slots of side groups
KINDS = ("admit", "hit", "miss", "evict", "lose", "preempt", "finish", "wait", "refuse", "fail", "pace", *PAGES[:-1])


class Event(NamedTuple):
    """One recorded decision. `step`: for a decision of planning, the step being planned; for a failure, the failed
    step; for a finish, the step of the last token; for any other event, the last planned step."""

    seq: int
    step: int
    kind: str  # one of KINDS
    request: int  # -1: none
    node: int  # -1: none
    raw: Record
    evicted: bytes = b""  # the first evicted token ids, as int32
    writer: int = -1  # the request that was still computing the matched blocks

    @property
    def record(self) -> Any:
        """The record, with its fields as attributes."""
        return named(self.raw)


class Events:
    """The last `kept` events, never merged. The text of an event is made when it is shown. Events are kept as plain
    tuples of numbers and texts: the garbage collector does not visit such tuples, but would visit each Event of a ring
    that changes thousands of times per second."""

    def __init__(self, kept: int = EVENTS_KEPT) -> None:
        self._items: deque[tuple[Any, ...]] = deque(maxlen=kept)  # the fields of each Event
        self.count = 0

    def fold_evict(self, record: Record, step: int, ids: bytes) -> None:
        """Add an `evict` record; `ids`: as Event.evicted. `step` is the last planned step."""
        self.count += 1
        seq, _t, _kind, node, *_ = record
        self._items.append((seq, step + 1, "evict", -1, node, record, ids, -1))

    def fold(self, record: Record, step: int, writer: int = -1) -> None:
        """Add any other record if it is a decision. `step` is the last planned step; for a finish, the step that
        ends."""
        seq, _t, kind, *_ = record
        decision = _RECORDS.get(kind)
        if decision is None:
            return
        name, planning = decision
        self.count += 1
        fields = named(record)
        at, request = step + planning, getattr(fields, "request", -1)
        if kind == "match" and fields.tokens <= 0:
            name = "miss"
        elif kind == "fail":
            at = fields.step
        self._items.append((seq, at, name, request, -1, record, b"", writer))

    def forget_before(self, seq: int) -> None:
        """Drop the events of records before `seq`, but keep the last EVENTS_ALWAYS events."""
        items = self._items
        while len(items) > EVENTS_ALWAYS and items[0][0] < seq:
            items.popleft()

    def __len__(self) -> int:
        return len(self._items)

    def newest_first(self) -> Iterator[Event]:
        """Yields all events that are kept."""
        return map(Event._make, reversed(self._items))

    def since(self, seq: int) -> list[Event]:
        """Returns the events of record `seq` and later records, oldest first."""
        return list(takewhile(lambda event: event.seq >= seq, self.newest_first()))[::-1]

    def of_step(self, step: int) -> list[Event]:
        """Returns the events of one step, oldest first."""
        found = []
        for event in self.newest_first():
            if event.step == step:
                found.append(event)
            elif event.step < step - MOST_AHEAD:
                break
        return found[::-1]

    def count_to(self, seq: int) -> int:
        """Returns the number of events up to record `seq`, also of those that are no longer kept."""
        return self.count - sum(1 for _ in takewhile(lambda item: item[0] > seq, reversed(self._items)))

    def tail(self, n: int, seq: int, wanted: Callable[[Event], bool], skip: int = 0) -> list[Event]:
        """Returns up to `n` wanted events up to record `seq`, newest first, without the newest `skip` of them."""
        events = (event for event in self.newest_first() if event.seq <= seq and wanted(event))
        return list(islice(events, skip, skip + n))


_RECORDS = {  # kind of record -> (kind of event, 1 if it belongs to the step being planned else 0)
    "admit": ("admit", 1), "match": ("hit", 1), "preempt": ("preempt", 1), "requeue": ("preempt", 0),
    "finish": ("finish", 0), "wait": ("wait", 1), "refuse": ("refuse", 0), "fail": ("fail", 0), "gate": ("pace", 0),
    "pace": ("pace", 0), **{kind: (kind, 1) for kind in PAGES},
}


def looked_up(event: Event) -> int:
    """Returns the number of tokens that a match looked up: the prompt and, after a preemption, the reply so far."""
    return int(event.record.detail.split(" of ")[1].split()[0].replace(",", ""))


def describe(
    event: Event, lane: Lane | None, quote: str = "", short: bool = False, tok_s: float | None = None,
    order: str = EVICTION_POLICIES["lru"].words, why: str = "",
) -> str:
    """Returns the event as a sentence, or in few words if `short`. `lane`: the lane of its request, if known. `quote`:
    the evicted text; empty: not known. `tok_s`: of a finished request. `order`: words of the eviction policy. `why`:
    why a match ended, if the record does not say all of it."""
    record = event.record
    kind, name = record.kind, f"r{event.request}"
    if kind == "admit":
        again = record.reason == "resumed"
        if short:
            return f"{name} again" if again else name
        return f"{name} is admitted again after its preemption" if again else f"{name} is admitted{_arrival(lane)}"
    if kind == "match":
        reason = why or match_reason(record.stop, record.at, record.tokens, record.detail)
        if record.tokens <= 0:
            return f"{name}: {reason}" if short else f"{name} takes nothing from the tree · {reason}"
        if short:
            return f"{name}: {record.tokens:,} of {looked_up(event):,} cached"
        early = f" (r{event.writer} is still computing them)" if event.writer >= 0 else ""
        if early and record.stop == "whole":
            reason = "these are all full blocks"  # not "were cached": they are being computed
        return f"{name} takes {record.tokens:,} of {looked_up(event):,} tokens from the tree{early} · {reason}"
    if kind == "preempt":
        text = f"{name} releases {count(record.blocks, 'block')}"
        return text if short else f"{text} and queues again · {record.reason}"
    if kind == "requeue":
        return f"{name} queues again · {record.reason}"
    if kind == "evict":
        if short:
            return f"{count(record.blocks, 'block')}, {record.reason}"
        which = {CLEARED: " · on request", REMOVED: ""}.get(record.reason, f" · {order}")
        what = f"“{quote}”" if quote else f"the end of node {event.node}"
        return f"{what} · {count(record.blocks, 'block')} · {record.reason}{which}"
    if kind == "finish":
        if short:
            return f"{name} {record.reason}, {count(record.output_tokens, 'token')}"
        speed = f" · {tok_s:,.0f} tok/s" if tok_s else ""
        return f"{name} finished ({record.reason}) after {count(record.output_tokens, 'token')}{speed}"
    if kind == "wait":
        return f"{name}: {record.reason}" if short else f"{name} waits for {record.reason}"
    if kind == "refuse":
        return f"{record.group or 'a request'} · {record.reason}"
    if kind == "fail":
        return f"step {record.step:,} · {record.error}"
    if kind == "pace":
        return f"slow motion ×{record.factor:g}" if record.factor != 1 else "slow motion off"
    if record.state == "open":
        return "the engine continues" + (f", {record.reason}" if record.reason not in ("", "resumed") else "")
    return "the engine is paused" + (f" · {record.reason}" if record.reason not in ("", "paused") else "")


def _arrival(lane: Lane | None) -> str:
    """Returns the prompt's length and the time that the request waited before its admission."""
    if lane is None:
        return ""
    text = f" · {count(lane.request.prompt_tokens, 'prompt token')}"
    if lane.waited_ms is None:
        return text
    paused_ms = lane.paused_s * 1e3
    if paused_ms < SHORTEST_PAUSE_MS:
        return f"{text} · waited {duration(lane.waited_ms)}"
    return (
        f"{text} · waited {duration(lane.waited_ms)} "
        f"(and {duration(paused_ms)} more while the engine was paused or slowed)"
    )


def paused_words(paused_ms: float) -> str:
    """Returns " and 60.0 s while paused or slowed"; empty for a short time. `paused_ms`: of a wait for admission."""
    return f" and {duration(paused_ms)} while paused or slowed" if paused_ms >= SHORTEST_PAUSE_MS else ""
