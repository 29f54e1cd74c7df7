"""The answers: another setting beside the recording, a sweep over a setting, and the setting with the best goodput."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.goals import keeps
from minitui.text import count
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.comparison import number
from minitui.viewmodel.compare.runs import QUANTITIES, Run, RunFigures, recorded_view
from minitui.viewmodel.view import View
from minitui.whatif.asked import Recorded, asked_in
from minitui.whatif.cost import Costs, costs_of
from minitui.whatif.play import Player
from minitui.whatif.settings import Setting, value_of

CHECKED = ("time", "first_p50", "first_p99", "gap_p50", "gap_p99", "steps", "cached", "preemptions")


@contextmanager
def _uncollected() -> Iterator[None]:
    """No cyclic garbage collection: it would visit all records and requests again and again, which have no cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Question:
    """A recording that can be played again. Raises EngineError if it lacks what that needs."""

    def __init__(self, path: str | Path, arrivals: str = "recorded") -> None:
        self.arrivals = arrivals
        with _uncollected():
            self.reader = TraceReader(path, parts_later=True)
            self.recorded: Recorded = asked_in(self.reader)
            self.costs: Costs = costs_of(self.recorded.steps, str(path), self.reader.info.graphs)
        self.setting = Setting.of(self.reader.info, self.reader.part(0).snapshot)

    @cached_property
    def figures(self) -> RunFigures:
        """The figures of the recording."""
        recorded, view = self.recorded, View()
        if recorded.lanes is None or recorded.tokens is None:
            return Run(recorded_view(self.reader)).figures
        view.history.steps, view.history.lanes, view.history.tokens = recorded.steps, recorded.lanes, recorded.tokens
        return replace(Run(view).figures, evicted=recorded.evicted)

    def changed(self, changes: dict[str, str]) -> Setting:
        """Returns the setting of the recording with changes. Raises EngineError."""
        if changes.get("policy") == "priority" and len({one.priority for one in self.recorded.requests}) < 2:
            raise EngineError(
                f"policy=priority cannot be played: the records of {self.reader.path} do not have the priorities of "
                "requests, or all are the same"
            )
        return replace(self.setting, **{name: value_of(name, text) for name, text in changes.items()})

    def play(self, setting: Setting, traced: bool = False) -> Player:
        """Plays the recording's requests under a setting."""
        with _uncollected():
            return Player(self.recorded, self.costs, setting, self.arrivals, traced).run()

    def doubts(self, setting: Setting) -> list[str]:
        """Returns sentences about what the recording cannot tell about a setting."""
        info, notes = self.reader.info, [f"{note[0].upper()}{note[1:]}." for note in self.recorded.notes]
        if info.engine:
            notes.append(f"Recorded from {info.engine}, played by the scheduler of minitui: counts can differ.")
        if setting.block_size % self.setting.block_size:
            notes.append("The last tokens of a text, which fill no block, are not recorded: with smaller blocks, or "
                         "blocks of no multiple of the size, more can be cached than is said here.")
        if begun := sum(one.before > 0 for one in self.recorded.requests):
            notes.append(f"{count(begun, 'request')} had begun before the recording: goals do not count them.")
        if self.reader.cut_off:
            notes.append(self.reader.cut_off)
        return notes


def fit_words(costs: Costs) -> str:
    """Returns a sentence about the fit of a step's cost, with its error."""
    return (
        f"The cost of a step is fitted to {count(costs.steps, 'step')} of the recording: half of them differ from it "
        f"by more than {costs.error:.1%}. Their deviations are used again, so that the sum is right."
    )


def control(question: Question, played: RunFigures) -> tuple[str, dict[str, Any]]:
    """Returns how the figures of the recorded setting, played, differ from the recorded ones, as a sentence and as
    data."""
    real, (words, data) = question.figures, ([], {})
    for quantity in (one for one in QUANTITIES if one.name in CHECKED):
        a, b = quantity.of(real), quantity.of(played)
        data[quantity.key] = {"recorded": a, "played": b}
        if a is None or b is None or (a == b == 0):
            continue
        change = "the same" if a == b else f"{(b - a) / a:+.1%}" if a else f"{quantity.text(b)} instead of 0"
        words.append(f"{quantity.title.strip()} {change}")
    return f"The recorded setting, played in the same way: {', '.join(words)}.", data


# ---- several settings


_question: Question | None = None


def _prepare(question: Question) -> None:
    global _question
    _question = question


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a sweep. `good`: requests within the goals, if there are any."""

    changes: dict[str, str]
    figures: RunFigures
    notes: list[str]
    good: int
    refused: int
    extrapolated: int  # steps

    @property
    def goodput(self) -> float:
        """Requests within the goals per second."""
        return self.good / self.figures.time * 1e3 if self.figures.time else 0.0


def recorded_figures() -> RunFigures:
    """Returns the figures of the recording, in a process of a sweep."""
    assert _question is not None
    return _question.figures


def _point(changes: dict[str, str], goals: dict[str, float]) -> Point:
    assert _question is not None
    player = _question.play(_question.changed(changes))
    good = sum(
        1 for one in player.played.values()
        if one.tokens and not one.asked.before and keeps(goals, first=one.first_ms, gap=one.gap_ms)
    )
    return Point(changes, player.figures, player.notes, good, len(player.refused), player.device.extrapolated)


class Sweep(ProcessPoolExecutor):
    """Plays several settings, on all cores. A context manager."""

    def __init__(self, question: Question, goals: dict[str, float] | None = None) -> None:
        self._goals = goals or {}
        super().__init__(min(8, os.cpu_count() or 1), None, _prepare, (question,))

    def play(self, settings: Sequence[dict[str, str]]) -> Iterator[Point]:
        """Begin to play these changes; return an iterator of their points, in their order."""
        return self.map(_point, settings, [self._goals] * len(settings))


# ---- advice


ALIKE = 0.03  # a goodput that is larger by a smaller share is not better: the recorded setting stays


def candidates(question: Question, goals: dict[str, float]) -> list[dict[str, str]]:
    """Returns the single changes that advice tries. The pool is not changed: the memory is what it is."""
    now = question.setting
    found: list[dict[str, str]] = []
    for name, value in (("budget", now.budget), ("seqs", now.seqs)):
        found += [{name: str(n)} for n in (value // 4, value // 2, value * 2, value * 4) if n >= 16]
    found += [{"policy": name} for name in ("fcfs", "longest-prefix") if name != now.policy]
    found += [{"eviction": name} for name in ("lru", "fifo") if name != now.eviction]
    found.append({"chunking": "off" if now.chunking else "on"})
    if "gap" in goals:
        targets = (str(max(1, int(goals["gap"] * share))) for share in (0.5, 1))
        found += [{"gap": text} for text in (*targets, "off") if value_of("gap", text) != now.gap]
    if not now.cache:
        found.append({"cache": "on"})
    if not question.recorded.hidden and not question.reader.header["random_text"]:
        found += [{"speculation": n} for n in ("off", "4", "8") if value_of("speculation", n) != now.speculation]
    return found


@dataclass(frozen=True, slots=True)
class Advice:
    """`points`: all settings that were played, the best first; `best` is the first, `now` the recorded setting."""

    now: Point
    best: Point
    points: list[Point]


def advise(question: Question, goals: dict[str, float], say: Callable[[str], None]) -> Advice:
    """Returns the setting with the best goodput: the best single change, and then the best further one beside it."""
    with Sweep(question, goals) as sweep:
        singles = candidates(question, goals)
        say(f"playing {count(len(singles) + 1, 'setting')}")
        now, *points = sweep.play([{}, *singles])
        best = max([now, *points], key=lambda one: one.goodput)
        if best is not now:
            name = next(iter(best.changes))
            good = [one for one in points if one.goodput > now.goodput and name not in one.changes]
            pairs = [best.changes | one.changes for one in good]
            say(f"playing {count(len(pairs), 'pair')} of these")
            points += sweep.play(pairs)
            best = max([now, *points], key=lambda one: one.goodput)
    if best.goodput <= now.goodput * (1 + ALIKE):
        best = now
    return Advice(now, best, sorted([now, *points], key=lambda one: -one.goodput))


def words_of(changes: dict[str, str]) -> str:
    """Returns "budget=1024,blocks=2000"; "as recorded" without changes."""
    return ",".join(f"{name}={value}" for name, value in changes.items()) or "as recorded"


def reason(advice: Advice) -> str:
    """Returns in a sentence what gets better and what gets worse with the advised setting."""
    if advice.best is advice.now:
        return "No setting that was tried has a clearly better goodput: the recorded one stays."
    parts = []
    for name in ("first_p99", "first_p50", "gap_p99", "tok_s", "cached", "preemptions"):
        quantity = next(one for one in QUANTITIES if one.name == name)
        a, b = quantity.of(advice.now.figures), quantity.of(advice.best.figures)
        if a is not None and b is not None and abs(b - a) > ALIKE * max(abs(a), 1e-9):
            parts.append(f"{quantity.title.strip()} {quantity.text(b)} instead of {quantity.text(a)}")
    return f"With it: {'; '.join(parts)}." if parts else ""


def as_data(point: Point) -> dict[str, Any]:
    """Returns a point as data."""
    keys = {one.name: one.key for one in QUANTITIES}
    figures = {keys[name]: number(value) for name, value in asdict(point.figures).items() if name in keys}
    return {
        "changes": point.changes, "figures": figures, "within_goals": point.good, "goodput_per_second": point.goodput,
        "refused_requests": point.refused, "extrapolated_steps": point.extrapolated, "notes": point.notes,
    }
