"""The telemetry endpoint beside vLLM: the endpoints /minitui/… of `minitui serve`, without requests and control."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from fastapi import FastAPI
from starlette.types import ASGIApp

from engine.errors import EngineError
from engine.hub.resolve import resolve_model
from engine.info import EngineInfo
from engine.metrics.metrics import Metrics
from engine.process.client import EngineClient
from engine.text.tokenizer import Tokenizer
from engine.trace.records import Record
from minitui import __version__
from minitui.protocol import ServerInfo
from minitui.server import errors
from minitui.server.access import Guard
from minitui.server.errors import ApiError
from minitui.server.service import MASK_TEXT, Service
from minitui.server.settings import ServerSettings
from minitui.server.telemetry import endpoints as telemetry
from minitui.server.telemetry.broadcast import Broadcast
from minitui.server.telemetry.http_metrics import HttpMetrics
from minitui.trace.recorder import Recording
from minitui.vllm.translate import Translator

T = TypeVar("T")
ONLY_WATCHES = "this address only shows vLLM: send requests to vLLM's own address; it cannot be paused or slowed down"


class Feed:
    """The engine that `Broadcast` reads: the records of a Translator. `translator` is replaced when vLLM starts."""

    def __init__(self, translator: Translator, info: EngineInfo) -> None:
        self.translator, self.info = translator, info

    async def snapshot(self) -> dict[str, Any]:
        return self.translator.blocks.state.snapshot()

    def drain_records(self) -> list[Record]:
        return self.translator.drain()


class VllmService:
    """Has the members of minitui.server.service.Service that the telemetry endpoints and their guards use."""

    draining = False
    gate_owner = None

    def __init__(self, translator: Translator, settings: ServerSettings) -> None:
        self.settings = settings
        self._translator = translator
        facts = {**translator.info, "model_dir": _tokenizer_directory(translator.info)}
        self._info = ServerInfo.from_json(json.loads(json.dumps(facts, default=str)))
        self.metrics, self.http_metrics = Metrics(), HttpMetrics()
        self.connections: dict[Any, None] = {}
        recording = None if settings.record is None else Recording(settings.record)
        self.broadcast = Broadcast(self.metrics, _mask(self.info) if settings.hide_text else None, recording)
        self.began = int(time.time())
        self._feed = Feed(translator, self.info)

    @property
    def info(self) -> ServerInfo:
        """Facts about vLLM. recording_us: the mean time per step that vLLM's process spends on the recording."""
        return replace(self._info, recording_us=self._translator.cost_us)

    @property
    def model(self) -> str:
        return self.info.model

    async def start(self) -> None:
        """Begin to send the records of the translator to watchers and into the recording."""
        await self.broadcast.begin(cast(EngineClient, self._feed))

    async def close(self) -> None:
        """Send and record the last records."""
        await self.broadcast.end()
        for watcher in list(self.broadcast.watchers):
            watcher.close()
        if self.broadcast.recording is not None:
            self.broadcast.recording.close()

    def check_ready(self) -> None:
        """Refuses requests and control."""
        raise ApiError(400, ONLY_WATCHES, code="only_watches")

    def release_gate(self) -> None:
        """Does nothing: there is no gate."""

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run slow work in a thread."""
        return await asyncio.to_thread(work, *arguments)

    def application(self) -> ASGIApp:
        """Returns the endpoints, guarded as those of `minitui serve`."""
        api = FastAPI(title="minitui beside vLLM", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        errors.install(api)
        service = cast(Service, self)
        api.include_router(telemetry.router(service))
        return Guard(api, service)


def _tokenizer_directory(info: dict[str, Any]) -> str:
    """Returns the directory of vLLM's tokenizer; an empty directory's name if it is not on this machine."""
    try:
        return str(resolve_model(info["tokenizer"], weights=False))
    except EngineError:
        return str(Path(info["tokenizer"]))


def _mask(info: EngineInfo) -> int:
    try:
        return Tokenizer(Path(info.model_dir)).encode(MASK_TEXT, add_special_tokens=False)[0]
    except EngineError:
        return 0
