"""The metrics of an engine in this process as values, under their names in vLLM: see LLM.get_metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core.engine import Engine
from engine.info import EngineInfo
from engine.metrics import prometheus
from engine.metrics.metrics import Metrics
from engine.trace.state import State


@dataclass(slots=True)
class Metric:
    """A metric. A metric with labels appears once for each combination of them."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(slots=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """`buckets`: upper bound -> the number of observations up to it; `count` and `sum` are of all observations."""

    count: int
    sum: float
    buckets: dict[str, int]


class Counted:
    """The metrics of an engine. `update` must be called often enough that the engine's log drops no record."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.metrics = Metrics()
        self.metrics.engine_began(info)
        self._engine = engine
        engine.log.drain()
        self._state = State.from_snapshot(engine.snapshot())

    def update(self) -> None:
        for record in self._engine.log.drain():
            self.metrics.observe(record, self._state)
            self._state.apply(record)

    def values(self) -> list[Metric]:
        """Returns all metrics as they are now."""
        self.update()
        self.metrics.measure(self._state)
        return [value for metric in vars(self.metrics).values() for value in _values(metric)]


def _values(metric: object) -> Iterator[Metric]:
    """Yields a metric of the page as values. vLLM's counters have no "_total" here."""
    if isinstance(metric, prometheus.Histogram):
        buckets = metric.buckets()
        yield Histogram(metric.name, {}, buckets["+Inf"], metric.sum, buckets)
    elif isinstance(metric, prometheus.Counter):
        name = metric.name.removesuffix("_total")
        if metric.label == "position":
            by_position = {int(dict(labels)["position"]): int(value) for labels, value in metric.values.items()}
            yield Vector(name, {}, [by_position.get(place, 0) for place in range(max(by_position, default=-1) + 1)])
        else:
            yield from (Counter(name, dict(labels), int(value)) for labels, value in metric.values.items())
    elif isinstance(metric, prometheus.Metric):
        yield from (Gauge(metric.name, dict(labels), value) for labels, value in metric.values.items())
