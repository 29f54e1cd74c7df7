"""Play time: the engine's time without the delay of slow motion, and with pauses shortened to a second. So the
recording of a lecture replays at the engine's speed, without the lecturer's slow motion and breaks."""

from __future__ import annotations

from engine.trace.kind import Reader, Record, time_of
from engine.trace.state import State

LONGEST_PAUSE = 1.0  # seconds of play time


class PlayClock(Reader):
    """Computes the play time in seconds: engine time without slow motion. A pause is shortened to `pause` seconds, and
    time without requests to `idle` seconds."""

    def __init__(
        self, t: float, played: float, state: State, pause: float = LONGEST_PAUSE, idle: float = LONGEST_PAUSE
    ) -> None:
        self._pause, self._idle = pause, idle
        self.now = played
        self._t = t
        self._pace = state.pace
        self._closed = state.gate == "closed"
        self._live = len(state.requests)
        self._stretched = 0.0  # seconds of slow motion still to be skipped

    def advance(self, record: Record) -> float:
        """Advances to a record and returns the record's play time. Call it for every record, in order."""
        t = time_of(record)
        elapsed = max(0.0, t - self._t)
        self._t = max(self._t, t)
        if self._stretched:
            skipped = min(elapsed, self._stretched)
            self._stretched -= skipped
            elapsed -= skipped
        if self._closed or not self._live:
            elapsed = min(elapsed, self._pause if self._closed else self._idle)
        self.now += elapsed
        self.read(record)
        return self.now

    def on_time(self, wall_ms: float) -> None:
        if self._pace > 1:
            self._stretched += wall_ms / 1e3 * (self._pace - 1)

    def on_submit(self) -> None:
        self._live += 1

    def on_finish(self) -> None:
        self._live -= 1

    def on_gate(self, state: str) -> None:
        self._closed = state == "closed"

    def on_pace(self, factor: float) -> None:
        self._pace, self._stretched = factor, 0.0
