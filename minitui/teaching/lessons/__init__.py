"""The lessons L0 to L9: text about this engine, experiments on it, and questions that the panels answer."""

from __future__ import annotations

from engine.errors import EngineError
from minitui.teaching.lessons import (
    l0_architecture,
    l1_model,
    l2_paged_kv,
    l3_paged_attention,
    l4_sampler,
    l5_scheduler,
    l6_detokenizer,
    l7_server,
    l8_radix,
    l9_cuda_graphs,
)
from minitui.teaching.lessons.page import Lesson

LESSONS: tuple[Lesson, ...] = (
    l0_architecture.LESSON, l1_model.LESSON, l2_paged_kv.LESSON, l3_paged_attention.LESSON, l4_sampler.LESSON,
    l5_scheduler.LESSON, l6_detokenizer.LESSON, l7_server.LESSON, l8_radix.LESSON, l9_cuda_graphs.LESSON,
)  # fmt: skip


def lesson(number: int | str) -> Lesson:
    """Returns the lesson with this number, which may be text. Raises EngineError if there is no such lesson."""
    for candidate in LESSONS:
        if str(number) == str(candidate.number):
            return candidate
    raise EngineError(f"there is no lesson {number}: the lessons are 0 to {len(LESSONS) - 1}")
