"""Percentiles as minitui defines them, computed by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def percentiles(values: Sequence[float] | np.ndarray, shares: Sequence[float] = (50, 99)) -> Any:
    """Returns the percentiles; those of fewer than ten values are themselves values."""
    return np.percentile(values, shares, method="inverted_cdf" if len(values) < 10 else "linear")
