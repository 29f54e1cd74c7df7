"""The type of a progress callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# {"stage": str, "done": int, "total": int (0: unknown), "text": str}, and a "note" that stays after the load
Progress = Callable[[dict[str, Any]], None]
