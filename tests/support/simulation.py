"""A device that runs no model but keeps an honest KV cache: the scheduler's tests drive the real engine with it.

Every slot remembers which token at which position was written to it. Before a token is "drawn", the whole context is
read back through the block table, and any slot that does not hold what it should raises. The token drawn is a hash of
that context, so two runs agree exactly if and only if every request always read its own tokens.

With `echo` it is a model that likes to repeat: three times of four it goes on as the context did when its last two
tokens last stood together. Which of a request's drafts are right is then as good as random, and the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np

from engine.core.engine import Engine
from engine.core.request import Grammar
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan, StepResult
from engine.trace.side_pool import SideGroup


class SimulatedRunner:
    synchronous = True

    def __init__(
        self, num_blocks: int, block_size: int, max_rows: int, vocab_size: int = 50, echo: bool = False,
        groups: tuple[SideGroup, ...] = (),
    ) -> None:
        self.echo, self.groups = echo, groups
        self.table = np.full((max_rows, max(4096, num_blocks)), -1, np.int64)
        # Of each window group: its block table, and (position, token) of each slot. Of the states: the tokens so far.
        windows = [group for group in groups if group.kind == "window"]
        self.windows = [
            (group, np.full_like(self.table, -1), np.full((group.num_blocks * block_size, 2), -1, np.int64))
            for group in windows
        ]
        self.states: list[list[int] | None] = [[]] + [None] * sum(g.num_blocks - 1 for g in groups if g.kind == "state")
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.last_token = np.full(max_rows, -1, np.int64)
        self.seeds = [-1] * max_rows
        self.slots = np.full((num_blocks * block_size, 2), -1, np.int64)  # (position, token) written last
        self.tokens_computed = 0
        self.prefill_tokens = 0
        self.steps = 0
        self.scheduler: Scheduler  # set by `simulated`
        self.on_launch: Callable[[StepPlan], None] | None = None
        self.on_wait: Callable[[StepPlan], None] | None = None
        self.bad_request: int | None = None

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> SimulatedLaunch:
        requests = {request.row: request for request in self.scheduler.running}
        if self.on_launch:
            self.on_launch(plan)
        self.steps += 1
        self.tokens_computed += plan.num_tokens
        self.prefill_tokens += plan.num_tokens - plan.num_decodes
        for settings in plan.joins:
            self.seeds[settings.row] = settings.seed
        tables = self.table, *(table for _, table, _ in self.windows)
        for table, (rows, columns, pages) in zip(tables, plan.tables, strict=True):
            table[rows, columns] = pages
        # Every layer stores all KV of the step before attention reads any.
        at = 0
        known: list[np.ndarray] = []
        for row, start, n in zip(plan.rows, plan.starts, plan.q_lens, strict=True):
            ids = plan.token_ids[at : at + n].astype(np.int64)
            ids[ids < 0] = self.last_token[row]
            assert (ids >= 0).all(), "a row took a token that was never drawn"
            positions = np.arange(start, start + n)
            slots = self._slots(row, positions)
            assert (slots >= self.block_size).all(), "a step wrote to the null block"
            self.slots[slots, 0], self.slots[slots, 1] = positions, ids
            for _, table, cells in self.windows:
                slots = table[row, positions // self.block_size] * self.block_size + positions % self.block_size
                assert (slots >= self.block_size).all(), "a step wrote to the null page of a window"
                cells[slots, 0], cells[slots, 1] = positions, ids
            known.append(ids)
            at += n
        if self.groups:
            self._check_sides(plan, known)
        drawn = [-1] * len(plan.rows)
        bad = []
        checked: dict[int, list[int]] = {}
        for i, (row, start, n) in enumerate(zip(plan.rows, plan.starts, plan.q_lens, strict=True)):
            end = int(start + n)
            read = self.slots[self._slots(row, np.arange(end))]
            assert (read[:, 0] == np.arange(end)).all(), f"row {row} read another position's KV"
            request = requests[row]
            have = min(end, len(request.ids))
            assert read[:have, 1].tolist() == request.ids[:have], f"r{request.id} read another request's KV"
            if plan.num_decodes <= i < plan.num_decoding:
                checked[i] = [self._draw(read[: start + j + 1, 1], self.seeds[row]) for j in range(n)]
                if self.bad_request == request.id:
                    checked[i][-1] = -1
            elif plan.samples[i]:
                drawn[i] = self._draw(read[:, 1], self.seeds[row])
                self.last_token[row] = drawn[i]
                if self.bad_request == request.id:
                    bad.append(i)
        return SimulatedLaunch(self, plan, StepResult(drawn, bad=bad, checked=checked))

    def _check_sides(self, plan: StepPlan, known: list[np.ndarray]) -> None:
        """Read what each layer would read: the windows' pages, and the chain of states."""
        read: dict[int, int] = {}  # slot -> the entry that reads it first
        for i, (row, start, ids) in enumerate(zip(plan.rows, plan.starts, known, strict=True)):
            end = int(start) + len(ids)
            context = self.slots[self._slots(row, np.arange(end))][:, 1].tolist()
            for group, table, cells in self.windows:
                seen = np.arange(max(0, start - group.window + 1), end)
                pages = cells[table[row, seen // self.block_size] * self.block_size + seen % self.block_size]
                assert (pages[:, 0] == seen).all(), f"row {row} reads another position's page"
                assert pages[:, 1].tolist() == context[seen[0] :], f"row {row} reads another request's page"
            if plan.segments is None or plan.cu_segments is None:
                continue
            first, at = sum(map(len, known[:i])), 0
            for begin, stop, source, target in plan.segments[plan.cu_segments[i] : plan.cu_segments[i + 1]].tolist():
                assert begin == first + at and stop > begin, "the segments of an entry do not follow each other"
                if not at:
                    read[source] = i
                assert self.states[source] == context[: start + at], f"row {row} begins with another state"
                at += stop - begin
                assert target > 0, "a step wrote to the null slot"
                self.states[target] = context[: start + at]
            assert at == len(ids), "the segments of an entry do not cover its tokens"

        if plan.segments is not None and plan.cu_segments is not None:
            for i, (first, last) in enumerate(pairwise(plan.cu_segments)):
                others = {slot for slot, entry in read.items() if entry != i}
                assert others.isdisjoint(plan.segments[first:last, 3].tolist()), "a slot that another entry writes"

    def _draw(self, context: np.ndarray, seed: int) -> int:
        return token_after(context, seed, self.vocab_size, self.echo)

    def _slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        return self.table[row, positions // self.block_size] * self.block_size + positions % self.block_size


def simulated(engine: Engine) -> Engine:
    """An engine over a SimulatedRunner, which checks what it reads against the requests of the engine's scheduler."""
    assert isinstance(engine.runner, SimulatedRunner)
    engine.runner.scheduler = engine.scheduler
    return engine


def run(engine: Engine, check: bool = False) -> None:
    """Steps, of any engine, until no request is left. `check`: its data structures are checked after each step."""
    for _ in range(100_000):
        if not engine.has_work:
            return
        engine.step()
        if check:
            engine.check()
    raise AssertionError("the engine did not come to an end")


class SimulatedLaunch:
    def __init__(self, runner: SimulatedRunner, plan: StepPlan, result: StepResult) -> None:
        self.runner, self.plan, self.result = runner, plan, result

    def wait(self) -> StepResult:
        if self.runner.on_wait:
            self.runner.on_wait(self.plan)
        return self.result


class AnyToken:
    """A grammar that allows every token; after `most` tokens it cannot continue (0: it always can)."""

    def __init__(self, most: int = 0) -> None:
        self.failed, self._left = "", most

    def advance(self, token: int) -> bool:
        self._left -= 1
        self.failed = "" if self._left else "the grammar is too costly"
        return False


WEIGHTS = np.arange(1, 1 << 17) * 2654435761 % 1000003  # of a token in the hash, by its position


def token_after(context: np.ndarray, seed: int, vocab_size: int, echo: bool = False) -> int:
    """The simulated model: the next token is a hash of all before it, or what that hash says is repeated."""
    digest = int((context + 7) @ WEIGHTS[: len(context)]) + seed * 7919
    if echo:
        digest = digest * 0x9E3779B97F4A7C15 % 2**64 >> 20
        before = np.flatnonzero((context[:-2] == context[-2:-1]) & (context[1:-1] == context[-1:]))
        if len(before) and digest // vocab_size % 4:
            return int(context[before[-1] + 2])
        if digest // vocab_size % 16:  # few words, so that two of them meet again
            return digest % 6
    return digest % vocab_size


def alone(
    prompt: list[int], seed: int, n: int, vocab_size: int = 50, stop: frozenset[int] = frozenset(), echo: bool = False
) -> list[int]:
    """What a request draws when nothing else runs."""
    ids = np.empty(len(prompt) + n, np.int64)
    ids[: len(prompt)] = prompt
    for end in range(len(prompt), len(ids)):
        ids[end] = token_after(ids[:end], seed, vocab_size, echo)
        if ids[end] in stop:
            return ids[len(prompt) : end + 1].tolist()
    return ids[len(prompt) :].tolist()
