"""What the lesson on CUDA graphs says about the recorded steps is what the recording has."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from minitui.teaching.lessons import recorded_timelines
from minitui.teaching.lessons.recorded_timelines import EAGER, GRAPHS, LARGE, SMALL, device_ms
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


def test_the_large_model_has_less_device_time_with_graphs_and_the_text_gives_both_times() -> None:
    text = asyncio.run(recorded_timelines.larger_model(cast(Any, NoPicture()))).text
    small, large = (recorded_device().models[size] for size in (SMALL, LARGE))
    found = re.search(r"works ([\d.]+) ms a step, instead of the ([\d.]+) ms of its eager kernels", text)
    assert found is not None, text
    graphs, eager = map(float, found.groups())
    assert abs(graphs - device_ms(large.timeline(GRAPHS, 1))) < 0.01 and abs(eager - large.kernels[1][1]) < 0.01
    assert graphs < eager
    shares = [model.kernels[1][1] / model.timeline(EAGER, 1).step_ms for model in (small, large)]
    assert shares[0] < shares[1], "the kernels of the large model have a larger share of the eager step"
