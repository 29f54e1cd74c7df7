"""Provides counters, gauges and histograms, and writes them in Prometheus' text format, version 0.0.4.

prometheus_client is not used: its `Histogram.observe` has no weights, so every reply would need a loop over its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


class Metric:
    """A named metric with a value for each combination of labels; with a `label`, none yet."""

    kind = "gauge"

    def __init__(self, name: str, about: str, label: str = "") -> None:
        self.name, self.about, self.label = name, about, label
        self.values: dict[Labels, float] = {} if label else {(): 0.0}

    def lines(self, common: Labels) -> list[str]:
        """Returns the page's lines for this metric; every value also gets the `common` labels."""
        body = [f"{self.name}{_labels(common + labels)} {_number(v)}" for labels, v in self.values.items()]
        return self._head() + body

    def _head(self) -> list[str]:
        return [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]


class Gauge(Metric):
    """A value that goes up and down. With a `label`, there is a value for each label value that was set."""

    def set(self, value: float, label_value: str = "") -> None:
        self.values[((self.label, label_value),) if self.label else ()] = value

    def reset(self) -> None:
        """Set the value to 0; with a label, remove all values from the page."""
        self.values = {} if self.label else {(): 0.0}


class Info(Metric):
    """A gauge with the value 1; its labels contain facts. It is on the page only after `set` was called."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, about)
        self.values = {}

    def set(self, **labels: object) -> None:
        self.values = {tuple((name, str(value)) for name, value in labels.items()): 1.0}


class Counter(Metric):
    """A value that only grows. Each of the `label_values` starts at zero, so that rates include the first event."""

    kind = "counter"

    def __init__(self, name: str, about: str, label: str = "", label_values: Sequence[str] = ()) -> None:
        super().__init__(name, about, label)
        if label:
            self.values = {((label, value),): 0.0 for value in label_values}

    def add(self, amount: float = 1.0, label_value: str = "") -> None:
        labels: Labels = ((self.label, label_value),) if self.label else ()
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Histogram(Metric):
    """The number of observations up to each of `bounds`, and the sum of all observations."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        super().__init__(name, about)
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as `times` observations."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def lines(self, common: Labels) -> list[str]:
        buckets, name = self.buckets(), self.name
        return [
            *self._head(),
            *(f"{name}_bucket{_labels((*common, ('le', bound)))} {count}" for bound, count in buckets.items()),
            f"{name}_sum{_labels(common)} {_number(self.sum)}",
            f"{name}_count{_labels(common)} {buckets['+Inf']}",
        ]

    def buckets(self) -> dict[str, int]:
        """Returns the number of observations up to each bound; "+Inf": of all."""
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return dict(zip(bounds, accumulate(self._counts), strict=True))


def page(metrics: Sequence[Metric], common: Labels) -> str:
    """Returns the page with all `metrics`; every value also gets the `common` labels."""
    return "\n".join(line for metric in metrics for line in metric.lines(common)) + "\n"


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escape(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(value)
