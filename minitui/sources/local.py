"""A Source for an engine on this machine. The model is loaded after the application has drawn its first screen."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDead
from engine.params import SamplingParams
from engine.process.heartbeat import Condition
from engine.trace.records import Packet, Record
from minitui.sources.base import Progress, Source, Stream

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.process.client import EngineClient


class LocalSource(Source):
    """An engine process that minitui starts."""

    def __init__(self, config: EngineConfig, log_file: Path, label: str = "") -> None:
        """`label`: the model's name on the screen. If empty, the engine's name for the model is shown."""
        super().__init__()
        self.config, self.log_file = config, log_file
        self._label = label
        self._client: EngineClient | None = None  # None before `start`

    async def start(self, on_progress: Progress) -> None:
        from engine.process.client import EngineClient

        self._client = EngineClient(self.config, self.log_file, on_progress)
        self._client.on_death(self._died)
        await self._wait_for(self._client.launch())

    async def restart(self, on_progress: Progress) -> None:
        if self._client is None:
            await self.start(on_progress)
            return
        self._ready.clear()
        await self._wait_for(self._client.restart())

    async def reconfigure(self, config: EngineConfig) -> None:
        assert self._client is not None, "the engine has not been started"
        self.config = config
        self._ready.clear()
        await self._wait_for(self._client.reconfigure(config))

    async def _wait_for(self, launch: Awaitable[None]) -> None:
        """Wait until the engine is ready. Raises EngineError if it cannot start."""
        assert self._client is not None
        with self._starting():
            await launch
            self.info = replace(self._client.info, model=self._label or self._client.info.model)

    def _died(self, sentence: str) -> None:
        if self.info:  # if the engine ends before it is ready, `start` raises the error
            super()._died(sentence)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def condition(self) -> Condition:
        return self._client.condition if self._client is not None else Condition()

    @property
    def client(self) -> EngineClient:
        """The client of the engine process. Raises EngineDead while the engine loads."""
        if self._client is None or not self.info:
            raise EngineDead("the engine is still loading")
        return self._client

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        return self.client.submit(ids, params, group=group)

    async def control(self, verb: str, **arguments: Any) -> Any:
        return await self.client.control(verb, **arguments)

    async def snapshot(self) -> dict[str, Any]:
        return await self.client.snapshot()

    def drain_records(self) -> list[Record]:
        return self._client.drain_records() if self._client is not None else []

    def drain_packets(self) -> list[Packet]:
        return self._client.drain_packets() if self._client is not None else []
