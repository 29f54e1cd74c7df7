"""A Source for a minitui server, which follows its records.

The application gets the same data as from its own engine process: records in order, deltas with token ids, snapshots.

A lost connection is opened again. Records that were missed in the meantime leave a gap in the record numbers, and a new
snapshot is needed. If the server has restarted its engine, the record numbers start at 0 again. An offset is then added
to them, so that they continue after the numbers already seen, with a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import EngineDead, EngineError
from engine.params import PARAMETERS, SamplingParams
from engine.text.output import Delta
from engine.trace.kind import Record, seq_of
from minitui.protocol import ServerInfo
from minitui.settings import data_dir
from minitui.sources import remote_checks
from minitui.sources.base import Progress, Source
from minitui.sources.http import (
    CONNECT_S,
    LARGE,
    RECORDS,
    ServerStream,
    check,
    close_client,
    httpx,
    load_json,
    normalise,
    open_client,
    parse,
    reason_of,
    server_events,
    unreachable,
)
from minitui.sources.remote_checks import Watch, load_tokenizer, read_info

MAX_RECORDS = 200_000  # kept while the reader does not drain them
AT_ONCE = 2_000  # records checked per drain; several times as many as arrive per frame at the highest rate
CATCH_UP_S = 1.0  # the longest time that a snapshot waits for the records before it
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0)
CONNECTED_S = 15.0  # within this time the record stream must begin
TIMEOUT = httpx.Timeout(22.0, connect=CONNECT_S)  # the record stream has at least a comment every 10 s


class RemoteRecords:
    """The record stream of one server, checked. `connection`: the problem while the stream is down, else empty."""

    def __init__(self, http: httpx.AsyncClient, url: str, give_up_s: float, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called with a sentence when the server is unreachable for `give_up_s`, or sends invalid data."""
        self.connection = ""
        self._http, self._url = http, url
        self._give_up_s, self._on_lost = give_up_s, on_lost
        self._following: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._unchecked: deque[Record] = deque(maxlen=MAX_RECORDS)
        self._checked: list[Record] = []
        self._watch: Watch | None = None  # the state that records are checked against; None: a snapshot is needed
        self._snapshots = 0  # snapshots that are requested but not received; meanwhile no records are drained
        self._engine: str | None = None  # the server's name for its engine; None before the first greeting
        self._offset = 0  # added to the server's record numbers
        self._seq = 0  # number of the last record, with the offset

    @property
    def following(self) -> bool:
        """True while the stream is followed."""
        return self._following is not None

    @property
    def backlog(self) -> int:
        """The number of records that were received and not yet drained."""
        return len(self._unchecked) + len(self._checked)

    async def follow(self) -> None:
        """Follow the stream; returns when it begins. Raises EngineDead if the stream does not begin within CONNECTED_S;
        the task that follows it keeps trying."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(CONNECTED_S):
                await self._connected.wait()
        except TimeoutError:
            raise EngineDead(f"{self._url} does not stream its records: {self.connection}") from None

    async def stop(self) -> None:
        """Stop following. If this client had closed the gate, the server opens it."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        self._connected.clear()
        self._forget()
        self.connection = ""

    def _forget(self) -> None:
        self._unchecked.clear()
        self._checked.clear()
        self._watch = None

    async def _follow(self) -> None:
        """Read the record stream, and connect again when it ends."""
        lost_at: float | None = None
        attempt = 0
        while True:
            try:
                stream = self._http.stream("GET", "/minitui/records", timeout=TIMEOUT, extensions=RECORDS)
                async with stream as response:
                    await check(response)
                    async for name, data in server_events(response, quiet_s=None):
                        self._take(name, load_json(data))
                        lost_at, attempt = None, 0
                reason = "the server closed the connection"
            except ValueError as error:
                self._refuse(error)
                return
            except (httpx.HTTPError, OSError) as error:
                reason = reason_of(error)
            except EngineError as error:
                reason = str(error)
            lost_at = lost_at or time.monotonic()
            lost_s = time.monotonic() - lost_at
            self.connection = f"no connection to {self._url} for {lost_s:.0f} s ({reason}); trying again"
            if lost_s > self._give_up_s:
                self._on_lost(f"{self._url} has not been reached for {lost_s:.0f} s: {reason}")
                return
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)] * random.uniform(0.7, 1.3))
            attempt += 1

    def _refuse(self, error: ValueError) -> EngineError:
        """Stop following a server that sends invalid data; returns the error for the caller."""
        sentence = f"{self._url} sends data that cannot be shown: {error}"
        self._forget()
        if self._following is not None and self._following is not asyncio.current_task():
            self._following.cancel()
        self.connection = sentence
        self._on_lost(sentence)
        return EngineError(sentence)

    def _take(self, name: str, data: Any) -> None:
        if name in ("hello", "began"):
            self._greet(*remote_checks.greeting(data))
            return
        for record in remote_checks.records(data):
            seq, *rest = record
            self._seq = seq + self._offset
            self._unchecked.append((self._seq, *rest))

    def _greet(self, engine: str, seq: int) -> None:
        """Begin a stream that continues after record `seq` of `engine`. Missed records leave a gap in the numbers."""
        first = self._engine is None
        if first:
            self._seq = seq
        elif engine != self._engine:
            self._offset = self._seq + 2  # the new engine's numbers continue after ours, with a gap
        elif seq + self._offset != self._seq:
            self._offset += 1  # a single missed record must leave a gap, too
        if not first and seq + self._offset != self._seq:
            self._seq = seq + self._offset
            # This record changes nothing. It makes the gap visible even if no other record follows.
            self._unchecked.append((self._seq, 0.0, "refuse", "", "the connection to the server was lost"))
        self._engine, self.connection = engine, ""
        self._connected.set()

    def drain(self) -> list[Record]:
        """Returns the records since the last call, at most about AT_ONCE of them. Returns none before the first
        snapshot and while a snapshot is being requested. After a gap, returns the first record after the gap, and then
        none until the next snapshot."""
        if self._snapshots:
            return []
        self._check()
        records, self._checked = self._checked, []
        return records

    def _check(self) -> None:
        """Check the next AT_ONCE of the received records against the state that they change."""
        watch = self._watch
        if watch is None:
            return
        try:
            for _ in range(min(AT_ONCE, len(self._unchecked))):
                record = self._unchecked.popleft()
                if seq_of(record) <= watch.state.seq:
                    continue
                self._checked.append(record)
                if seq_of(record) > watch.state.seq + 1:
                    self._watch = None
                    return
                watch.take(record)
        except ValueError as error:
            self._refuse(error)

    async def _caught_up(self, seq: int) -> bool:
        """Wait briefly for the record `seq`; returns whether it has arrived."""
        end = time.monotonic() + CATCH_UP_S
        while self._watch is not None and self._watch.state.seq < seq and time.monotonic() < end:
            self._check()
            await asyncio.sleep(0 if self._unchecked else 0.02)
        return self._watch is not None and self._watch.state.seq >= seq

    async def snapshot(self) -> dict[str, Any]:
        """Returns the engine's state after the record with the number "seq". The next drained records may include
        records before that number."""
        self._snapshots += 1
        try:
            for _ in range(100):
                snapshot = await self._request_snapshot()
                if snapshot.pop("began") == self._engine:
                    snapshot["seq"] += self._offset
                    for node in snapshot["nodes"].values():
                        node["last_used"] += self._offset
                    if await self._caught_up(snapshot["seq"]) and self._watch is not None:
                        return self._watch.state.snapshot()  # the records drained later follow this state
                    self._watch = Watch(snapshot)
                    return snapshot
                await asyncio.sleep(0.1)  # the engine was restarted: wait for its greeting
            raise EngineDead(f"{self._url} keeps restarting its engine")
        except ValueError as error:
            raise self._refuse(error) from error
        finally:
            self._snapshots -= 1

    async def _request_snapshot(self) -> dict[str, Any]:
        try:
            response = await check(await self._http.get("/minitui/snapshot", extensions=LARGE))
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(self._url, error) from error
        return remote_checks.snapshot(load_json(response.content))


GIVE_UP_S = 60.0  # a server that cannot be reached for this long counts as dead
LOADING_S = 600.0  # the longest wait for a server that loads its model


class RemoteStream(ServerStream):
    """An answer that the server is writing."""

    unlike = "does not answer like a minitui server of this version: {}"

    def __init__(self, source: RemoteSource, body: dict[str, Any]) -> None:
        super().__init__(source, source.http, source.url, "/minitui/submit", body)
        self._source, self._tag = source, str(body["tag"])
        self._cancelling = self._finished = False

    def _event(self, data: str) -> bool:
        event = parse(data)
        if "request" in event:
            self.accept(*remote_checks.accepted(event))
            if self._cancelling:
                self.cancel()  # again: the first cancellation may have arrived before the request
            return False
        piece = remote_checks.delta(event)
        self._count(piece["text"])
        delta = Delta(self.request_id or 0, piece["text"], piece["ids"], piece["finish_reason"], piece["metrics"])
        self._finished = bool(delta.finish_reason)
        self.put(delta)
        return self._finished

    async def _complete(self) -> None:
        if not self._finished:
            raise EngineDead(f"{self._url} ended the answer without a finish reason")

    def cancel(self) -> None:
        self._cancelling = True
        if not self._task.done():
            self._source.spawn(self._source.post("/minitui/cancel", {"tag": self._tag}))


class RemoteSource(Source):
    """The source for one minitui server."""

    missing = "connecting to the server"

    def __init__(
        self, url: str, key: str = "", cache: Path | None = None, give_up_s: float = GIVE_UP_S, watching: bool = True
    ) -> None:
        """`cache`: the directory for servers' tokenizers. `watching`: `start` also follows the records. Raises
        InvalidRequest if `url` is not an address."""
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
                    await self.records.follow()
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
        await asyncio.gather(self.records.stop(), super()._stop())

    # ---- records

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
