"""A Source that gets its records from another source, and also writes them to a trace file."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDead
from engine.trace.records import Record
from minitui.sources.base import Progress, Source
from minitui.trace.recorder import LAST_RECORDS_S, Recording

if TYPE_CHECKING:
    from engine.config import EngineConfig


def _own(name: str) -> Any:
    """Returns a property with the value that it has in the recorded source."""
    return property(lambda self: getattr(self.source, name))


class RecordingSource(Source):
    """Wraps a source and records it. `info`, `error` and other attributes are those of the recorded source."""

    submit, control, sent, cannot_use = map(_own, ("submit", "control", "sent", "cannot_use"))
    ready, on_death, recorded = map(_own, ("ready", "on_death", "recorded"))
    uncontrolled, condition, connection = map(_own, ("uncontrolled", "condition", "connection"))
    missing, log_file = map(_own, ("missing", "log_file"))

    def __init__(self, source: Source, path: str | Path) -> None:
        # Source.__init__ is not called: __getattr__ must find its attributes in the recorded source.
        self.source = source
        self.recording = Recording(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    async def start(self, on_progress: Progress) -> None:
        await self.source.start(on_progress)
        await self._begin()

    async def restart(self, on_progress: Progress) -> None:
        await self.source.restart(on_progress)
        await self._begin()

    async def reconfigure(self, config: EngineConfig) -> None:
        """Reconfigure the recorded source. Its new engine is recorded in another file."""
        self.drain_records()
        await self.source.reconfigure(config)
        await self._begin()

    async def _begin(self) -> None:
        self.recording.begin(self.source.info, await self.source.snapshot())

    async def close(self) -> None:
        with contextlib.suppress(EngineDead, TimeoutError):  # a dead engine: write the records that have arrived
            if self.source.error is None and self.source.info:
                async with asyncio.timeout(LAST_RECORDS_S):  # a hung engine does not respond
                    await self.source.snapshot()  # when the snapshot arrives, all earlier records have arrived
        self.drain_records()
        await self.source.close()
        self.recording.close()

    async def snapshot(self) -> dict[str, Any]:
        snapshot = await self.source.snapshot()
        if self.recording.waits_for_snapshot:
            self.recording.resume(snapshot)
        return snapshot

    def drain_records(self) -> list[Record]:
        records = self.source.drain_records()
        self.recording.feed(records)
        return records

    @property
    def recording_error(self) -> str:
        return self.recording.error

    def add_note(self, text: str) -> int:
        return self.recording.bookmark(text)

    @property
    def recording_file(self) -> Path | None:
        return self.recording.file

    def name_groups(self, names: dict[str, str]) -> None:
        self.recording.name(names)
