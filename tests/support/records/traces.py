"""States of a trace, folded from its records, and short recordings."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from engine.trace.state import State
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader

_FOLDER = tempfile.TemporaryDirectory(prefix="minitui-tests-")  # until this process ends


@cache
def beginning(name: str, share: float = 0.35) -> Path:
    """Returns a recording that comes along, as if it had been cut off behind this share of its bytes."""
    data = bundled()[name].read_bytes()
    path = Path(_FOLDER.name, f"{name}-{share}.trace")
    path.write_bytes(data[: int(share * len(data))])
    return path


def state_at(reader: TraceReader, step: int) -> State:
    """Returns the state at `reader.locate(step)`."""
    index, count = reader.locate(step)
    part = reader.part(index)
    state = part.state
    state.apply_all(part.records[:count])
    return state


def final_state(reader: TraceReader) -> State:
    """Returns the state at the end."""
    part = reader.part(len(reader.keyframes) - 1)
    state = part.state
    state.apply_all(part.records)
    return state
