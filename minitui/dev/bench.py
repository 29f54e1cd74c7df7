"""Measures the host's part of a step without a device: the real engine over a runner that computes nothing.

    python -m minitui.dev.bench [--json]

It prints microseconds per step and per row with 1 to 1,024 running requests, and for each operation on a radix tree of
1,000 to 100,000 blocks.

Every request decodes. The lengths differ, so in each step one row in sixteen takes a new block and publishes a full
block, as in real use. Each time is the median over the steps of a run. The fastest of several runs is reported, because
other programs can only make a run slower.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import typer

from engine.core.allocator import BlockAllocator
from engine.core.engine import Engine
from engine.core.node import Key, Node
from engine.core.radix import RadixTree
from engine.core.scheduler import SchedulerConfig
from engine.core.step import StepPlan, StepResult
from engine.params import SamplingParams
from engine.process.writer import on_the_wire
from engine.text.output import OutputProcessor
from engine.trace.records import RecordLog
from engine.trace.side_pool import SideGroup
from minitui.visible import json_text

BATCHES = (1, 16, 64, 256, 1024)
TREES = (1_000, 10_000, 100_000)
BLOCK, VOCAB = 16, 50_000
STEPS, RUNS = 96, 3  # steps per run, and runs, for each line
DEPTH = 8  # blocks of a sequence in the tree: 2 shared with 15 other sequences and 6 of its own
OPERATIONS = 400  # timed operations of each kind


class NoDevice:
    """A runner whose steps end at once; every row gets the same token."""

    block_size, vocab_size, synchronous = BLOCK, VOCAB, True
    groups: tuple[SideGroup, ...] = ()

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def launch(self, plan: StepPlan, grammars: object) -> NothingToWaitFor:
        return NothingToWaitFor(len(plan.rows))


class NothingToWaitFor:
    """A launched step with `entries` entries, which has already ended."""

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def wait(self) -> StepResult:
        return StepResult([7] * self.entries)


@dataclass(frozen=True)
class StepCost:
    """Medians over decode steps, in microseconds."""

    rows: int
    delay: int  # 1: a step is planned before the previous one is committed
    records: bool
    step_us: float  # the whole of Engine.step
    plan_us: float
    commit_us: float
    emit_us: float  # making deltas, and pickling them with the records for the client
    worst_us: float  # the slowest step

    @property
    def row_us(self) -> float:
        """The time of a step divided by its rows."""
        return self.step_us / self.rows

    def line(self) -> str:
        return (
            f"{self.rows:6,d} {self.delay:6d}   {'on ' if self.records else 'off'}   {self.step_us:10.1f} "
            f"{self.plan_us:10.1f} {self.commit_us:10.1f} {self.row_us:10.3f} {self.emit_us:10.1f} "
            f"{self.worst_us:10.1f}"
        )


@dataclass(frozen=True)
class TreeCost:
    """Means over operations on a tree with this number of blocks, in microseconds of processor time."""

    blocks: int
    nodes: int
    match_us: float  # a sequence of DEPTH blocks, all cached
    insert_us: float  # a sequence with 2 cached blocks: hold these, append 6, release all
    split_us: float  # a node of 6 blocks split in two
    evict_us: float  # per block, evicting DEPTH blocks at a time until the tree is empty

    def line(self) -> str:
        return (
            f"{self.blocks:8,d} {self.nodes:8,d} {self.match_us:10.2f} {self.insert_us:10.2f} {self.split_us:10.2f} "
            f"{self.evict_us:10.2f}"
        )


STEP_HEAD = "  rows  delay records  us a step       plan     commit   us a row       emit      worst"
TREE_HEAD = "  blocks    nodes      match     insert      split  evict/block   (us)"


def measure(say: Callable[[str], Any]) -> dict[str, Any]:
    """Measures both tables; passes each line to `say` and returns the data."""
    say("steps in which every row decodes\n" + STEP_HEAD)
    steps = []
    for rows in BATCHES:
        for delay in (0, 1):
            for records in (False, True):
                steps.append(step_cost(rows, delay, records, RUNS))
                say(steps[-1].line())
    say("\nthe radix tree, with its allocator and its records\n" + TREE_HEAD)
    costs = []
    for blocks in TREES:
        costs.append(tree_cost(blocks))
        say(costs[-1].line())
    return {"steps": [asdict(cost) | {"row_us": cost.row_us} for cost in steps], "tree": [asdict(c) for c in costs]}


def step_cost(rows: int, delay: int, records: bool, runs: int = RUNS) -> StepCost:
    """Returns the fastest of `runs` runs of STEPS decode steps."""
    return min((_step_cost(rows, delay, records) for _ in range(runs)), key=lambda cost: cost.step_us)


def _step_cost(rows: int, delay: int, records: bool) -> StepCost:
    engine = _decoding(rows, delay)
    engine.log.enabled = records
    outputs = OutputProcessor(None, engine)
    for request in engine.scheduler.running:
        outputs.open(request)
    plans, commits = _timed(engine.scheduler, "plan"), _timed(engine.committer, "commit")
    whole, emits = [], []
    with _no_collections():
        for _ in range(STEPS):
            began = time.perf_counter()
            emitted = engine.step()
            ended = time.perf_counter()
            news = ("news", [delta.packed() for delta in outputs.process(emitted)], engine.log.drain())
            on_the_wire(news)
            emits.append(time.perf_counter() - ended)
            whole.append(ended - began)
    step_us, plan_us, commit_us, emit_us = (median(times) * 1e6 for times in (whole, plans, commits, emits))
    return StepCost(rows, delay, records, step_us, plan_us, commit_us, emit_us, worst_us=max(whole) * 1e6)


def _decoding(rows: int, delay: int) -> Engine:
    """Returns an engine in which `rows` requests with different prompts decode."""
    longest = 2 * BLOCK + 2 * STEPS
    runner = NoDevice(1 + rows * -(-2 * longest // BLOCK))
    config = SchedulerConfig(8192, rows, max_model_len=2 * longest)
    engine = Engine(runner, config, overlap=delay > 0)
    rng = random.Random(rows)
    for i in range(rows):
        prompt = [rng.randrange(VOCAB) for _ in range(BLOCK + i % BLOCK)]
        engine.add_request(prompt, SamplingParams(max_tokens=longest, ignore_eos=True))
    while not all(request.decoding for request in engine.scheduler.requests.values()):
        engine.step()
    for _ in range(4):
        engine.step()
    engine.log.drain()
    return engine


def _timed(owner: object, name: str) -> list[float]:
    """Returns a list that receives the seconds of every later call of `owner`'s method `name`."""
    method = getattr(owner, name)
    times: list[float] = []

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            times.append(time.perf_counter() - began)

    setattr(owner, name, call)
    return times


def tree_cost(blocks: int) -> TreeCost:
    """Builds a tree of about `blocks` evictable blocks and times operations on it."""
    rng = random.Random(blocks)
    log = RecordLog()
    allocator = BlockAllocator(blocks + 1 + 2 * DEPTH * OPERATIONS)
    tree = RadixTree(BLOCK, allocator, log)
    sequences: list[list[int]] = []
    while allocator.num_cached + DEPTH <= blocks:
        if len(sequences) % 16 == 0:
            head = _tokens(rng, 2)
        sequences.append(head + _tokens(rng, DEPTH - 2))
        _insert(tree, sequences[-1])
    log.drain()
    nodes = len(tree.nodes) - 1
    known = rng.choices(sequences, k=OPERATIONS)
    with _no_collections():
        match = _mean_us(lambda ids: tree.match(ids, DEPTH), known)
        branches = [ids[: 2 * BLOCK] + _tokens(rng, DEPTH - 2) for ids in known]
        insert = _mean_us(lambda ids: _insert(tree, ids), branches)
        cuts = [tree.match(ids, DEPTH - 3) for ids in branches]
        split = _mean_us(tree.claim, cuts)
        log.drain()
        evicted, began = 0, time.thread_time()
        while freed := tree.evict(DEPTH, "the pool is full"):
            evicted += freed
        evict = (time.thread_time() - began) / evicted * 1e6
    tree.check()
    allocator.check()
    return TreeCost(blocks, nodes, match, insert, split, evict)


def _insert(tree: RadixTree, ids: list[int]) -> None:
    """Uses the tree as a request does: holds the cached blocks, appends the other blocks, releases all blocks."""
    match = tree.match(ids, DEPTH)
    node: Node = tree.claim(match)
    tree.allocator.hold(match.blocks)
    tree.lock(node, tree.root, tree.log.append("hold", 0, node.id, 0))
    new = tree.allocator.allocate(DEPTH - len(match.blocks)) or []
    keys: list[Key] = [tuple(ids[i * BLOCK : (i + 1) * BLOCK]) for i in range(len(match.blocks), DEPTH)]
    node = tree.add(node, 0, keys, new, -1)
    tree.unlock(node, tree.log.append("finish", 0, "length", 0))
    tree.allocator.release([*match.blocks, *new][::-1])


def _tokens(rng: random.Random, blocks: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(blocks * BLOCK)]


def _mean_us(operation: Callable[[Any], Any], arguments: list[Any]) -> float:
    began = time.thread_time()  # of this thread alone: there is one run, and other programs must not count
    for argument in arguments:
        operation(argument)
    return (time.thread_time() - began) / len(arguments) * 1e6


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turns garbage collection off: its time depends on other objects of this process."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Measure the host's part of a step, and the radix tree."""
    if json:
        print(json_text(measure(lambda line: None), indent=2))
    else:
        measure(print)


if __name__ == "__main__":
    typer.run(main)
