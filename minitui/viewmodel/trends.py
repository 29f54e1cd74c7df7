"""Trends: percentiles of first tokens, token gaps, hit rate, pool and queue over two hours, in memory of fixed size.

Each metric counts its values in bins, four times per second for the last seconds, once per second for the last minutes
and once per 15 seconds for two hours.
Counts can be added, so the percentiles of any period are exact up to the width of a bin. Time is working time
(Rates.now): pauses and slow motion do not count.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np

BINS = 256
_EMPTY = array("I", [0]) * BINS
RATIO = 1.06  # of two neighbouring bins on a logarithmic scale: percentiles are exact within 3 %
FINEST_S, FINEST_KEPT = 0.25, 80  # length of a bucket in seconds, and buckets kept
FINE_S, FINE_KEPT = 1, 300
COARSE_S, COARSE_KEPT = 15, 480
SPANS = (15, 60, 300, 1800, 7200)  # seconds that a picture can show


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure with a history. `low`: the smallest value of a logarithmic scale; 0: a linear scale up to 100."""

    name: str
    unit: str
    low: float
    tail: int  # the percentile that shows the bad cases
    level: bool = False  # True: the value lasts until the next value

    def bin(self, value: float) -> int:
        """Returns the bin of a value."""
        if not self.low:
            return max(0, min(BINS - 1, round(value * 2)))
        return 0 if value < self.low else min(BINS - 1, 1 + round(math.log(value / self.low) / math.log(RATIO)))

    def values(self) -> np.ndarray:
        """Returns the value of each bin."""
        if not self.low:
            return np.arange(BINS) / 2
        return np.concatenate(([0.0], self.low * RATIO ** np.arange(BINS - 1)))


METRICS = (
    Metric("first token", "ms", 0.05, 99), Metric("token gaps", "ms", 0.05, 99), Metric("hit rate", "%", 0.0, 1),
    Metric("pool", "%", 0.0, 99, level=True), Metric("queue", "", 1.0, 99, level=True),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


class Ring:
    """Counts of values in `kept` buckets of `seconds` each."""

    def __init__(self, seconds: float, kept: int) -> None:
        self.seconds, self.kept = seconds, kept
        self.bucket = 0  # the bucket being filled
        self.slot = 0
        # `array`, not numpy: adding to one element of a numpy array takes four times as long.
        self._counts = {metric.name: array("I", [0]) * (kept * BINS) for metric in METRICS}

    def advance(self, now: float) -> None:
        bucket = int(now / self.seconds)
        if bucket <= self.bucket:
            return
        for new in range(max(self.bucket + 1, bucket - self.kept + 1), bucket + 1):
            start = new % self.kept * BINS
            for counts in self._counts.values():
                counts[start : start + BINS] = _EMPTY
        self.bucket, self.slot = bucket, bucket % self.kept

    def add(self, name: str, bin: int, count: int) -> None:
        self._counts[name][self.slot * BINS + bin] += count

    def columns(self, name: str, first: int, last: int, k: int) -> np.ndarray:
        """Returns the counts [columns, BINS] of the buckets `first` to `last`, `k` buckets in a column."""
        buckets = np.arange(first, last + 1)
        kept = (buckets >= 0) & (buckets <= self.bucket) & (buckets > self.bucket - self.kept)
        columns = np.frombuffer(self._counts[name], np.uint32).reshape(-1, BINS)
        counts = columns[buckets % self.kept].astype(np.int64) * kept[:, None]
        return np.add.reduceat(counts, np.arange(0, len(buckets), k), axis=0)


@dataclass(frozen=True, slots=True)
class Series:
    """The columns of a chart, oldest first; NaN for a column without values. `end`: the time at which each ends."""

    p50: np.ndarray
    tail: np.ndarray
    count: np.ndarray
    end: np.ndarray

    def at(self, column: int | None) -> tuple[float, float, int]:
        """Returns (p50, tail, count) of a column."""
        i = -1 if column is None else column
        return float(self.p50[i]), float(self.tail[i]), int(self.count[i])


class Trends:
    """The history of METRICS. `fine`, `coarse`: the numbers of buckets to keep."""

    def __init__(self, fine: int = FINE_KEPT, coarse: int = COARSE_KEPT) -> None:
        self._rings = (Ring(FINEST_S, FINEST_KEPT), Ring(FINE_S, fine), Ring(COARSE_S, coarse))
        self._bucket_ends = 0.0  # the working time at which the first of the rings begins a new bucket
        self._values = {metric.name: metric.values() for metric in METRICS}

    def advance(self, now: float) -> None:
        """Advance to the working time `now`, in seconds."""
        if now < self._bucket_ends:
            return
        self._bucket_ends = (int(now / FINEST_S) + 1) * FINEST_S
        for ring in self._rings:
            ring.advance(now)

    def add(self, name: str, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        bin = BY_NAME[name].bin(value)
        for ring in self._rings:
            ring.add(name, bin, count)

    def series(
        self, name: str, span: int, columns: int, now: float, live: bool
    ) -> tuple[Series, tuple[float, float, int]]:
        """Returns the series of the `span` seconds up to working time `now`, in at most `columns` columns, and the
        (p50, tail, count) of the whole span. `live` False: the bucket of `now`, which may have later values, is left
        out."""
        ring = next((ring for ring in self._rings if span <= ring.seconds * ring.kept), self._rings[-1])
        k = max(1, math.ceil(span / ring.seconds / columns))
        last = int(now / ring.seconds) - (not live)
        n = math.ceil(span / ring.seconds / k)
        first = (last // k - n + 1) * k  # columns begin at multiples of k, so that they do not change while time passes
        counts = ring.columns(name, first, last, k)
        p50, tail, total = self._percentiles(name, counts)
        if BY_NAME[name].level:
            p50, tail = _held(p50), _held(tail)
        ends = np.minimum((first + k * (np.arange(len(counts)) + 1)) * ring.seconds, now)
        whole = self._percentiles(name, counts.sum(axis=0, keepdims=True))
        return Series(p50, tail, total, ends), (float(whole[0][0]), float(whole[1][0]), int(whole[2][0]))

    def _percentiles(self, name: str, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sums = counts.cumsum(axis=1)
        total = sums[:, -1]
        found = []
        for share in (0.5, BY_NAME[name].tail / 100):
            at = (sums >= np.maximum(1, np.ceil(share * total))[:, None]).argmax(axis=1)
            found.append(np.where(total > 0, self._values[name][at], np.nan))
        return found[0], found[1], total


def shortest_span(now: float) -> int:
    """Returns the shortest of SPANS that shows all of the working time `now`, or the longest."""
    return next((span for span in SPANS if now <= span), SPANS[-1])


def _held(values: np.ndarray) -> np.ndarray:
    """Returns the values; a column without a value has the value of the column before it."""
    at = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    return np.where(at >= 0, values[at], np.nan)
