"""The lessons L0 to L10: text about this engine, experiments on it, and questions that the panels answer. L0 explains
the words that the other lessons use; L1 to L10 explain one idea each."""

from __future__ import annotations

from engine.errors import EngineError
from minitui.teaching.lessons import (
    l0_tokens,
    l1_architecture,
    l2_model,
    l3_paged_kv,
    l4_paged_attention,
    l5_sampler,
    l6_scheduler,
    l7_detokenizer,
    l8_server,
    l9_radix,
    l10_cuda_graphs,
)
from minitui.teaching.lessons.page import Lesson

LESSONS: tuple[Lesson, ...] = (
    l0_tokens.LESSON, l1_architecture.LESSON, l2_model.LESSON, l3_paged_kv.LESSON, l4_paged_attention.LESSON,
    l5_sampler.LESSON, l6_scheduler.LESSON, l7_detokenizer.LESSON, l8_server.LESSON, l9_radix.LESSON,
    l10_cuda_graphs.LESSON,
)


def lesson(number: int | str) -> Lesson:
    """Returns the lesson with this number, which may be text. Raises EngineError if there is no such lesson."""
    for candidate in LESSONS:
        if str(number) == str(candidate.number):
            return candidate
    raise EngineError(f"there is no lesson {number}: the lessons are {LESSONS[0].number} to {LESSONS[-1].number}")


def neighbour(lesson: Lesson, by: int) -> Lesson | None:
    """Returns the lesson after this one if `by` is 1, or before it if -1; None if there is none."""
    return next((candidate for candidate in LESSONS if candidate.number == lesson.number + by), None)
