"""What recording takes of vLLM's throughput, from the periods that minitui/dev/vllm_switched.py writes."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from minitui.dev.bench_vllm import loss, read_periods

LINES = """\
100.0 0 90.0 10 100
101.0 1 1.0 180 9600
102.0 0 1.0 200 10000
103.0 1 1.0 190 9900
104.0 1 1.0 190 9800
105.0 0 1.0 200 10000
106.0 0 2.0 400 20000
107.0 1 1.0 200 1
"""


def test_a_pair_is_one_period_without_and_one_with_the_recorder():
    assert loss(read_periods(LINES), 100.5, 106.5) == {
        "tokens_per_s": 10000, "step_ms": 5.0, "pairs": 2, "loss_percent": 1.5, "standard_error": 0.5,
    }  # fmt: skip


def test_periods_that_began_before_are_left_out():
    assert loss(read_periods(LINES), 101.5, 106.5)["pairs"] == 1
