"""Trends: percentiles of first tokens, token gaps, hit rate, pool and queue over two hours, in memory of fixed size.

The last values of a metric are kept themselves, so the percentiles of few values are exact. For more values, each
metric counts its values in bins, four times per second for the last seconds, once per second for the last minutes and
once per 15 seconds for two hours. Counts can be added, so the percentiles of any period are exact up to the width of a
bin; they are never outside of the smallest and the largest value. A level, such as the length of the queue, lasts until
its next value: the bins count the time that each value lasted.

Time is working time (Rates.now): pauses and slow motion do not count.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np

from minitui.viewmodel.history.tokens import FEW

SAMPLES_KEPT = 4_096  # values of a metric that are kept themselves
BINS = 256
_EMPTY = array("I", [0]) * BINS
RATIO = 1.06  # of two neighbouring bins on a logarithmic scale: percentiles are exact within 3 %
FINEST_S, FINEST_KEPT = 0.25, 80  # length of a bucket in seconds, and buckets kept
FINE_S, FINE_KEPT = 1, 300
COARSE_S, COARSE_KEPT = 15, 480
SPANS = (3, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200)  # seconds that a picture can show


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
            return max(0, min(BINS - 1, round(value)))  # whole percents, as they are shown
        return 0 if value < self.low else min(BINS - 1, 1 + round(math.log(value / self.low) / math.log(RATIO)))

    def values(self) -> np.ndarray:
        """Returns the value of each bin."""
        if not self.low:
            return np.arange(BINS, dtype=float)
        values = np.concatenate(([0.0], self.low * RATIO ** np.arange(BINS - 1)))
        return values if self.unit else values.round()  # a number of requests


METRICS = (
    Metric("first token", "ms", 0.05, 99), Metric("token gaps", "ms", 0.05, 99), Metric("hit of a prompt", "%", 0.0, 1),
    Metric("pool", "%", 0.0, 99, level=True), Metric("queue", "", 1.0, 99, level=True),
)
BY_NAME = {metric.name: metric for metric in METRICS}


class Samples:
    """The last values of a metric, each with its time and the number of times that it was measured."""

    def __init__(self, kept: int) -> None:
        self._kept, self._added = kept, 0
        self._columns = tuple(array("d", [0.0]) * kept for _ in range(3))

    def add(self, now: float, value: float, count: int) -> None:
        i = self._added % self._kept
        for column, field in zip(self._columns, (now, value, count), strict=True):
            column[i] = field
        self._added += 1

    def since(self, begin: float) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Returns (times, values, counts) since a time; None if some of these values are no longer kept."""
        if self._added > self._kept and self._columns[0][self._added % self._kept] >= begin:
            return None
        times, values, counts = (np.frombuffer(column)[: self._added] for column in self._columns)
        found = times >= begin
        return times[found], values[found], counts[found].astype(np.int64)


class Ring:
    """Counts of values in `kept` buckets of `seconds` each, and the smallest and the largest value of each bucket."""

    def __init__(self, seconds: float, kept: int) -> None:
        self.seconds, self.kept = seconds, kept
        self.bucket = 0  # the bucket being filled
        # `array`, not numpy: adding to one element of a numpy array takes four times as long.
        self._counts = {metric.name: array("I", [0]) * (kept * BINS) for metric in METRICS}
        self._lowest = {metric.name: array("d", [math.inf]) * kept for metric in METRICS}
        self._highest = {metric.name: array("d", [-math.inf]) * kept for metric in METRICS}

    def advance(self, now: float) -> None:
        bucket = int(now / self.seconds)
        if bucket <= self.bucket:
            return
        for new in range(max(self.bucket + 1, bucket - self.kept + 1), bucket + 1):
            slot = new % self.kept
            start = slot * BINS
            for name, counts in self._counts.items():
                counts[start : start + BINS] = _EMPTY
                self._lowest[name][slot], self._highest[name][slot] = math.inf, -math.inf
        self.bucket = bucket

    def add(self, name: str, bin: int, value: float, count: int, bucket: int) -> None:
        """Count a value `count` times in one of the last buckets."""
        slot = bucket % self.kept
        self._counts[name][slot * BINS + bin] += count
        if value < self._lowest[name][slot]:
            self._lowest[name][slot] = value
        if value > self._highest[name][slot]:
            self._highest[name][slot] = value

    def last(self, name: str, bin: int, value: float, begin: float, end: float) -> None:
        """Count, in microseconds, the time from `begin` to `end`, in which a level had this value. `end`: the time of
        the last `advance`."""
        for bucket in range(max(int(begin / self.seconds), self.bucket - self.kept + 1), self.bucket + 1):
            since, until = bucket * self.seconds, (bucket + 1) * self.seconds
            if us := round((min(end, until) - max(begin, since)) * 1e6):
                self.add(name, bin, value, us, bucket)

    def columns(self, name: str, first: int, last: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (counts [columns, BINS], the smallest value, the largest) of the buckets `first` to `last`, `k`
        buckets in a column."""
        buckets = np.arange(first, last + 1)
        kept = (buckets >= 0) & (buckets <= self.bucket) & (buckets > self.bucket - self.kept)
        begins, slots = np.arange(0, len(buckets), k), buckets % self.kept
        counts = np.frombuffer(self._counts[name], np.uint32).reshape(-1, BINS)[slots].astype(np.int64) * kept[:, None]
        lowest = np.where(kept, np.frombuffer(self._lowest[name])[slots], math.inf)
        highest = np.where(kept, np.frombuffer(self._highest[name])[slots], -math.inf)
        return (
            np.add.reduceat(counts, begins, axis=0), np.minimum.reduceat(lowest, begins),
            np.maximum.reduceat(highest, begins),
        )


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


Percentiles = tuple[np.ndarray, np.ndarray, np.ndarray]  # p50, tail and count of each column


class Trends:
    """The history of METRICS. `fine`, `coarse`: the numbers of buckets to keep; `samples`: the values of each metric to
    keep themselves."""

    def __init__(self, fine: int = FINE_KEPT, coarse: int = COARSE_KEPT, samples: int = SAMPLES_KEPT) -> None:
        self._rings = (Ring(FINEST_S, FINEST_KEPT), Ring(FINE_S, fine), Ring(COARSE_S, coarse))
        self._samples = {metric.name: Samples(samples) for metric in METRICS if not metric.level}
        self._levels = {metric.name: (math.nan, 0.0) for metric in METRICS if metric.level}  # value, counted until
        self._now = 0.0  # the working time of the last `advance`
        self._bucket_ends = 0.0  # the working time at which the first of the rings begins a new bucket
        self._values = {metric.name: metric.values() for metric in METRICS}

    def advance(self, now: float) -> None:
        """Advance to the working time `now`, in seconds."""
        self._now = max(now, self._now)
        if now < self._bucket_ends:
            return
        self._bucket_ends = (int(now / FINEST_S) + 1) * FINEST_S
        for ring in self._rings:
            ring.advance(now)

    def add(self, name: str, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        bin = BY_NAME[name].bin(value)
        self._samples[name].add(self._now, value, count)
        for ring in self._rings:
            ring.add(name, bin, value, count, ring.bucket)

    def level(self, name: str, value: float) -> None:
        """Note the value of a level from now on."""
        if value != self._levels[name][0]:
            self._count_level(name)
            self._levels[name] = value, self._now

    def _count_level(self, name: str) -> None:
        """Count the time in which the level had its value."""
        value, since = self._levels[name]
        if value == value and since < self._now:  # not NaN
            bin = BY_NAME[name].bin(value)
            for ring in self._rings:
                ring.last(name, bin, value, since, self._now)
        self._levels[name] = value, self._now

    def series(
        self, name: str, span: int, columns: int, now: float, live: bool
    ) -> tuple[Series, tuple[float, float, int]]:
        """Returns the series of the `span` seconds up to working time `now`, in at most `columns` columns, and the
        (p50, tail, count) of the whole span. `live` False: the bucket of `now`, which may have later values, is left
        out. The counts of a level are microseconds."""
        if live:
            self.advance(now)
        if BY_NAME[name].level:
            self._count_level(name)
        ring = next((ring for ring in self._rings if span <= ring.seconds * ring.kept), self._rings[-1])
        k = max(1, math.ceil(span / ring.seconds / columns))
        last = int(now / ring.seconds) - (not live)
        n = math.ceil(span / ring.seconds / k)
        first = (last // k - n + 1) * k  # columns begin at multiples of k, so that they do not change while time passes
        samples = None if BY_NAME[name].level else self._samples[name].since(first * ring.seconds)
        if samples is not None:
            found, whole = self._of_samples(name, *samples, ring.seconds, first, last, k)
        else:
            found, whole = self._of_bins(name, *ring.columns(name, first, last, k))
        ends = np.minimum((first + k * (np.arange(len(found[0])) + 1)) * ring.seconds, now)
        return Series(*found, ends), (float(whole[0][0]), float(whole[1][0]), int(whole[2][0]))

    def _of_samples(
        self, name: str, times: np.ndarray, values: np.ndarray, counts: np.ndarray, seconds: float, first: int,
        last: int, k: int,
    ) -> tuple[Percentiles, Percentiles]:
        """Returns the percentiles of columns of `k` buckets of `seconds`, and of all columns together."""
        buckets = (times / seconds).astype(np.int64)
        order = np.argsort(values)
        order = order[buckets[order] <= last]
        values, counts, columns = values[order], counts[order], (buckets[order] - first) // k
        whole = self._percentiles(name, values, counts, counts.sum(keepdims=True))
        totals = np.bincount(columns, counts, (last - first) // k + 1).astype(np.int64)
        order = np.argsort(columns, kind="stable")
        return self._percentiles(name, values[order], counts[order], totals), whole

    def _of_bins(
        self, name: str, counts: np.ndarray, lowest: np.ndarray, highest: np.ndarray
    ) -> tuple[Percentiles, Percentiles]:
        """Returns the percentiles of columns of bins, and of all columns together."""

        def of(counts: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> Percentiles:
            values = np.tile(self._values[name], len(counts))
            p50, tail, totals = self._percentiles(name, values, counts.ravel(), counts.sum(axis=1))
            return np.clip(p50, lowest, highest), np.clip(tail, lowest, highest), totals

        every = counts.sum(axis=0, keepdims=True), lowest.min(keepdims=True), highest.max(keepdims=True)
        return of(counts, lowest, highest), of(*every)

    def _percentiles(self, name: str, values: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> Percentiles:
        """Returns the percentiles of columns. `values`, `counts`: of one column after the other, the values of each in
        ascending order. `totals`: the sum of the counts of each column."""
        if not len(values):
            none = np.full(len(totals), np.nan)
            return none, none, totals
        ends, begins = counts.cumsum(), totals.cumsum() - totals

        def of_rank(rank: np.ndarray) -> np.ndarray:
            return values[np.minimum(np.searchsorted(ends, begins + rank, "right"), len(values) - 1)]

        found = []
        for share in (0.5, BY_NAME[name].tail / 100):
            place = share * np.maximum(totals - 1, 0)
            if not BY_NAME[name].level:
                place = np.where(totals < FEW, np.ceil(share * np.maximum(totals, 1)) - 1, place)
            low = np.floor(place)
            value = of_rank(low)
            if not BY_NAME[name].level:  # between two values, as numpy's `percentile`
                value = value + (of_rank(np.ceil(place)) - value) * (place - low)
            found.append(np.where(totals > 0, value, np.nan))
        return found[0], found[1], totals


def shortest_span(now: float) -> int:
    """Returns the shortest of SPANS that shows all of the working time `now`, or the longest."""
    return next((span for span in SPANS if now <= span), SPANS[-1])
