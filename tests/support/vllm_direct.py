"""Two stand-ins for the pipe between vLLM's scheduler and the watcher, for tests."""

from __future__ import annotations

import marshal
from collections import Counter
from typing import Any

from engine.trace.state import State
from minitui.trace.check import Follower
from minitui.vllm.blocks import Inconsistent
from minitui.vllm.translate import Translator


class Direct:
    """Translates each message at once, and checks that each record is possible."""

    reason_given = False

    def __init__(self, *_: Any) -> None:
        self.kinds: Counter[str] = Counter()
        self.broken: Exception | None = None
        self.hits: list[tuple[int, int]] = []  # of each admission: its request, its cached tokens
        self.ended: list[int] = []  # steps
        self.scheduled: dict[str, int] = {}  # vLLM's tokens of each request of the step
        self.wrong: list[int] = []  # steps of which the messages tell something else
        self.wholes = self.repairs = 0
        self.as_planned = 0  # steps whose tokens came without the ids of their requests
        self.lost = self.reads = False

    def send(self, message: tuple[Any, ...]) -> None:
        if self.broken is not None:
            raise self.broken
        if self.lost:
            return
        kind, *rest = marshal.loads(marshal.dumps(message))
        if kind == "init":
            self.translator = Translator(*rest)
            self.follower = Follower(State.from_snapshot(self.translator.blocks.state.snapshot()))
            return
        try:
            self.translator.take((kind, *rest))
        except Inconsistent:
            self.repairs += 1
            self.lost = self.reads = True
            return
        self.as_planned += kind == "update" and rest[6] is None
        if kind == "schedule" and rest[2] >= 0 and self.translator._tokens != self.scheduled:
            self.wrong.append(rest[2])
        records = self.translator.drain()
        if kind == "whole":
            self.wholes += 1
            self.follower = Follower(State.from_snapshot(self.translator.blocks.state.snapshot()))
        for record in records:
            self.kinds[record[2]] += 1
            if record[2] == "match":
                self.hits.append(record[3:5])
            elif record[2] == "time":
                self.ended.append(record[3])
            self.follower.take(record)

    def lose(self) -> None:
        """Drop messages from now on, until `reads` is true and a step begins."""
        self.lost, self.reads = True, False

    def flush(self) -> None:
        pass

    def recover(self) -> bool:
        recovered = self.lost and self.reads
        self.lost = self.lost and not recovered
        return recovered

    def asked(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Kept:
    """Stands for the pipe to the watcher, and keeps the messages."""

    lost = reason_given = False

    def __init__(self, *_: Any) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def send(self, message: tuple[Any, ...]) -> None:
        self.messages.append(marshal.loads(marshal.dumps(message)))

    def flush(self) -> None:
        pass

    def recover(self) -> bool:
        return False

    asked = recover
    close = flush


def watch_steps(scheduler: Any) -> Direct:
    """Returns the pipe of a scheduler; from now on the pipe compares each step's tokens with vLLM's."""
    recorder = scheduler._recorder
    pipe, scheduled = recorder.pipe, recorder.scheduled

    def watched(output: Any, began: float) -> None:
        pipe.scheduled = dict(output.num_scheduled_tokens)
        scheduled(output, began)

    recorder.scheduled = watched
    assert isinstance(pipe, Direct)
    return pipe
