"""Keeps the engine's state by folding its records, and passes the records on to whoever watches.

One fold and one encoding serve all watchers. A watcher who is too slow loses records, never delays anybody, and learns
of it from the gap in their numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

from engine.errors import EngineError
from engine.process.client import EngineClient
from engine.trace.records import FIELDS, Record
from engine.trace.state import State
from minitui.server.metrics import Meters
from minitui.server.sse import KEEP_ALIVE, event
from minitui.trace.recorder import Recording

logger = logging.getLogger("minitui.server")

BUSY_S = 0.05  # between two looks while something happens
IDLE_S = 0.2
KEEP_ALIVE_S = 10.0
MAX_UNREAD = 8 << 20  # bytes kept for one watcher
MASKED = {"insert": (FIELDS["insert"].index("ids"),), "extend": (FIELDS["extend"].index("ids"),)}


class Watcher:
    """One reader of the record stream. `client`: the name that he gave himself, by which the gate may be his."""

    def __init__(self, client: str | None = None) -> None:
        self.client = client
        self.dropped = 0  # bytes given up
        self.closed = False
        self._unread: deque[bytes] = deque()
        self._size = 0
        self._wake = asyncio.Event()

    def put(self, frame: bytes) -> None:
        if self._size + len(frame) > MAX_UNREAD:
            self.dropped += self._size
            self._unread.clear()
            self._size = 0
        self._unread.append(frame)
        self._size += len(frame)
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """What has come, as it comes; a comment when nothing has for a while."""
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


class Hub:
    """Drains one engine client. `mask_id`: the token id that stands for every token when texts are hidden, from those
    who watch and in the recording."""

    def __init__(self, meters: Meters, mask_id: int | None = None, recording: Recording | None = None) -> None:
        self.meters = meters
        self.mask_id = mask_id
        self.recording = recording
        self.state: State | None = None
        self.watchers: set[Watcher] = set()
        self.began = 0  # raised with every engine: numbers of records begin anew
        self._origin = secrets.token_hex(4)
        self._client: EngineClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self, client: EngineClient) -> None:
        """Start with an engine that is up. Those who watch are told that everything is new."""
        await self.end()
        self._client = client
        self.meters.engine_began(client.info)
        self.state = State.from_snapshot(await client.snapshot())
        self.began += 1
        if self.recording is not None:
            self.recording.begin(client.info, self._masked(self.state.snapshot()), texts=self.mask_id is None)
        self.tell_all(self.greeting("began"))
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """The engine is gone."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self.pump()  # its last records
        self._task = self._client = self.state = None

    def greeting(self, name: str) -> bytes:
        """Which engine the next records are of, and after which of its records they come."""
        seq = self.state.seq if self.state is not None else 0
        return event({"began": self.engine, "seq": seq}, name)

    def watches(self, client: str | None) -> bool:
        """Has whoever calls himself so a record stream?"""
        return client is not None and any(watcher.client == client for watcher in self.watchers)

    @property
    def engine(self) -> str:
        """A name for the engine that runs now: another one has other record numbers."""
        return f"{self._origin}.{self.began}"

    def tell_all(self, frame: bytes) -> None:
        """Something other than records, to every watcher."""
        for watcher in self.watchers:
            watcher.put(frame)

    async def _run(self) -> None:
        while True:
            try:
                busy = self.pump()
                if self.state is None and self._client is not None:
                    self.state = State.from_snapshot(await self._client.snapshot())
                    busy = True
                    if self.recording is not None:
                        self.recording.resume(self._masked(self.state.snapshot()))
            except EngineError:
                return  # it died; the service starts another
            except Exception:
                logger.exception("the engine's records could not be followed: its state is asked for again")
                self.state, busy = None, False
            await asyncio.sleep(BUSY_S if busy else IDLE_S)

    def pump(self) -> bool:
        """Fold and pass on what has come; False if that was nothing."""
        if self._client is None:
            return False
        records = self._client.drain_records()
        state = self.state
        if not records or state is None:
            return bool(records)
        news: list[Record] = []
        for record in records:
            if record[0] <= state.seq:
                continue  # the snapshot knew it
            if record[0] != state.seq + 1:
                self.meters.lost.add(record[0] - state.seq - 1)
                logger.warning("records %d to %d were lost on the way", state.seq + 1, record[0] - 1)
                self.state = None  # a snapshot follows; watchers see the gap themselves
                break
            self.meters.observe(record, state)
            state.apply(record)
            news.append(record)
        if self.recording is not None:
            self.recording.feed((seq, t, kind, *self._mask(kind, rest)) for seq, t, kind, *rest in news)
        if news and self.watchers:
            frame = self.encode(news)
            for watcher in self.watchers:
                watcher.put(frame)
        return True

    def encode(self, records: Iterable[Record]) -> bytes:
        """Records as one event: a list of [seq, t, kind, fields...], t in microseconds' precision."""
        return event([[seq, round(t, 6), kind, *self._mask(kind, rest)] for seq, t, kind, *rest in records])

    def _mask(self, kind: str, fields: list[Any]) -> list[Any]:
        if self.mask_id is None:
            return fields
        for place in MASKED.get(kind, ()):
            fields[place] = [self.mask_id] * len(fields[place])
        if kind in ("refuse", "fail"):  # the reason may quote what was asked
            fields[1] = "hidden"
        elif kind == "finish" and str(fields[1]).startswith("error"):
            fields[1] = "error: hidden"
        return fields

    def snapshot(self) -> dict[str, Any] | None:
        """The state at a record's number: whatever a watcher is sent afterwards follows it without a gap."""
        self.pump()
        return None if self.state is None else self._masked(self.state.snapshot())

    def _masked(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        if self.mask_id is not None:
            for node in snapshot["nodes"].values():
                node["ids"] = [self.mask_id] * len(node["ids"])
        return snapshot


async def encode_snapshot(snapshot: dict[str, Any]) -> AsyncIterator[bytes]:
    """A snapshot as JSON in pieces, so that a large pool's does not hold up the loop."""
    nodes = snapshot.pop("nodes")
    head = json.dumps(snapshot, separators=(",", ":"))
    yield (head[:-1] + ',"nodes":{').encode()
    piece: list[str] = []
    size = 0
    for number, (node_id, node) in enumerate(nodes.items()):
        text = json.dumps(node, separators=(",", ":"))
        piece.append(f'{"," if number else ""}"{node_id}":{text}')
        size += len(text)
        if size > 1 << 16:
            yield "".join(piece).encode()
            piece, size = [], 0
            await asyncio.sleep(0)
    yield ("".join(piece) + "}}").encode()
