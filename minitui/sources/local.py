"""An engine on this machine as a Source, in a process of its own.

The process starts after the application has drawn itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDead, EngineError
from engine.params import SamplingParams
from engine.process.heartbeat import Condition
from engine.trace.records import Packet, Record

if TYPE_CHECKING:
    from engine.config import EngineConfig
from minitui.sources.base import Progress, Stream


class LiveSource:
    """An engine of our own, in a process of its own, started when the application has drawn itself."""

    def __init__(self, config: EngineConfig, log_file: Path, label: str = "") -> None:
        """`label`: the model's name as it is shown, where it should not be the directory's."""
        self.config = config
        self._label = label
        self.log_file = log_file
        self.info: dict[str, Any] = {}
        self.error: str | None = None
        self._client: Any = None  # from the start of its process on
        self._ready = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []

    async def start(self, on_progress: Progress) -> None:
        from engine.process.client import EngineClient

        self._client = EngineClient(self.config, self.log_file, on_progress)
        self._client.on_death(self._died)
        await self._launch(self._client.launch())

    async def _launch(self, launch: Awaitable[None]) -> None:
        self.error = None
        try:
            await launch
        except EngineError as error:
            self.error = str(error)
            self._ready.set()  # whoever waits is told the error
            raise
        self._up()

    @property
    def condition(self) -> Condition:
        """Whether the engine's process lives, and what takes it long."""
        return self._client.condition if self._client is not None else Condition()

    async def ready(self) -> None:
        await self._ready.wait()
        if self.error is not None:
            raise EngineDead(self.error)

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        return self._client.submit(ids, params, group=group)

    async def control(self, verb: str, **arguments: Any) -> Any:
        if not self.info:
            raise EngineDead("the engine is still loading")
        return await self._client.control(verb, **arguments)

    async def snapshot(self) -> dict[str, Any]:
        if not self.info:
            raise EngineDead("the engine is still loading")
        return await self._client.snapshot()

    def drain_records(self) -> list[Record]:
        return self._client.drain_records() if self._client is not None else []

    def drain_packets(self) -> list[Packet]:
        """The records since the last call as they came, packed (see minitui/viewmodel/updater.py)."""
        return self._client.drain_packets() if self._client is not None else []

    def on_death(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def _died(self, sentence: str) -> None:
        if not self.info:
            return  # it has not been up yet: `start` raises
        self.error = sentence
        for callback in self._callbacks:
            callback(sentence)

    async def restart(self, on_progress: Progress) -> None:
        if self._client is None:
            await self.start(on_progress)
            return
        self._ready.clear()
        await self._launch(self._client.restart())

    async def reconfigure(self, config: EngineConfig) -> None:
        """Put an engine with another configuration in the place of this one; EngineError with a sentence."""
        assert self._client is not None, "the engine has not been started"
        self.config = config
        self._ready.clear()
        await self._launch(self._client.reconfigure(config))

    def _up(self) -> None:
        self.info = {**self._client.info, **({"model": self._label} if self._label else {})}
        self._ready.set()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
