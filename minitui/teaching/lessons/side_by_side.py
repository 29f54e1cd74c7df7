"""Experiments: the same work under two settings, each in an engine of its own, one above the other on one clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from minitui.teaching.compare import run_contrast
from minitui.teaching.contrasts import Contrast, Setting, find_contrast
from minitui.teaching.lessons.page import Seen
from minitui.teaching.stage import Stage
from minitui.text import duration
from minitui.viewmodel.compare.comparison import CLEAR, Comparison, Difference, key_of
from minitui.viewmodel.compare.runs import Run
from minitui.viewmodel.view import View

Answer = Callable[[Comparison], int]  # returns the index of the right choice
TITLES = {"computed": "prompt tokens computed"}
SHOWN = ("steps", "time", "computed", "first_p99", "gap_longest", "accepted")


def side_by_side(
    contrast: str | Contrast, answer: Answer | None = None, told: Callable[[Comparison], str] | None = None,
    shown: Sequence[str] = SHOWN, counted: Callable[[Run], Sequence[tuple[str, int]]] | None = None,
) -> Callable[[Stage], Awaitable[Seen]]:
    """Returns an experiment that runs a contrast: one of CONTRASTS, by its name, or another one.

    `answer` reads the right choice of the prediction from it. `told` returns what to say about it, in place of the
    largest differences. `shown`: the names of the quantities in the table. `counted` returns more lines of the table:
    their titles, and what was counted in a run.
    """

    async def run(stage: Stage) -> Seen:
        chosen = find_contrast(contrast) if isinstance(contrast, str) else contrast
        outcome = await run_contrast(_with_all_options(chosen), stage)
        comparison = Comparison.of(stage.view, key_of(outcome.infos))
        sentence = told(comparison) if told is not None else comparison.sentence
        lines = [
            _line(one) for one in comparison.differences
            if one.quantity.name in shown or (told is None and f" {one.quantity.words} was" in sentence)
        ]
        if counted is not None:
            pairs = zip(*map(counted, comparison.runs), strict=True)
            lines = [_columns(title, str(one), str(other)) for (title, one), (_, other) in pairs] + lines
        first, second = (run.name for run in comparison.runs)
        return Seen(
            f"{sentence} {outcome.replies}\n\n" + "\n".join([_columns("", first, second), *lines]),
            answer(comparison) if answer is not None else None,
        )

    return run


def _with_all_options(chosen: Contrast) -> Contrast:
    """Returns the contrast with the options of both engines in its settings."""
    first, second = (Setting(one.name, chosen.engine(one)) for one in chosen.settings)
    return replace(chosen, first=first, second=second)


def _line(one: Difference) -> str:
    quantity = one.quantity
    title = TITLES.get(quantity.name, quantity.title.strip())
    return _columns(title, quantity.text(one.first), quantity.text(one.second))


def _columns(title: str, first: str, second: str) -> str:
    return f" {title}{first:>{38 - len(title)}}{second:>20}"


def steps_and_time(comparison: Comparison) -> str:
    """Returns what these two runs say about the question: did fewer steps take less time?"""
    before, now = (run.figures for run in comparison.runs)
    each = [figures.time / figures.steps for figures in (before, now)]
    faster, slower = now.time < (1 - CLEAR) * before.time, now.time > (1 + CLEAR) * before.time
    outcome = "less time" if faster else "more time" if slower else "about as much time"
    names = [run.name for run in comparison.runs]
    why = " Probably the speed of this machine varied." if each[1] < (1 - CLEAR) * each[0] else ""
    return (
        f"With {names[1]}, the run had {now.steps:,} steps instead of {before.steps:,}, and this time it took "
        f"{outcome}. On average, a step computed more tokens. It took {duration(each[1])} instead of "
        f"{duration(each[0])}.{why}"
    )


def waits_and_gaps(comparison: Comparison) -> str:
    """Returns how long the first tokens and the tokens after them took in both runs."""
    found = {one.quantity.name: one for one in comparison.differences}
    (_, now), first, gap = (run.name for run in comparison.runs), found["first_p99"], found["gap_p50"]
    return (
        f"With {now}, first token p99 was {first.quantity.text(first.second)} instead of "
        f"{first.quantity.text(first.first)}, and the median time between two tokens of a reply was "
        f"{gap.quantity.text(gap.second)} instead of {gap.quantity.text(gap.first)}."
    )


def most_running(view: View) -> int:
    """Returns the largest number of requests that decoded in one step."""
    steps = view.history.steps
    rows = (steps.get(step) for step in range(max(0, steps.first), steps.last + 1))
    return max((row.decodes for row in rows if row is not None), default=0)


def step_of_last_first_token(run: Run) -> int:
    """Returns the step in which the last reply of a run began, counted from 1."""
    return max(int(found.steps[0]) for found in run.arrivals.values() if len(found)) - run.first + 1


def with_pieces_and_blocks(comparison: Comparison) -> int:
    """Returns 0 if paging runs more requests at once than one piece for each, 1 if both run all, 2 if neither does."""
    first, second = (most_running(run.view) for run in comparison.runs)
    return 0 if first < second else 1 if second == comparison.runs[1].figures.requests else 2
