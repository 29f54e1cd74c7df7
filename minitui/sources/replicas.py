"""Several servers of one model as a Source. minitui/sources/routing.py chooses the replica of each request.

If every server is a minitui server, chats are sent as token ids. If one is not, chats are sent to all servers as
messages (`exact` is False). The state of every replica comes from its Prometheus page. The panels follow the records of
one minitui server at a time: `shown`.

A replica that is down is tried again at growing intervals, and gets requests when it is back. If a replica is lost
before the first piece of an answer, the request moves to the replica that routing.py chooses next. If the replica is
lost later, the answer ends with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.text.output import Delta
from engine.trace.records import Record
from minitui.sources import routing
from minitui.sources.base import Progress, Source, Stream
from minitui.sources.http import Overloaded, normalise
from minitui.sources.openai import OpenAISource, TextCodec
from minitui.sources.remote import LOADING_S, RemoteSource
from minitui.sources.replica import LOADING, Replica
from minitui.sources.routing import Opening
from minitui.sources.server_metrics import MetricsPoller
from minitui.sources.vllm import Engine


class ReplicaStream(Stream):
    """An answer from a replica. If the replica is lost before the answer begins, another replica answers."""

    def __init__(self, source: ReplicaSource, ids: list[int], params: SamplingParams, group: str) -> None:
        """Raises EngineDead if no replica can answer."""
        super().__init__()
        self._source, self._request = source, (ids, params, group)
        self._tried: dict[str, str] = {}  # address -> why this replica did not answer
        self._cancelled = False
        self._accepted = False
        self._losses = 0  # replicas that were lost after they had accepted the request
        self._begin()

    def _begin(self) -> None:
        self.replica = self._source.place(self._request[2], self._tried)
        self._inner = self._source.ask(self.replica, *self._request)
        self._accepted = False
        self.replica.streams[self] = self._request[2]

    def _move_on(self, error: EngineError) -> None:
        """Ask the next replica. Raises EngineDead if there is none, if the request was cancelled, or if two replicas
        were lost after they had accepted it."""
        replica = self.replica
        replica.streams.pop(self, None)
        self._tried[replica.url] = str(error)
        if isinstance(error, EngineDead):
            replica.report_failure(str(error))
            self._losses += self._accepted
        if self._cancelled or self._losses > 1:
            raise EngineDead(f"{replica.title} did not answer: {error}")
        self._begin()

    async def started(self) -> int:
        while True:
            try:
                return await self._accept()
            except (EngineDead, Overloaded) as error:
                self._move_on(error)
            except BaseException:
                self.replica.streams.pop(self, None)
                raise

    async def _accept(self) -> int:
        """Wait until the replica accepts the request. Raises EngineDead if the replica stops answering polls."""
        unreachable = asyncio.create_task(self.replica.until_unreachable())
        starting = asyncio.create_task(self._inner.started())
        try:
            await asyncio.wait({starting, unreachable}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                self._inner.cancel()
                raise EngineDead(self.replica.trouble or "it was down")
            number = starting.result()
            self._accepted = True
            return number
        finally:
            unreachable.cancel()
            starting.cancel()

    async def _iterate(self) -> AsyncIterator[Delta]:
        begun = False
        try:
            while not self.finish_reason:
                try:
                    async for delta in self._inner:
                        begun = begun or bool(delta.text or delta.ids)
                        if delta.finish_reason:
                            self.finish_reason, by = delta.finish_reason, self.replica
                            passed = [each.number for each in self._source.replicas if each.url in self._tried]
                            told = {"number": by.number, "name": by.name, "url": by.url, "passed": passed}
                            delta.metrics = {**(delta.metrics or {}), "replica": told}
                            by.streams.pop(self, None)  # before its reader is told that the answer has ended
                        yield delta
                except (EngineDead, Overloaded) as error:
                    if begun:
                        if isinstance(error, EngineDead):
                            self.replica.report_failure(str(error))
                        lost = f"{self.replica.title} was lost during this answer ({error})"
                        raise EngineDead(f"{lost}. /retry asks another replica.") from error
                    self._move_on(error)
                    await self.started()
        finally:
            self.replica.streams.pop(self, None)

    def cancel(self) -> None:
        self._cancelled = True
        self._inner.cancel()


UNDECIDED = "the model of the chats is not known yet: earlier replicas in the list have not answered"


class ReplicaSource(Source):
    """Several servers. `pins`: chat id -> address of the replica that the chat is pinned to. `shown`: the replica in
    the panels."""

    missing = "connecting to the servers"

    def __init__(
        self, servers: Sequence[str | Engine], key: str = "", model: str = "", exact: bool = True,
        cache: Path | None = None,
    ) -> None:
        """`servers`: addresses, or engines of vLLM. `model`: the chats' model; empty: that of the first usable replica.
        `key`: the API key of all servers. Raises InvalidRequest if one of `servers` is not an address, or if there are
        fewer than two of them."""
        super().__init__()
        different = list(dict.fromkeys(s if isinstance(s, Engine) else normalise(s) for s in servers))
        if len(different) < 2:
            raise InvalidRequest(f"replicas need at least two servers; this is one: {different[0]}", "connect")
        self.exact = exact
        self.codec = None if exact else TextCodec()
        wanted = "" if exact else model
        self.replicas = [Replica(n, one, key, wanted, self.codec, cache) for n, one in enumerate(different, 1)]
        self.shown: Replica | None = None
        self.pins: dict[str, str] = {}
        self.opening: Callable[[str], Opening] = lambda group: Opening(group)
        self._model = model
        self._connecting: list[asyncio.Task[None]] = []

    # ---- choosing a replica

    def reason_against(self, replica: Replica) -> str:
        """Returns why the replica cannot answer these chats; empty if it can."""
        if replica.trouble:
            return replica.trouble
        if not self.info:
            return UNDECIDED
        model = self.info.model
        source = replica.source
        if isinstance(source, OpenAISource):
            same = not source.models or model in source.models
        else:
            same = replica.model == model
        if not same:
            return f"it serves {replica.model}, but these chats use {model}"
        if self.exact and source is not None and source.info.model_dir != self.info.model_dir:
            return f"it serves {model}, but its tokenizer differs from the tokenizer of these chats"
        return ""

    @property
    def usable(self) -> list[Replica]:
        """The replicas that can answer these chats."""
        return [replica for replica in self.replicas if not self.reason_against(replica)]

    def find(self, text: str) -> Replica:
        """Returns the replica whose number or port is `text`, or whose address contains `text`. Raises InvalidRequest
        unless exactly one replica matches."""
        fits = [r for r in self.replicas if text == str(r.number)]
        if not fits:
            fits = [r for r in self.replicas if (r.url.endswith(f":{text}") if text.isdigit() else text in r.url)]
        if len(fits) == 1 and text:
            return fits[0]
        known = ", ".join(f"{r.number} {r.name}" for r in self.replicas)
        count = "more than one" if fits else "none"
        raise InvalidRequest(f"{text!r} matches {count} of the replicas: {known}", "replica")

    def place(self, group: str, tried: dict[str, str] | None = None) -> Replica:
        """Returns the replica for a chat's next answer. Raises EngineDead if no replica can answer. `tried`: the
        addresses that failed for this answer, each with the reason."""
        against = {r.url: (tried or {}).get(r.url) or self.reason_against(r) for r in self.replicas}
        by_url = {r.url: r for r in self.replicas}
        pinned = by_url.get(self.pins.get(group, ""))
        if pinned is not None:
            if against[pinned.url]:
                raise EngineDead(
                    f"this chat is pinned to {pinned.title}, which cannot answer: {against[pinned.url]}. "
                    "/unpin lets other replicas answer."
                )
            return pinned
        loads = {r.url: r.load for r in self.replicas if not against[r.url]}
        if not loads:
            reasons = "; ".join(f"{r.number} {r.name}: {against[r.url]}" for r in self.replicas)
            raise EngineDead(f"none of the {len(self.replicas)} replicas can answer ({reasons}). They are tried again.")
        opening = self.opening(group)
        return by_url[routing.order(opening.text or group, loads, opening.last)[0]]

    def route(self, group: str) -> tuple[int | None, str]:
        """Returns (number of the replica for the chat's next question, why); (None, error) if no replica can answer."""
        try:
            replica = self.place(group)
        except EngineDead as error:
            return None, str(error)
        if group in self.pins:
            return replica.number, "pinned"
        last = self.opening(group).last == replica.url
        return replica.number, "it wrote the last answer" if last else "by its prefix"

    def writer(self, group: str) -> Replica | None:
        """Returns the replica that is writing the chat's answer."""
        return next((each for each in self.replicas if group in each.streams.values()), None)

    def current(self, group: str) -> Replica | None:
        """Returns the replica that is writing the chat's answer. If no replica is writing, returns the replica to which
        the chat is pinned, or else the replica of its last answer. If that replica cannot answer now, returns the
        replica for the chat's next answer."""
        writing = self.writer(group)
        if writing is not None or not self.info:  # without info, no replica has answered yet
            return writing
        url = self.pins.get(group, "") or self.opening(group).last
        pinned_or_last = next((replica for replica in self.replicas if replica.url == url), None)
        if pinned_or_last is not None and not self.reason_against(pinned_or_last):
            return pinned_or_last
        try:
            return self.place(group)
        except EngineDead:
            return pinned_or_last

    def server_of(self, group: str) -> tuple[str, MetricsPoller | None]:
        """Returns (name, poller of the metrics) of the chat's current replica."""
        replica = self.current(group)
        return (f"{replica.number} {replica.url}", replica.poller) if replica is not None else ("no replica", None)

    # ---- start and end

    async def start(self, on_progress: Progress) -> None:
        """Connect to all replicas; returns when one can answer. Raises EngineError if none can be used."""
        on_progress({"stage": "connect", "done": 0, "total": 0, "text": f"connecting to {len(self.replicas)} replicas"})
        self._connecting = [asyncio.create_task(replica.keep_connected()) for replica in self.replicas]
        with self._starting():
            try:
                base = await self._first_usable(on_progress)
                assert base.source is not None
                self.info = replace(base.source.info, device=f"{len(self.replicas)} replicas")
                if base.telemetry is not None:
                    await self.watch(base)
            except EngineError:
                await self._stop()
                raise

    async def _first_usable(self, on_progress: Progress) -> Replica:
        """Returns the first usable replica in the order of the list. Raises EngineDead if there is none. Each replica
        gets PATIENCE_S for its first answer, so the choice does not depend on the order of the answers."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            for replica in self.replicas:
                if not replica.tried.is_set():
                    break  # wait: this replica may be usable, and it comes before the others
                if not replica.trouble and self._model in ("", replica.model):
                    return replica
            tried = all(r.tried.is_set() for r in self.replicas)
            if tried and not (any(r.trouble == LOADING for r in self.replicas) and waited < LOADING_S):
                break
            if tried:
                on_progress({"stage": "connect", "done": 0, "total": 0, "text": "the replicas are loading their model"})
            await asyncio.sleep(0.05)
        reasons = "; ".join(
            f"{r.number} {r.name}: {r.trouble or f'it serves {r.model}, not {self._model}'}" for r in self.replicas
        )
        raise EngineDead(f"none of the {len(self.replicas)} replicas can be used ({reasons})")

    async def _stop(self) -> None:
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        await asyncio.gather(*(replica.disconnect() for replica in self.replicas), return_exceptions=True)
        self._connecting, self.shown = [], None

    # ---- requests

    def cannot_use(self, name: str) -> str:
        """Returns the reason of the first replica that refuses the parameter: a chat may go to any of them."""
        return next((why for each in self.replicas if each.source and (why := each.source.cannot_use(name))), "")

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> ReplicaStream:
        """Ask for an answer. Raises EngineDead if no replica can give it."""
        return ReplicaStream(self, list(ids), params, group)

    def ask(self, replica: Replica, ids: list[int], params: SamplingParams, group: str) -> Stream:
        """Ask one replica; returns its stream."""
        assert replica.source is not None
        if isinstance(replica.source, OpenAISource):
            # The server may serve several models.
            replica.source.info = replace(replica.source.info, model=self.info.model)
        return replica.source.submit(ids, params, group)

    # ---- the panels

    async def watch(self, replica: Replica) -> None:
        """Let the panels follow this replica. Raises EngineError if it has no records."""
        if replica.telemetry is None:
            why = replica.trouble or "only minitui servers do"
            raise EngineError(f"{replica.title} does not publish the records of its engine: {why}")
        for other in self.replicas:
            if other is not replica and other.telemetry is not None:
                await other.telemetry.records.stop()
        self.shown = replica
        await replica.telemetry.records.follow()

    @property
    def _telemetry(self) -> RemoteSource | None:
        return self.shown.telemetry if self.shown is not None else None

    @property
    def connection(self) -> str:
        """Why the replica in the panels cannot be reached, as a sentence; empty if it can."""
        return self._telemetry.connection if self._telemetry is not None else ""

    def drain_records(self) -> list[Record]:
        """Returns the new records of the replica in the panels."""
        return self._telemetry.drain_records() if self._telemetry is not None else []

    @property
    def uncontrolled(self) -> str:
        if self._telemetry is None:
            return "only a minitui server can be controlled"
        return self._telemetry.uncontrolled

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Controls the replica in the panels. Raises InvalidRequest if there is none."""
        if self._telemetry is None:
            raise InvalidRequest(f"these servers cannot {verb.replace('_', ' ')}: {self.uncontrolled}", verb)
        return await self._telemetry.control(verb, **arguments)

    async def snapshot(self) -> dict[str, Any]:
        """Returns the state of the replica in the panels. Raises EngineError if there is none."""
        if self._telemetry is None:
            raise EngineError("these servers do not publish their state: only a minitui server does")
        return await self._telemetry.snapshot()
