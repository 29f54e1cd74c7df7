"""A Source that records another one: what the engine does goes to a trace file on its way to the application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import EngineDead
from engine.params import SamplingParams
from engine.trace.records import Packet, Record, packets
from minitui.sources.base import Progress, Source, Stream
from minitui.trace.recorder import LAST_RECORDS_S, Recording


class RecordingSource:
    """Any Source, with everything that passes through it written to a trace."""

    def __init__(self, source: Source, path: str | Path) -> None:
        self.source = source
        self.recording = Recording(path)

    @property
    def recording_error(self) -> str:
        """Why recording has stopped, if it has."""
        return self.recording.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    @property
    def info(self) -> dict[str, Any]:
        return self.source.info

    @property
    def error(self) -> str | None:
        return self.source.error

    async def start(self, on_progress: Progress) -> None:
        await self.source.start(on_progress)
        await self._begin()

    async def restart(self, on_progress: Progress) -> None:
        await self.source.restart(on_progress)
        await self._begin()

    async def reconfigure(self, config: Any) -> None:
        """See LiveSource.reconfigure; the other engine is recorded in a file of its own."""
        self.drain_records()
        await self.source.reconfigure(config)  # type: ignore[attr-defined]
        await self._begin()

    async def _begin(self) -> None:
        self.recording.begin(self.source.info, await self.source.snapshot())

    async def ready(self) -> None:
        await self.source.ready()

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        return self.source.submit(ids, params, group)

    async def control(self, verb: str, **arguments: Any) -> Any:
        return await self.source.control(verb, **arguments)

    async def snapshot(self) -> dict[str, Any]:
        snapshot = await self.source.snapshot()
        if self.recording.waits_for_snapshot:
            self.recording.resume(snapshot)
        return snapshot

    def drain_records(self) -> list[Record]:
        records = self.source.drain_records()
        self.recording.feed(records)
        return records

    def drain_packets(self) -> list[Packet]:
        """The same, packed again (and not those of the source, which would be recorded nowhere)."""
        return packets(self.drain_records())

    def name_groups(self, names: dict[str, str]) -> None:
        """Tell the trace what chats are called."""
        self.recording.name(names)

    def on_death(self, callback: Callable[[str], None]) -> None:
        self.source.on_death(callback)

    async def close(self) -> None:
        with contextlib.suppress(EngineDead, TimeoutError):  # what came before its death is recorded all the same
            if self.source.error is None and self.source.info:
                async with asyncio.timeout(LAST_RECORDS_S):  # an engine that hangs does not answer
                    await self.source.snapshot()  # its records have come before its answer
        self.drain_records()
        await self.source.close()
        self.recording.close()
