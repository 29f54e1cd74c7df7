"""The script of the process that runs a student's code, with limits (engine/text/limited_child.py).

A request is [the exercise, the text of the file, seconds of processor time, seconds], as JSON. The answer is an object:
"reference" and "yours" are the two runs (null: the file could not be run), "broken" a sentence, "step" the step that it
names, "printed" what the code printed, "latest" the last step in which it printed, and what it printed there.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from engine.text.limited_child import TEXT, Answer, serve
from minitui.exercises.student import ROOM, Broken, Student, forbid, limited
from minitui.exercises.table import Exercise, find_exercise
from minitui.exercises.trial import Trial


def prepare(setup: bytes) -> Callable[[bytes, int], Answer]:
    """Returns the function that runs an exercise."""
    sys.stdin = open(os.devnull)  # noqa: SIM115 (the real one is the socket to the application)
    with contextlib.suppress(ValueError, OSError):  # not for the superuser, and not on every system
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    forbid()

    def run(request: bytes, longest: int) -> Answer:
        name, source, cpu, seconds = json.loads(request)
        answer = json.dumps(answer_of(find_exercise(name), source, cpu, seconds)).encode()
        return TEXT, answer

    return run


def answer_of(exercise: Exercise, source: str, cpu: float, seconds: float) -> dict[str, Any]:
    """Plays the reference and the student's code; returns the answer."""
    reference = exercise.play(None)
    yours: Trial | None = None
    broken: Broken | None = None
    student: Student | None = None
    with _less_memory(), limited(cpu, seconds):
        try:
            student = Student(source, exercise.name)
            yours = exercise.play(student)
        except Broken as error:
            broken = error
    if yours is not None:
        exercise.judge(yours, reference)
        broken = yours.broken
    return {
        "reference": _run(exercise, reference), "yours": yours and _run(exercise, yours),
        "broken": str(broken) if broken is not None else "", "step": broken.step if broken is not None else None,
        "printed": student.printed.text if student is not None else "",
        "latest": [student.printed.step, student.printed.latest] if student is not None else [None, ""],
    }


def _run(exercise: Exercise, trial: Trial) -> dict[str, Any]:
    return {
        "figure": exercise.of(trial), "snapshot": trial.snapshot,
        "records": [record[1:] for record in trial.records],
    }


@contextlib.contextmanager
def _less_memory() -> Any:
    """Let the code take ROOM bytes more than this process has; where the system does not tell, as many as the process
    may take at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError), open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (min(taken + ROOM, hard if hard > 0 else taken + ROOM), hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    serve(prepare)
