"""The most recent times to first token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.trace.kind import Reader

FIRST_TOKENS_KEPT = 256


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to first token of a request, in ms, as two parts: queue, then prefill until the token arrives."""

    request: int
    seq: int
    queue_ms: float
    prefill_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms


class FirstTokens(Reader):
    """The FIRST_TOKENS_KEPT most recent times to first token."""

    def __init__(self) -> None:
        self.items: deque[FirstToken] = deque(maxlen=FIRST_TOKENS_KEPT)

    def on_first(self, seq: int, request: int, queue_ms: float, prefill_ms: float) -> None:
        self.items.append(FirstToken(request, seq, queue_ms, prefill_ms))

    def until(self, seq: int) -> list[FirstToken]:
        """Returns the first tokens up to record `seq`, oldest first."""
        return [item for item in self.items if item.seq <= seq]
