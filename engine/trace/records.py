"""The record log: every change of scheduler, allocator, prefix tree and queue, in order, with its reason.

A record is a tuple `(seq, t, kind, *fields)`. `seq` increases by one with each record, `t` is in seconds since the
log began, and `kind` is a key of FIELDS, which names the fields. Records are plain tuples because these are made in
under a microsecond. One `step` record describes all decodes of a step: it lists the requests that joined and left the
decoding set (`joined`, `left`). Each step advances every member of the set by one token.

A snapshot has the sequence number of the last record that it includes. A snapshot and the records after it give the
exact state (engine/trace/state.py). Timings are separate records that name their step, because GPU times arrive later.

Between processes and in queues, records are packed into bytes. With a full pool, a thousand steps per second write
54,000 records per second. Unpacked on arrival, they would be cache-cold when they are applied to a state, and every
garbage collection would visit them.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Record = tuple[Any, ...]
PACKET = 512  # the most records in a packet: applying them delays the handling of key presses by a few milliseconds

CLEARED = "cleared"  # reason of an eviction that a user requested
REMOVED = "the server removed it"  # reason of an eviction that a server's KV events report: they name no reason

FIELDS: dict[str, tuple[str, ...]] = {
    # --- requests and the queue
    "submit": ("request", "group", "prompt_tokens", "max_total"),  # joins the end of the waiting queue
    "refuse": ("group", "reason"),  # rejected before it became a request; the state does not change
    "wait": ("request", "reason"),  # the head of the queue is not admitted; written when the reason changes
    "order": ("queue",),  # the head of the queue was sorted (engine/core/policy.py); its request ids in the new order
    "admit": ("request", "row", "reason"),  # leaves the queue and gets a row; reason: "new" or "resumed"
    "match": ("request", "tokens", "stop", "at", "detail"),  # prefix match at admission or before a chunk: the tokens
    #   taken from the tree, and why the match stopped: "whole" (all blocks that can be shared were taken), "differs"
    #   (at token `at`), "ends" (nothing is cached beyond token `at`), "short" (the prompt has at most one block),
    #   "empty" (no cached text has the same beginning), "evicted" (the rest was evicted; `at` is the step)
    "preempt": ("request", "reason", "blocks"),  # releases its blocks and returns to the head of the queue
    "requeue": ("request", "reason"),  # like preempt, after a failed step: the request's results in flight are dropped
    "finish": ("request", "reason", "output_tokens"),  # stop | length | abort | error: ...; releases row and blocks.
    #   The tokens of the reply: without those that the last commit appended after a stop string
    # --- blocks and the tree
    "alloc": ("request", "blocks"),  # private blocks, appended to the request's table
    "hold": ("request", "node", "dropped"),  # the request's table becomes the blocks on the path to `node`, and then
    #   its private blocks. The first `dropped` private blocks are freed: the request now shares blocks of equal content
    "insert": ("node", "parent", "request", "ids", "blocks", "step"),  # a new leaf, made of the request's next private
    #   blocks. They are pending until `step` commits (-1: already written). The request now holds `node`
    "extend": ("node", "request", "ids", "blocks", "step"),  # like insert, for a leaf that only this request holds
    "again": ("request", "tokens"),  # after insert or extend: prompt tokens of its blocks that were in the tree before.
    #   The request computes them again because their blocks were evicted
    "full": ("request", "contents"),  # without a prefix cache: its next full blocks. Each block has the number of its
    #   text; two blocks have the same number if they hold the same tokens after the same prefix
    "split": ("node", "upper", "blocks"),  # the first `blocks` blocks of node become a new parent, `upper`
    "merge": ("upper", "lower"),  # a node and its only child, which the same requests hold, become one node. It has the
    #   smaller of the two ids
    "copy": ("request", "node", "blocks"),  # like hold, but the request keeps its own blocks: its next private
    #   `blocks` have the content of the tree's blocks on the path to `node`, and are cached as their copies (only vLLM)
    "uncopy": ("block",),  # a block is evicted that is a copy or has copies. If it is the tree's own block, its
    #   oldest copy takes its place
    "swap": ("block",),  # a copy takes the place of the tree's own block, which becomes the oldest copy: it turned out
    #   to be the block that a new request gets
    "evict": ("node", "blocks", "reason"),  # the last `blocks` blocks of a leaf are evicted; an empty leaf is removed
    "store": ("node", "parent", "ids", "blocks"),  # a server reports cached content, but not which request computed it
    #   (minitui/vllm/cached_tree.py): a new leaf, or the end of a leaf that exists
    "settle": ("step",),  # the pending blocks of this step are now written
    "withdraw": ("step", "nodes"),  # the step failed. nodes: [(node, blocks kept)], deepest first; 0 removes the node
    # --- steps
    "step": ("step", "prefills", "joined", "left", "tokens", "waiting"),  # a step was planned. `prefills`: [(request,
    #   start, n, samples)]; `tokens`: the part of the budget used; `waiting`: number of requests left in the queue
    "fail": ("step", "error"),  # the step failed; its requests finish with an error
    # --- speculation; only for steps with drafts
    "draft": ("step", "drafts"),  # before the `step` record: [(request, draft tokens)]
    "accept": ("step", "drafts"),  # at the commit: [(request, drafted, accepted)]; adds `accepted` tokens to a request
    # --- control
    "gate": ("state", "reason"),  # "open" | "closed", and why
    "pace": ("factor",),  # slow motion: every step takes this many times as long (1: off)
    # --- timings, not part of the state
    "time": ("step", "plan_us", "launch_us", "commit_us", "wall_ms", "device_ms", "work"),  # work: decode | prefill |
    #   mixed; wall_ms: from the plan, or from the results of the previous step if these came later, to its own
    #   results, without the delay by slow motion; launch_us, device_ms: None if unknown
    "parts": ("step", "commit_us", "emit_us", "gate_us", "plan_us", "launch_us", "wait_us", "gc_us", "delayed_us",
              "stops"),  # before the step's `time`. The first six add up to the host's time since the results of the
    #   previous step arrived, or since the idle engine got work. emit: output and commands between two steps; gate:
    #   pause and slow motion; wait: blocked until the device finished. The other three overlap with the six. gc:
    #   garbage collection; delayed: the process was ready to run while another program had the core, since the last
    #   step that has it (None: not read, as in most short steps, or not available); stops: how often a signal stopped
    #   the process
    "comm": ("step", "ranks", "ms"),  # before the step's `time`, only with several ranks: rank 0's time in collectives.
    #   It includes the waiting for other ranks, except for a step replayed as CUDA graphs
    "experts": ("step", "load"),  # load: [(layer, [tokens of each expert])] since the last `experts` record; a few
    #   times per second, for models with experts
    "first": ("request", "queue_ms", "prefill_ms"),  # at the first token; the two add up to the TTFT
}


class Packet(NamedTuple):
    """Consecutive records without a gap, as bytes."""

    first: int  # sequence number of the first record
    last: int  # sequence number of the last record
    step: int  # the last step that these records plan; -1: none
    data: bytes  # marshal is twice as fast as pickle; only our own processes exchange packets

    def __len__(self) -> int:
        """Returns the number of records."""
        return self.last - self.first + 1

    def records(self) -> list[Record]:
        """Returns the records as tuples."""
        return marshal.loads(self.data)


def packets(records: list[Record]) -> list[Packet]:
    """Returns the records in packets; a packet never spans a gap."""
    packed: list[Packet] = []
    for start in range(0, len(records), PACKET):
        batch = records[start : start + PACKET] if len(records) > PACKET else records
        first, last = batch[0][0], batch[-1][0]
        if last - first + 1 != len(batch):
            cut = next(i for i, record in enumerate(batch) if record[0] != first + i)
            packed += packets(batch[:cut]) + packets(batch[cut:])
            continue
        step = next((record[3] for record in reversed(batch) if record[2] == "step"), -1)
        packed.append(Packet(first, last, step, marshal.dumps(batch)))
    return packed


class RecordLog:
    """Collects records until they are drained. It has only one reader.

    A drain returns at most the last `limit` records. The reader sees dropped records as a gap in `seq`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, limit: int = 50_000) -> None:
        self.seq = 0  # sequence number of the last record
        self.t = 0.0  # time of the last record
        self.held = 0.0  # seconds in which there was work, but the gate or slow motion delayed it
        self._clock = clock
        self._origin = clock()
        self._records: list[Record] = []
        self.watch: Callable[[Record], None] | None = None  # called with each record, even if not `enabled`
        self._limit = limit
        self.enabled = True  # False: records are counted but not collected

    def now(self) -> float:
        """Returns the seconds since the log began."""
        return self._clock() - self._origin

    def worked(self) -> float:
        """Returns the seconds since the log began minus `held`. Durations of work are measured with this clock."""
        return self.now() - self.held

    def append(self, kind: str, *fields: Any) -> int:
        """Add a record and return its sequence number, which is also the tree's clock."""
        self.seq = seq = self.seq + 1
        self.t = t = int((self._clock() - self._origin) * 1e6) / 1e6  # whole microseconds: short in JSON, and exact
        if self.enabled:
            self._records.append((seq, t, kind, *fields))
        if self.watch is not None:
            self.watch((seq, t, kind, *fields))
        return seq

    def drain(self) -> list[Record]:
        """Returns all records since the last drain, oldest first; at most `limit`."""
        records, self._records = self._records, []
        return records[-self._limit :]

    def trim(self) -> None:
        """Drop the oldest records beyond the limit. Call this once per step if nothing drains the log."""
        if len(self._records) > 2 * self._limit:
            del self._records[: -self._limit]


def as_dict(record: Record) -> dict[str, Any]:
    """Returns a record with named fields."""
    seq, t, kind, *values = record
    return {"seq": seq, "t": t, "kind": kind, **dict(zip(FIELDS[kind], values, strict=True))}
