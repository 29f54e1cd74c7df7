"""What the lesson on CUDA graphs says about the recorded steps is what the recording has."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from minitui.teaching.lessons import recorded_timelines
from minitui.teaching.lessons.recorded_timelines import EAGER, GRAPHS, LARGE, SMALL, device_ms, launch_ms
from minitui.teaching.recorded_steps import recorded_device


class NoPicture:
    """A stage that shows nothing."""

    @property
    def view(self) -> NoPicture:
        return self

    def put(self, board: Any) -> None:
        pass

    async def pause(self, seconds: float) -> None:
        pass


def test_the_texts_give_the_time_in_which_the_device_works_with_graphs() -> None:
    for play, size in ((recorded_timelines.eager_and_graphs, SMALL), (recorded_timelines.larger_model, LARGE)):
        text = asyncio.run(play(cast(Any, NoPicture()))).text
        found = re.search(r"works at most ([\d.]+) ms in a step", text)
        assert found is not None, text
        model = recorded_device().models[size]
        assert abs(float(found[1]) - device_ms(model.timeline(GRAPHS, 1))) < 0.01


def test_eager_steps_and_graphs_run_the_same_kernels() -> None:
    """With graphs, the device works as long as at least one kernel runs in an eager step."""
    for model in recorded_device().models.values():
        for rows, (count, busy) in model.kernels.items():
            assert abs(device_ms(model.timeline(GRAPHS, rows)) / busy - 1) < 0.05
            assert launch_ms(model.timeline(EAGER, rows)) / count * 1e3 > recorded_device().launch_us


def test_the_kernels_of_the_large_model_have_a_larger_share_of_the_eager_step() -> None:
    small, large = (recorded_device().models[size] for size in (SMALL, LARGE))
    shares = [model.kernels[1][1] / model.timeline(EAGER, 1).step_ms for model in (small, large)]
    assert shares[0] < shares[1]
