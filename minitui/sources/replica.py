"""A replica is one of several servers of the same model. This module has its connection, load and state."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineDead, EngineError
from minitui.protocol import ServerInfo
from minitui.sources.base import Stream
from minitui.sources.http import httpx, normalise
from minitui.sources.openai import OpenAISource, TextCodec
from minitui.sources.remote import RemoteSource
from minitui.sources.remote_checks import probe
from minitui.sources.server_metrics import PATIENCE_S, MetricsPoller, ServerMetrics, trouble_of, wait_after
from minitui.sources.vllm import RANK_HEADER, Engine, VllmSource, look

WAITS: Any = {"give_up_s": float("inf"), "watching": False}  # options of the telemetry
LOADING = "it is loading its model"
UNKNOWN = "it has not answered yet"


def no_progress(progress: dict[str, Any]) -> None:
    """A progress callback that shows nothing."""


class Replica:
    """One server. `source` answers requests, `telemetry` has the records of a minitui server or of a recorded vLLM,
    `poller` reads the server's metrics. They are None until the first connection. `telemetry` stays None if nothing
    records the server."""

    def __init__(
        self, number: int, server: str | Engine, key: str, model: str, codec: TextCodec | None, cache: Path | None
    ) -> None:
        """`server`: its address, or one engine of vLLM. `codec`: the codec of chats that are sent as messages; None if
        chats are sent as token ids."""
        self._engine = server if isinstance(server, Engine) else None
        self.number, self.url = number, server.telemetry if isinstance(server, Engine) else normalise(server)
        self.name = server.name if isinstance(server, Engine) else urlsplit(self.url).netloc
        self.kind = ""  # minitui | vllm | openai, once it is known
        self.telemetry: RemoteSource | None = None
        self.source: RemoteSource | OpenAISource | None = None
        self.poller: MetricsPoller | None = None
        self.streams: dict[Stream, str] = {}  # this application's requests at the server, with their chats
        self.tried = asyncio.Event()  # set when the first attempt to connect has ended
        self._key, self._model, self._codec, self._cache = key, model, codec, cache
        self._trouble = UNKNOWN
        self._polling: asyncio.Task[None] | None = None
        self._info: ServerInfo | None = None
        self._retry_at = 0.0
        self._streams_at_poll = (-1, 0)  # number of the last poll; number of `streams` at that poll
        self._returned = asyncio.Event()

    @property
    def title(self) -> str:
        """The name of the replica in messages."""
        return f"replica {self.number} ({self.name})"

    @property
    def trouble(self) -> str:
        """Why the replica cannot take requests, as a sentence; empty if it can."""
        return self._trouble or (self.poller.trouble if self.poller else "")

    @property
    def retry_in(self) -> float:
        """Seconds until the next attempt to reach the server."""
        at = self.poller.retry_at if self.poller and not self._trouble else self._retry_at
        return max(0.0, at - time.monotonic())

    @property
    def metrics(self) -> ServerMetrics:
        """The values of the server's last Prometheus page; none while the replica is not connected."""
        return self.poller.metrics if self.poller and not self._trouble else ServerMetrics()

    @property
    def model(self) -> str:
        """The model that the server serves; empty if unknown."""
        return self.source.info.model if self.source else ""

    @property
    def load(self) -> float:
        """The number of requests at the server: the number at the last poll, plus the change in `streams` after it."""
        metrics, poller, ours = self.metrics, self.poller, len(self.streams)
        if metrics.running is None or poller is None:
            return ours
        if self._streams_at_poll[0] != poller.answers:
            self._streams_at_poll = (poller.answers, ours)
        return max(ours, metrics.running + (metrics.waiting or 0) + ours - self._streams_at_poll[1])

    def report_failure(self, reason: str) -> None:
        """Record that the server did not answer a request, or stopped answering it."""
        if self.poller is not None:
            self.poller.report_failure(reason)

    async def until_unreachable(self) -> None:
        """Wait until the server stops answering polls."""
        if self.poller is not None:
            await self.poller.unreachable.wait()

    # ---- connection

    async def keep_connected(self) -> None:
        """Connect, and connect again after every failure or return of the server, until this task is cancelled."""
        failures = 0
        while True:
            try:
                await self._connect()
            except (EngineError, httpx.HTTPError, OSError) as error:
                self._trouble = trouble_of(error)
                wait = wait_after(failures + 1)
                failures += self._trouble != LOADING
                self._retry_at = time.monotonic() + wait
                self.tried.set()
                await asyncio.sleep(wait)
                continue
            failures, self._trouble = 0, ""
            self.tried.set()
            await self._returned.wait()

    def _on_return(self) -> None:
        """Called when the server answers again. It gets no requests until its model has been checked."""
        self._trouble = "it is back; its model is being checked"
        self._returned.set()

    async def _connect(self) -> None:
        """Find out the kind of server and open its sources; keep them if nothing has changed. Raises EngineError."""
        self._returned.clear()
        engine = self._engine
        async with asyncio.timeout(PATIENCE_S):
            if engine is None:
                info, engines = await look(self.url, self._key)
                engine = next(iter(engines), None)
                info = engine.info if engine is not None else info
            else:
                info = await probe(self.url, self._key)
        if info is not None and not info:
            raise EngineDead(LOADING)
        if info is not None:
            info = replace(info, began="")  # changes while the same server runs
        source = self.source
        same = source is not None and info == self._info
        if same and (not isinstance(source, OpenAISource) or await source.list_models() == source.models):
            return
        await self.disconnect()
        self.kind = "vllm" if engine is not None else "openai" if info is None else "minitui"
        try:
            if engine is not None:
                self.telemetry = VllmSource(engine, self._key, cache=self._cache, **WAITS)
            elif info is not None:
                self.telemetry = RemoteSource(self.url, self._key, self._cache, **WAITS)
            if self.telemetry is not None:
                await self.telemetry.start(no_progress)
            await self._open_source(engine)
        except (EngineError, OSError):
            await self.disconnect()
            raise
        if self.poller is None:
            raise EngineError("it is not a minitui server, but these chats are sent as token ids")
        self._info, self.poller.on_return = info, self._on_return

    async def _open_source(self, engine: Engine | None) -> None:
        """Open the source that answers requests, and the poller. Raises EngineError."""
        label = engine.label if engine is not None and engine.place is not None else None
        if self._codec is not None:
            self.source = OpenAISource(engine.api if engine else self.url, self._key, self._model, self._codec)
            if engine is not None and engine.place is not None:
                self.source.http.headers[RANK_HEADER] = str(engine.place)
            self.source.poller.engine = label
            async with asyncio.timeout(PATIENCE_S):
                await self.source.start(no_progress)
            self.poller = self.source.poller
            return
        if isinstance(self.telemetry, VllmSource):
            self.poller = MetricsPoller(self.telemetry.api, "/health", label)
        elif self.telemetry is not None:
            self.poller = MetricsPoller(self.telemetry.http, "/ready")
        if self.poller is not None:
            self.source = self.telemetry
            self._polling = asyncio.create_task(self.poller.run())

    async def disconnect(self) -> None:
        """Close the sources."""
        self._trouble = UNKNOWN
        self.tried.clear()
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        sources = {source for source in (self.telemetry, self.source) if source is not None}
        await asyncio.gather(*(source.close() for source in sources), return_exceptions=True)
        self.telemetry = self.source = self.poller = self._polling = None
