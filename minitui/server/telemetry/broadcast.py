"""Applies the engine's records to a state, and sends the records to all watchers. Each record is applied once and
encoded once for all watchers. A watcher that is too slow loses records and notices the gap in the record numbers; it
does not delay the other watchers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from engine.errors import EngineError
from engine.metrics.metrics import Metrics
from engine.process.client import EngineClient
from engine.trace.kind import KINDS, seq_of
from engine.trace.records import Record
from engine.trace.state import State
from minitui.server.sse import KEEP_ALIVE, event
from minitui.trace.lines import snapshot_json
from minitui.trace.recorder import Recording

logger = logging.getLogger("minitui.server")

BUSY_S = 0.05  # seconds between two polls while records arrive
IDLE_S = 0.2  # seconds between two polls while no records arrive
KEEP_ALIVE_S = 10.0
MAX_UNREAD = 8 << 20  # maximum bytes queued for one watcher
# Kind of record -> the place of the field with token ids.
MASKED = {name: kind.fields.index("ids") for name, kind in KINDS.items() if "ids" in kind.fields}


class Watcher:
    """One reader of the record stream. `client`: its X-Minitui-Client header; compared with `gate_owner`."""

    def __init__(self, client: str | None = None) -> None:
        self.client = client
        self.dropped = 0  # bytes dropped so far
        self.closed = False
        self._unread: deque[bytes] = deque()
        self._size = 0
        self._wake = asyncio.Event()

    def put(self, frame: bytes) -> None:
        """Queue a frame. If the queue is full, drop all queued frames first."""
        if self._size + len(frame) > MAX_UNREAD:
            self.dropped += self._size
            self._unread.clear()
            self._size = 0
        self._unread.append(frame)
        self._size += len(frame)
        self._wake.set()

    def close(self) -> None:
        """End the iterator `frames` after the frames that are queued now."""
        self.closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yields the queued frames as they arrive; if none arrives for KEEP_ALIVE_S, yields a comment."""
        while True:
            while self._unread:
                frames = b"".join(self._unread)
                self._unread.clear()
                self._size = 0
                yield frames
            if self.closed:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._wake.wait()
            except TimeoutError:
                yield KEEP_ALIVE


class Broadcast:
    """Drains the records of one engine client. `mask_id`: replaces every token id for watchers and in the recording, so
    that texts stay hidden; None: not hidden."""

    def __init__(self, metrics: Metrics, mask_id: int | None = None, recording: Recording | None = None) -> None:
        self.metrics = metrics
        self.mask_id = mask_id
        self.recording = recording
        self.state: State | None = None
        self.watchers: set[Watcher] = set()
        self.engine_count = 0  # engines broadcast so far; the record numbers of each engine start at 0
        self._origin = secrets.token_hex(4)
        self._client: EngineClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self, client: EngineClient, model: str = "") -> None:
        """Start to broadcast a running engine, and tell the watchers that the record numbers start at 0 again. `model`:
        its name in recordings; empty: the engine's name for the model."""
        await self.end()
        self._client = client
        self.metrics.engine_began(client.info)
        self.state = State.from_snapshot(await client.snapshot())
        self.engine_count += 1
        if self.recording is not None:
            info = replace(client.info, model=model or client.info.model)
            self.recording.begin(info, self._masked(self.state.snapshot()), texts=self.mask_id is None)
        self.send_all(self.greeting("began"))
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Send the last records of an engine that has ended, and stop its broadcast."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self.pump()
        self._task = self._client = self.state = None

    def greeting(self, name: str) -> bytes:
        """Returns an event with the engine's name and the number of its last record."""
        seq = self.state.seq if self.state is not None else 0
        return event({"began": self.engine, "seq": seq}, name)

    def watches(self, client: str | None) -> bool:
        """Returns whether this client has an open record stream."""
        return client is not None and any(watcher.client == client for watcher in self.watchers)

    @property
    def engine(self) -> str:
        """The name of the running engine. Record numbers are unique only together with this name."""
        return f"{self._origin}.{self.engine_count}"

    def send_all(self, frame: bytes) -> None:
        """Queue a frame for every watcher."""
        for watcher in self.watchers:
            watcher.put(frame)

    async def _run(self) -> None:
        while True:
            try:
                busy = self.pump()
                if self.state is None and self._client is not None:
                    self.state = State.from_snapshot(await self._client.snapshot())
                    self.metrics.records_lost()
                    busy = True
                    if self.recording is not None:
                        self.recording.resume(self._masked(self.state.snapshot()))
            except EngineError:
                return  # the engine died; the service restarts it
            except Exception:
                logger.exception("the engine's records do not fit its state: a new snapshot is requested")
                self.state, busy = None, False
            await asyncio.sleep(BUSY_S if busy else IDLE_S)

    def pump(self) -> bool:
        """Apply the new records and send them to the watchers; return whether any records arrived."""
        if self._client is None:
            return False
        records = self._client.drain_records()
        state = self.state
        if not records or state is None:
            return bool(records)
        new: list[Record] = []
        for record in records:
            seq = seq_of(record)
            if seq <= state.seq:
                continue  # the state already includes this record
            if seq != state.seq + 1:
                self.metrics.lost.add(seq - state.seq - 1)
                logger.warning("records %d to %d were lost", state.seq + 1, seq - 1)
                self.state = None  # `_run` requests a snapshot; watchers notice the gap themselves
                break
            self.metrics.observe(record, state)
            state.apply(record)
            new.append(record)
        if self.recording is not None:
            self.recording.feed((seq, t, kind, *self._mask(kind, rest)) for seq, t, kind, *rest in new)
        if new and self.watchers:
            self.send_all(self.encode(new))
        return True

    def encode(self, records: Iterable[Record]) -> bytes:
        """Returns the records as one event: a list of [seq, t, kind, fields...], with t rounded to microseconds."""
        return event([[seq, round(t, 6), kind, *self._mask(kind, rest)] for seq, t, kind, *rest in records])

    def _mask(self, kind: str, fields: list[Any]) -> list[Any]:
        if self.mask_id is None:
            return fields
        if (place := MASKED.get(kind)) is not None:
            fields[place] = [self.mask_id] * len(fields[place])
        if kind in ("refuse", "fail"):  # the reason may quote the prompt
            fields[1] = "hidden"
        elif kind == "finish" and str(fields[1]).startswith("error"):
            fields[1] = "error: hidden"
        return fields

    def snapshot(self) -> dict[str, Any] | None:
        """Returns a snapshot, or None without an engine. The next records that watchers get follow it without a gap."""
        self.pump()
        return None if self.state is None else self._masked(self.state.snapshot())

    def _masked(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        if self.mask_id is not None:
            for node in snapshot["nodes"].values():
                node["ids"] = [self.mask_id] * len(node["ids"])
        return snapshot


async def encode_snapshot(snapshot: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yields a snapshot as JSON in pieces, so that a large pool does not block the event loop."""
    piece: list[str] = []
    size = 0
    for text in snapshot_json(snapshot):
        piece.append(text)
        size += len(text)
        if size > 1 << 16:
            yield "".join(piece).encode()
            piece, size = [], 0
            await asyncio.sleep(0)
    yield "".join(piece).encode()
