"""Checks that each record of a trace is possible in the state before it.

State.apply trusts its records, so records from a file or from another server must be checked first. What is possible is
part of each kind (engine/trace/kinds.py).
"""

from __future__ import annotations

from engine.trace.kind import FAULTS, KINDS, Record, kind_of, named
from engine.trace.state import State
from minitui.trace.check import MOST_HELD

STATEFUL = {
    kind: [(3 + i, bound.fault) for i, bound in enumerate(cls.bounds.values()) if bound.fault is not None]
    for kind, cls in KINDS.items()
}  # kind -> (place, fault) of each field whose values depend on the state
REQUESTS = {kind: 3 + cls.fields.index("request") for kind, cls in KINDS.items() if "request" in cls.fields}


class Follower:
    """Checks each record, then folds it into the state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._youngest = max(state.requests, default=-1)  # the highest request id so far
        self._held = sum(len(request.table) for request in state.requests.values())  # blocks in all block tables

    def take(self, record: Record) -> None:
        """Fold a record that `check.record` returned. Raises ValueError with the reason if the record is impossible."""
        seq, _t, kind, *_ = record
        state = self.state
        reason = self._fault(record)
        if reason:
            raise ValueError(f"record {seq:,} ({kind}) is impossible: {reason}")
        place = REQUESTS.get(kind)
        request = state.requests.get(record[place]) if place is not None else None
        before = len(request.table) if request is not None else 0
        state.apply(record)
        if request is not None:
            self._held += len(request.table) - before
            if self._held > MOST_HELD:
                raise ValueError(f"the block tables of the requests have more than {MOST_HELD:,} entries")

    def _fault(self, record: Record) -> str:
        state, kind = self.state, kind_of(record)
        for place, fault in STATEFUL[kind]:
            if reason := fault(state, record[place]):
                return reason
        if kind == "submit":
            id = named(record).request
            if id <= self._youngest:
                return f"r{id} is not newer than r{self._youngest}"
            self._youngest = id
        faults = FAULTS.get(kind)
        return "" if faults is None else next(faults(state, record), "")
