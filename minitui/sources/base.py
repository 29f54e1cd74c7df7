"""`Source` is the seam between the application and whatever it shows: an engine in a process of its own, later a server
elsewhere or a recording being replayed. Everything above this file knows a Source, never an engine.

Nothing heavy is imported before `start`: the application draws first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from engine.params import SamplingParams
from engine.progress import Progress
from engine.trace.records import Record


class Delta(Protocol):
    """A piece of an answer. The last has a finish_reason ("stop", "length", "abort", "error: ...") and metrics."""

    text: str
    ids: list[int]
    finish_reason: str | None
    metrics: dict[str, Any] | None


class Stream(Protocol):
    """An answer being written: iterate over it; cancelling ends it with finish_reason "abort"."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    async def started(self) -> int:
        """The engine's id of this request, once it has one."""

    def cancel(self) -> None:
        """End it soon; harmless when it has ended."""


class Source(Protocol):
    """What the application shows and talks to."""

    info: dict[str, Any]
    error: str | None

    async def start(self, on_progress: Progress) -> None:
        """Make it ready, telling of progress; raises EngineError with a sentence for the user."""

    async def ready(self) -> None:
        """Return when it can answer; raises EngineDead if it never will."""

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        """Ask for an answer; `group` labels it in the records."""

    async def control(self, verb: str, **arguments: Any) -> Any:
        """pause | resume | step (n) | run_until (predicate) | pace (factor) | clear_cache | stats."""

    async def snapshot(self) -> dict[str, Any]:
        """The state now, for engine.trace.state.State."""

    def drain_records(self) -> list[Record]:
        """The records since the last call; cheap."""

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call back with a sentence when it ends by itself."""

    async def restart(self, on_progress: Progress) -> None:
        """Begin again after its death."""

    async def close(self) -> None:
        """End it; returns when it has ended."""
