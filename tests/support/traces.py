"""States of a trace, folded from its records."""

from __future__ import annotations

from engine.trace.state import State
from minitui.trace.reader import TraceReader


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
