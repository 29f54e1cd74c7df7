"""The five exercises: one row each. The command line, the application, README's table and the tests read EXERCISES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.exercises import sampling, scheduling, work
from minitui.exercises.student import Broken, Student
from minitui.exercises.trial import Trial
from minitui.text import duration

START = Path(__file__).with_name("start")


@dataclass(frozen=True)
class Exercise:
    """An exercise. `name`: also that of the function. `teaches`: in a sentence. `lesson`: the number of the lesson
    before it. `figure`: what is measured, smaller is better. `of`: returns it for a run. `text`: writes it. `install`:
    puts a student's function in the place of the decision. `at_end`: raises Broken if the whole run breaks a rule.
    `least`: no figure is smaller."""

    name: str
    teaches: str
    lesson: int
    work: Callable[[], work.Work]
    figure: str
    of: Callable[[Any], float]
    text: Callable[[float], str]
    install: Callable[[Trial, Student], None] | None = None
    at_end: Callable[[Trial, Trial], None] | None = None
    least: float = 0.0

    @property
    def start(self) -> str:
        """The text of the file with which a student begins."""
        return (START / f"{self.name}.py").read_text(encoding="utf-8")

    def play(self, student: Student | None) -> Trial:
        """Play the run of a student, or of the reference (None). `Trial.broken` says what went wrong."""
        if self.install is None:
            drawn = sampling.SampleTrial(self.work(), student)
            drawn.draw_with(student or sampling.reference)
            return drawn.play()
        trial = Trial(self.work(), student)
        if student is not None:
            self.install(trial, student)
        return trial.play()

    def judge(self, trial: Trial, reference: Trial) -> None:
        """Set `trial.broken` if the whole run breaks a rule."""
        if trial.broken is None and self.at_end is not None:
            try:
                self.at_end(trial, reference)
            except Broken as error:
                trial.broken = error

    def score(self, ours: float, reference: float) -> int:
        """Returns 100 if the figure is that of the reference, 200 if it is half of it."""
        return round(100 * reference / ours) if ours > 0 else 100


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _distance(value: float) -> str:
    return f"{value:.2f} %" if value > sampling.CHANCE else f"at most {sampling.CHANCE:g} % (chance)"


EXERCISES = {
    one.name: one
    for one in (
        Exercise(
            "admit", "the order of the queue: who waits for whom, and what is fair", 6, work.admissions,
            "mean time to first token", lambda trial: trial.mean_first_ms, duration, scheduling.admit,
        ),
        Exercise(
            "evict", "what a full cache throws away, and what that costs later", 9, work.evictions,
            "prompt tokens computed", lambda trial: trial.figures.computed, _whole, scheduling.evict,
            scheduling.evict_end,
        ),
        Exercise(
            "chunk", "the budget of a step: long prompts beside running replies", 6, work.chunks,
            "99th percentile of the token gaps", lambda trial: trial.figures.gap_p99 or 0.0, duration,
            scheduling.chunk, scheduling.chunk_end,
        ),
        Exercise(
            "preempt", "a pool that is too small: who loses its blocks, and what is computed again", 6,
            work.preemptions, "tokens computed again", lambda trial: trial.engine.cache.waste.preempted, _whole,
            scheduling.preempt,
        ),
        Exercise(
            "sample", "from logits to a token: softmax, temperature, seeds", 5, work.samples,
            "distance from softmax", lambda trial: trial.drawing.distance, _distance,
            at_end=sampling.sample_end, least=sampling.CHANCE,
        ),
    )
}


def find_exercise(name: str) -> Exercise:
    """Returns an exercise. Raises EngineError."""
    if name not in EXERCISES:
        raise EngineError(f"there is no exercise {name[:40]!r}: the exercises are {', '.join(EXERCISES)}")
    return EXERCISES[name]
