"""The record log: everything that changes scheduler, allocator, tree or queues, in order, with its reason.

A record is a plain tuple `(seq, t, kind, *fields)`: `seq` counts up by one without gaps, `t` is in seconds since the
log began, `kind` is a key of FIELDS, which names the fields. Plain tuples, because a record must cost under a
microsecond to make and little to pickle. Rows that merely decode cost nothing per step: a step record says only
which requests joined and left the set of those that decode (`joined`, `left`), and each member advances by one token.

A snapshot names the sequence number it stands at; snapshot + later records = state, exactly (engine/trace/state.py
folds). Timings follow in records of their own and refer to a step, because the time of a GPU arrives later.

Between processes records travel as bytes, in packets, and whoever waits with them or keeps them does so as bytes, too:
a thousand steps a second of a full pool are 54,000 records with two or three objects each, which, were they made on
arrival, would lie cold in memory when they are folded, and be looked at by every garbage collection meanwhile.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Record = tuple[Any, ...]
PACKET = 512  # records in a packet at most: folding one is a few milliseconds, and keys wait no longer

CLEARED = "cleared"  # reason of an eviction that a user asked for, and not the scheduler

FIELDS: dict[str, tuple[str, ...]] = {
    # --- requests and the queue
    "submit": ("request", "group", "prompt_tokens", "max_total"),  # joins the end of the waiting queue
    "refuse": ("group", "reason"),  # never became a request; changes nothing
    "wait": ("request", "reason"),  # head of the queue, not admitted; told once per change of reason
    "order": ("queue",),  # the head of the queue was sorted (policy longest-prefix): its requests, in their new order
    "admit": ("request", "row", "reason"),  # leaves the queue, gets a row; reason: "new" or "resumed"
    "match": ("request", "tokens", "stop", "at", "detail"),  # prefix match at admission or before a chunk: tokens taken
    #   from the tree by it, and why it stopped: "whole" (all that may be shared is), "differs" (at token `at`),
    #   "ends" (the tree holds nothing beyond token `at`), "short" (under one block is left), "empty" (nothing begins
    #   like this), "evicted" (it stood here; at = step)
    "preempt": ("request", "reason", "blocks"),  # its blocks are given back, it rejoins the head of the queue
    "requeue": ("request", "reason"),  # like preempt, after a failed step: work in flight is void
    "finish": ("request", "reason", "output_tokens"),  # stop | length | abort | error: ...; row and blocks given back
    # --- blocks and the tree
    "alloc": ("request", "blocks"),  # appended to its table, private
    "hold": ("request", "node", "dropped"),  # its table becomes the path to `node`, then its private blocks from there
    #   on, the first `dropped` private blocks (copies of what it now shares) freed
    "insert": ("node", "parent", "request", "ids", "blocks", "step"),  # a new leaf made of the request's next private
    #   blocks; step: pending until that step commits, -1 if its KV is known written. The request now holds `node`
    "extend": ("node", "request", "ids", "blocks", "step"),  # the same, appended to the leaf it alone holds
    "split": ("node", "upper", "blocks"),  # the first `blocks` blocks of node become a new parent, `upper`
    "evict": ("node", "blocks", "reason"),  # the last n blocks of a leaf leave the tree; an empty leaf is removed
    "settle": ("step",),  # what this step published pending is now written
    "withdraw": ("step", "nodes"),  # the step failed: [(node, blocks kept)], deepest first; kept 0 removes the node
    # --- steps
    "step": ("step", "prefills", "joined", "left", "tokens", "waiting"),  # planned. prefills: [(request, start, n,
    #   samples)]; `tokens` of the budget are used; `waiting` requests stay queued
    "fail": ("step", "error"),  # its requests have finished with an error
    # --- speculation; neither is written for a step without drafts
    "draft": ("step", "drafts"),  # while it is planned: [(request, tokens)] computed behind the token that it decodes
    "accept": ("step", "drafts"),  # at its commit: [(request, drafted, accepted)]; it advances by those accepted, too
    # --- control
    "gate": ("state", "reason"),  # "open" | "closed", and why
    "pace": ("factor",),  # slow motion: every step stretched by this factor (1: off)
    # --- timings, not part of the state
    "time": ("step", "plan_us", "launch_us", "commit_us", "wall_ms", "device_ms", "work"),  # work: decode | prefill |
    #   mixed; wall: from plan to commit without the stretch of slow motion; device_ms: None when unknown
    "comm": ("step", "ranks", "ms"),  # just before its time, where several ranks share the model: how long rank 0 was
    #   in collectives, waiting for the others included; of a step replayed as CUDA graphs, what they take by themselves
    "experts": ("step", "load"),  # load: [(layer, [tokens that each of its experts got])] since the last such record; a
    #   few times a second, if the model has experts
    "first": ("request", "queue_ms", "prefill_ms", "sample_ms"),  # its first token: the three add up to TTFT
}


class Packet(NamedTuple):
    """Records that follow each other without a gap, packed."""

    first: int  # their sequence numbers
    last: int
    step: int  # the last one planned in it; -1: none is
    data: bytes  # marshal, which takes half as long as pickle either way, and is never read but from our own processes

    def __len__(self) -> int:
        """How many records it has."""
        return self.last - self.first + 1

    def records(self) -> list[Record]:
        """As objects."""
        return marshal.loads(self.data)


def packets(records: list[Record]) -> list[Packet]:
    """The records in packets. Those with a gap between them, as when too many had waited, are never in one."""
    return [Packet(*packed) for packed in pack(records)]


def pack(records: list[Record]) -> list[tuple[int, int, int, bytes]]:
    """The fields of the same packets: what the engine's process, which has better things to do, sends."""
    packed: list[tuple[int, int, int, bytes]] = []
    for start in range(0, len(records), PACKET):
        batch = records[start : start + PACKET] if len(records) > PACKET else records
        first, last = batch[0][0], batch[-1][0]
        if last - first + 1 != len(batch):
            cut = next(i for i, record in enumerate(batch) if record[0] != first + i)
            packed += pack(batch[:cut])
            packed += pack(batch[cut:])
            continue
        step = -1
        for record in reversed(batch):
            if record[2] == "step":
                step = record[3]
                break
        packed.append((first, last, step, marshal.dumps(batch)))
    return packed


class RecordLog:
    """Appends records and hands them to one listener, in batches.

    `limit` bounds what is kept when nobody drains: the oldest are dropped, and a reader sees it from the gap in `seq`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, limit: int = 50_000) -> None:
        self.seq = 0  # of the last record
        self.t = 0.0  # its time
        self.held = 0.0  # seconds that the gate, or slow motion, has kept work waiting
        self._clock = clock
        self._origin = clock()
        self._records: list[Record] = []
        self.watch: Callable[[Record], None] | None = None  # is shown each record, also while they are not kept
        self._limit = limit
        self.enabled = True

    def now(self) -> float:
        """Seconds since the log began."""
        return self._clock() - self._origin

    def worked(self) -> float:
        """Seconds since the log began without those in which work was held back: what figures are made of."""
        return self.now() - self.held

    def append(self, kind: str, *fields: Any) -> int:
        """Add a record and return its sequence number (which serves the tree as its clock)."""
        self.seq = seq = self.seq + 1
        self.t = t = round(self._clock() - self._origin, 6)  # microseconds survive every transport
        if self.enabled:
            self._records.append((seq, t, kind, *fields))
        if self.watch is not None:
            self.watch((seq, t, kind, *fields))
        return seq

    def drain(self) -> list[Record]:
        """All records since the last drain, oldest first; at most `limit` of them."""
        records, self._records = self._records, []
        return records[-self._limit :]

    def trim(self) -> None:
        """Forget the oldest beyond the limit (called once per step by an engine nobody drains)."""
        if len(self._records) > 2 * self._limit:
            del self._records[: -self._limit]


def as_dict(record: Record) -> dict[str, Any]:
    """A record with its fields named, for people and for JSON."""
    seq, t, kind, *values = record
    return {"seq": seq, "t": t, "kind": kind, **dict(zip(FIELDS[kind], values, strict=True))}
