"""Keeps the tokens per expert of a mixture-of-experts model, by layer, and sums them over the last records."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.trace.kind import Reader

KEPT = 240  # records; the engine writes up to four a second
SUMMED = 8  # records in one ExpertLoad


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """`tokens`: tokens of each expert over the last SUMMED records, int64 [layers, experts]. `layers`: the layer number
    of each row."""

    layers: tuple[int, ...]
    tokens: np.ndarray
    seconds: float  # the time that the records span

    @property
    def relative(self) -> np.ndarray:
        """float64 [layers, experts]: tokens divided by the layer's mean; zeros for a layer without tokens."""
        mean = self.tokens.mean(1, keepdims=True)
        return np.divide(self.tokens, mean, out=np.zeros(self.tokens.shape), where=mean > 0)


class ExpertLoads(Reader):
    """The last KEPT `experts` records."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, float, tuple[int, ...], np.ndarray]] = deque(maxlen=KEPT)

    @property
    def known(self) -> bool:
        """True if any expert load was recorded."""
        return bool(self._items)

    def on_experts(self, t: float, step: int, load: list[tuple[int, list[int]]]) -> None:
        layers = tuple(layer for layer, _ in load)
        self._items.append((step, t, layers, np.array([tokens for _, tokens in load], np.int64)))

    def at(self, step: int) -> ExpertLoad | None:
        """Returns the load of the last records up to `step`; None if there are no such records."""
        items = [item for item in self._items if item[0] <= step]
        if not items:
            return None
        layers, shape = items[-1][2], items[-1][3].shape
        items = [item for item in items[-SUMMED - 1 :] if item[2] == layers and item[3].shape == shape]
        summed = items[-SUMMED:]
        begin = items[0][1] if len(items) > len(summed) else summed[0][1]
        return ExpertLoad(layers, np.sum([tokens for *_, tokens in summed], axis=0), summed[-1][1] - begin)
