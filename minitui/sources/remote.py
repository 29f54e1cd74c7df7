"""A Source for a minitui server.

The application gets the same data as from its own engine process: records in order, deltas with token ids, snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import EngineDead, EngineError
from engine.params import PARAMETERS, SamplingParams
from engine.text.output import Delta
from engine.trace.records import Record
from minitui.protocol import ServerInfo
from minitui.settings import data_dir
from minitui.sources import remote_checks
from minitui.sources.base import Progress, Source, Stream
from minitui.sources.bounds import ANSWER
from minitui.sources.http import (
    AnswerLimit,
    check,
    close_client,
    httpx,
    load_json,
    normalise,
    open_client,
    parse,
    server_events,
    unreachable,
)
from minitui.sources.remote_checks import Refused, load_tokenizer, read_info
from minitui.sources.remote_records import RemoteRecords

GIVE_UP_S = 60.0  # a server that cannot be reached for this long counts as dead
LOADING_S = 600.0  # the longest wait for a server that loads its model


class RemoteStream(Stream):
    """An answer that the server is writing."""

    def __init__(self, source: RemoteSource, body: dict[str, Any]) -> None:
        super().__init__()
        self._source = source
        self._tag = str(body["tag"])
        self._cancelled = False
        self._task = source.keep(self._read(body))

    async def _read(self, body: dict[str, Any]) -> None:
        url = self._source.url
        limit = AnswerLimit(url)
        try:
            async with self._source.http.stream(
                "POST", "/minitui/submit", json=body, extensions=ANSWER.extension()
            ) as response:
                await check(response)
                async for _, data in server_events(response):
                    event = parse(data)
                    if "request" in event:
                        self.accept(*remote_checks.accepted(event))
                        if self._cancelled:
                            self.cancel()  # again: the first cancellation may have arrived before the request
                        continue
                    event = remote_checks.delta(event)
                    limit.add(event["text"])
                    delta = Delta(
                        self.request_id or 0, event["text"], event["ids"], event["finish_reason"], event["metrics"]
                    )
                    self.put(delta)
                    if delta.finish_reason:
                        return
            self.put(EngineDead(f"{url} ended the answer without a finish reason"))
        except Refused as error:
            self.put(EngineError(f"{url} does not answer like a minitui server of this version: {error}"))
        except EngineError as error:
            self.put(error)
        except (httpx.HTTPError, OSError) as error:
            self.put(unreachable(url, error))
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # unexpected JSON
            fault = f"{type(error).__name__}: {error}"
            self.put(EngineError(f"{url} does not answer like a minitui server of this version ({fault})"))
        except asyncio.CancelledError:
            self.put(EngineDead(f"the connection to {url} was closed"))
            raise

    def cancel(self) -> None:
        self._cancelled = True
        if not self._task.done():
            self._source.spawn(self._source.post("/minitui/cancel", {"tag": self._tag}))


class RemoteSource(Source):
    """The source for one minitui server."""

    missing = "connecting to the server"

    def __init__(
        self, url: str, key: str = "", cache: Path | None = None, give_up_s: float = GIVE_UP_S, watching: bool = True
    ) -> None:
        """`cache`: the directory for servers' tokenizers. `watching`: `start` also calls `watch`.

        Raises InvalidRequest if `url` is not an address.
        """
        super().__init__()
        self.url = normalise(url)
        self.http = open_client(self.url, key, client=uuid.uuid4().hex)
        self.records = RemoteRecords(self.http, self.url, give_up_s, self._died)
        self._cache = cache or data_dir() / "tokenizers"
        self._watching = watching

    # ---- start and end

    async def start(self, on_progress: Progress) -> None:
        """Connect, and wait while the server loads its model. Raises EngineError with a sentence for the user."""
        on_progress({"stage": "connect", "done": 0, "total": 0, "text": f"connecting to {self.url}"})
        with self._starting():
            try:
                info = await self._load_info(on_progress)
                directory = await load_tokenizer(self.http, self.url, info.tokenizer_files, self._cache)
                if self._watching:
                    await self.watch()
            except (httpx.HTTPError, OSError) as error:
                raise unreachable(self.url, error) from error
            self.info = replace(info, model_dir=str(directory), log_file=f"on the server {self.url}")

    async def _load_info(self, on_progress: Progress) -> ServerInfo:
        deadline = time.monotonic() + LOADING_S
        while True:
            response = await self.http.get("/minitui/info")
            if response.status_code == 404:
                raise EngineError(f"{self.url} is not a minitui server: it has no /minitui/info")
            try:
                return read_info(self.url, (await check(response)).content)
            except EngineDead as error:
                if time.monotonic() > deadline:
                    raise
                on_progress({"stage": "connect", "done": 0, "total": 0, "text": str(error)})
                await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Disconnect. If this client had closed the gate, the server opens it."""
        await self._stop()
        await close_client(self.http)

    async def _stop(self) -> None:
        await asyncio.gather(self.unwatch(), super()._stop())

    # ---- records

    async def watch(self) -> None:
        """Follow the server's records; returns when the stream begins.

        Raises EngineDead if the stream does not begin in time. A background task keeps trying even then.
        """
        await self.records.follow()

    async def unwatch(self) -> None:
        """Stop following the records. If this client had closed the gate, the server opens it."""
        await self.records.stop()

    @property
    def connection(self) -> str:
        return self.records.connection

    def drain_records(self) -> list[Record]:
        return self.records.drain()

    async def snapshot(self) -> dict[str, Any]:
        return await self.records.snapshot()

    # ---- requests

    def cannot_use(self, name: str) -> str:
        return "" if PARAMETERS[name].remote else f"a chat with a server cannot use {name}"

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> RemoteStream:
        """Ask for an answer; returns at once. If the server refuses the request, the stream raises the error."""
        values = self.sent(params, ("max_tokens",))
        return RemoteStream(self, {"tag": uuid.uuid4().hex, "ids": list(ids), "group": group, "params": values})

    async def control(self, verb: str, **arguments: Any) -> Any:
        return (await self.post("/minitui/control", {"action": verb, **arguments})).get("value")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON object; returns the JSON object of the answer. Raises EngineError."""
        try:
            response = await check(await self.http.post(path, json=body))
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(self.url, error) from error
        answer = load_json(response.content)
        return answer if isinstance(answer, dict) else {}

    def spawn(self, work: Any) -> None:
        """Run `work` in the background, and ignore its EngineErrors."""

        async def run() -> None:
            with contextlib.suppress(EngineError):
                await work

        self.keep(run())
