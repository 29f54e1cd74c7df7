"""The recording of a GPU that comes with the lessons: what its steps cost, and steps of the same kernels eager, with
graphs, and with overlap. minitui/dev/record_steps.py of commit 3afb1c16 made the file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.trace.records import Record
from minitui.viewmodel.history.steps import Steps

BYTES = {"bfloat16": 2, "float32": 4}  # of a parameter
FILE = Path(__file__).with_name("h200.json")


@dataclass(frozen=True)
class RecordedTimeline:
    """Consecutive decode steps. `mode`: "eager", "graphs" or "overlap"."""

    mode: str
    rows: int
    steps: Steps

    @property
    def step_ms(self) -> float:
        """The mean time from the end of one step to the end of the next."""
        ends = [row.ended for step in self.steps_kept if (row := self.steps.get(step)) and row.ended is not None]
        return (ends[-1] - ends[0]) * 1e3 / (len(ends) - 1)

    @property
    def steps_kept(self) -> range:
        return range(self.steps.first, self.steps.last + 1)


@dataclass(frozen=True)
class RecordedModel:
    """A model on the recorded device. Costs are medians in ms."""

    name: str
    weights_gb: float  # of all parameters
    kv_bytes_per_token: int
    context: int  # tokens of each row's text in a measured decode step (mean)
    decode: dict[int, float]  # rows -> ms of a decode step
    prefill: dict[int, float]  # tokens of a prompt -> ms of its step
    timelines: tuple[RecordedTimeline, ...]
    kernels: dict[int, tuple[float, float]]  # rows -> number of kernels of a decode step, ms in which one runs

    def timeline(self, mode: str, rows: int) -> RecordedTimeline:
        """Returns the timeline of a mode with this number of rows."""
        return next(one for one in self.timelines if (one.mode, one.rows) == (mode, rows))


@dataclass(frozen=True)
class RecordedDevice:
    """The device and its models, by the name of their size, such as "8B"."""

    name: str  # such as "H200"
    read_bytes_per_s: float
    operations_per_s: float  # over a second, in which power limits them: as README has it, of another such card
    burst_operations_per_s: float
    launch_us: float  # of one small kernel of PyTorch, by the host
    models: dict[str, RecordedModel]

    @property
    def operations_per_byte(self) -> float:
        """How many operations the device computes in the time in which it reads one byte."""
        return self.operations_per_s / self.read_bytes_per_s


@cache
def recorded_device() -> RecordedDevice:
    """Returns the recording."""
    report = json.loads(FILE.read_text(encoding="utf-8"))
    models = {found["model"].rpartition("-")[2]: _model(found) for found in report["models"]}
    name = report["device"].rpartition(" ")[2]
    return RecordedDevice(
        name, report["read_bytes_per_s"], report["operations_per_s"],
        report["burst_operations_per_s"], report["launch_us"], models,
    )


def _model(found: dict[str, Any]) -> RecordedModel:
    return RecordedModel(
        found["model"],
        found["parameters"] * BYTES[found["dtype"]] / 1e9,
        found["kv_bytes_per_token"],
        found["context"],
        {cost["n"]: cost["wall_ms"] for cost in found["decode"]},
        {cost["n"]: cost["wall_ms"] for cost in found["prefill"]},
        tuple(RecordedTimeline(one["mode"], one["rows"], _steps(one["records"])) for one in found["timelines"]),
        {one["rows"]: (one["count"], one["busy_ms"]) for one in found["kernels"]},
    )


def _steps(records: Iterable[Record]) -> Steps:
    steps = Steps(64)
    for record in records:
        steps.read(record)
    return steps
