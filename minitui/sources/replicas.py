"""A Source that is several servers of one model: replicas. Each request goes to one of them by
minitui/sources/routing.py.

If every server is a minitui server, chats travel as token ids and stay token-exact. If one is of another make, chats
travel as messages, to all of them (`exact` is False). Whatever a replica is, its vitals come from its Prometheus page;
the panels follow the records of one minitui server at a time, the one that is `shown`.

A request whose replica is lost goes to the next in order, as long as nothing of its answer has come; afterwards it ends
with a sentence. A replica that is away is tried again, more and more seldom, and takes requests when it is back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.trace.records import Record
from minitui.sources import routing
from minitui.sources.base import Progress
from minitui.sources.http import Overloaded, httpx, normalise, reason_of
from minitui.sources.openai import ForeignSource, TextCodec
from minitui.sources.remote import RemoteSource, introduce
from minitui.sources.server_metrics import BACKOFF_S, PATIENCE_S, Pulse, Vitals

LOADING_S = 600.0  # replicas may load their model for so long
LOADING = "it is loading its model"
UNKNOWN = "it has not answered yet"
UNDECIDED = "the model of the chats is not known yet: the replicas before it have not answered"


@dataclass(frozen=True)
class Opening:
    """What decides where a chat goes: the text it begins with, and the address that wrote its last answer."""

    text: str = ""
    last: str = ""


class Turn(Protocol):
    """A message of a chat, as minitui.chat.conversation.Message is one."""

    role: str
    text: str
    metrics: dict[str, Any]


class Conversation(Protocol):
    """A chat, as minitui.chat.conversation.Session is one."""

    system: str

    @property
    def messages(self) -> Sequence[Turn]: ...


def opening_of(session: Conversation) -> Opening:
    """Of a chat, as it stands."""
    first = next((m.text for m in session.messages if m.role == "user"), "")
    written = (m.metrics["replica"]["url"] for m in reversed(session.messages) if "replica" in m.metrics)
    return Opening(session.system or first, next(written, ""))


class Replica:
    """One server. `telemetry`: it as a minitui server; `asker`: it as what answers; `pulse`: how it is. None until it
    was reached."""

    def __init__(self, number: int, url: str, key: str, model: str, codec: TextCodec | None, cache: Path | None):
        """`codec`: of chats that travel as messages; None if they travel as token ids."""
        self.number, self.url = number, normalise(url)
        self.name = urlsplit(self.url).netloc
        self.kind = ""  # minitui | openai, once it is known
        self.telemetry: RemoteSource | None = None
        self.asker: RemoteSource | ForeignSource | None = None
        self.streams: set[ReplicaStream] = set()  # requests of ours that it has
        self.tried = asyncio.Event()  # it has been reached, or not, once
        self._key, self._model, self._codec, self._cache = key, model, codec, cache
        self._trouble = UNKNOWN
        self.pulse: Pulse | None = None
        self._beating: asyncio.Task[None] | None = None
        self._info: dict[str, Any] | None = None
        self._again_at = 0.0
        self._counted = (-1, 0)  # answers of its pulse, and our requests when the last of them came
        self._back = asyncio.Event()

    @property
    def title(self) -> str:
        """For sentences."""
        return f"replica {self.number} ({self.name})"

    @property
    def trouble(self) -> str:
        """A sentence while it cannot take requests, else empty."""
        return self._trouble or (self.pulse.trouble if self.pulse else "")

    @property
    def again_in(self) -> float:
        """Seconds until it is tried again."""
        at = self.pulse.again_at if self.pulse and not self._trouble else self._again_at
        return max(0.0, at - time.monotonic())

    @property
    def vitals(self) -> Vitals:
        """What it tells of itself."""
        return self.pulse.vitals if self.pulse and not self._trouble else Vitals()

    @property
    def model(self) -> str:
        """The model that it serves, or would have to; empty if it is not known."""
        return str(self.asker.info.get("model", "")) if self.asker else ""

    @property
    def load(self) -> float:
        """Requests that it has now: what it told, and what we have sent or taken back since."""
        told, pulse, ours = self.vitals, self.pulse, len(self.streams)
        if told.running is None or pulse is None:
            return ours
        if self._counted[0] != pulse.beats:
            self._counted = (pulse.beats, ours)
        return max(ours, told.running + (told.waiting or 0) + ours - self._counted[1])

    def doubt(self, reason: str) -> None:
        """A request was lost there."""
        if self.pulse is not None:
            self.pulse.doubt(reason)

    async def away(self) -> None:
        """Returns when it does not answer."""
        if self.pulse is not None:
            await self.pulse.away.wait()

    # ---- life

    async def tend(self) -> None:
        """Reach it, and reach it again when it was away; until cancelled."""
        failures = 0
        while True:
            try:
                await self._meet()
            except (EngineError, httpx.HTTPError, OSError) as error:
                slow = isinstance(error, TimeoutError)
                self._trouble = f"it does not answer within {PATIENCE_S:g} s" if slow else reason_of(error)
                wait = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(0.8, 1.2)
                failures += self._trouble != LOADING
                self._again_at = time.monotonic() + wait
                self.tried.set()
                await asyncio.sleep(wait)
                continue
            failures, self._trouble = 0, ""
            self.tried.set()
            await self._back.wait()

    def _returned(self) -> None:
        """It answers again: is it still what it was?"""
        self._trouble = "it is back, and is asked what it serves"
        self._back.set()

    async def _meet(self) -> None:
        """Ask what it is, and make what talks to it; keep that if it is what it was. Raises EngineError."""
        self._back.clear()
        async with asyncio.timeout(PATIENCE_S):
            info = await introduce(self.url, self._key)
        if info == {}:
            raise EngineDead(LOADING)
        if info is not None:
            del info["began"]  # another engine of the same kind will do
        if self.asker is not None and info == self._info and await self._same_models():
            return
        await self.leave()
        self.kind = "openai" if info is None else "minitui"
        try:
            if info is not None:
                self.telemetry = RemoteSource(self.url, self._key, self._cache, float("inf"), watching=False)
                await self.telemetry.start(lambda progress: None)
            if self._codec is not None:
                self.asker = ForeignSource(self.url, self._key, self._model, self._codec)
                async with asyncio.timeout(PATIENCE_S):
                    await self.asker.start(lambda progress: None)
                self.pulse = self.asker.pulse
            elif self.telemetry is not None:
                self.asker = self.telemetry
                self.pulse = Pulse(self.telemetry.http, "/ready")
                self._beating = asyncio.create_task(self.pulse.run())
        except (EngineError, OSError):
            await self.leave()
            raise
        if self.pulse is None:
            raise EngineError("it is no minitui server, and the chats here travel in token ids, which only those take")
        self._info, self.pulse.on_return = info, self._returned

    async def _same_models(self) -> bool:
        asker = self.asker
        return not isinstance(asker, ForeignSource) or await asker.list_models() == asker.models

    async def leave(self) -> None:
        """Let go of it."""
        self._trouble = UNKNOWN
        self.tried.clear()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        sources = {source for source in (self.telemetry, self.asker) if source is not None}
        await asyncio.gather(*(source.close() for source in sources), return_exceptions=True)
        self.telemetry = self.asker = self.pulse = self._beating = None


class ReplicaStream:
    """An answer being written by one replica; by the next in order if the first is lost before it has begun."""

    def __init__(self, source: ReplicaSource, ids: list[int], params: SamplingParams, group: str) -> None:
        """Raises EngineDead if nobody can answer."""
        self.finish_reason = ""
        self._source, self._request = source, (ids, params, group)
        self._tried: dict[str, str] = {}  # address -> why it did not answer
        self._cancelled = False
        self._accepted = False
        self._losses = 0  # replicas that were lost after they had taken the request
        self._begin()

    def _begin(self) -> None:
        self.replica = self._source.place(self._request[2], self._tried)
        self._inner = self._source.ask(self.replica, *self._request)
        self._accepted = False
        self.replica.streams.add(self)

    def _move_on(self, error: EngineError) -> None:
        """Ask the next replica. Raises if there is none, or if this request seems to end whoever takes it."""
        replica = self.replica
        replica.streams.discard(self)
        self._tried[replica.url] = str(error)
        if isinstance(error, EngineDead):
            replica.doubt(str(error))
            self._losses += self._accepted
        if self._cancelled or self._losses > 1:
            raise EngineDead(f"{replica.title} did not answer: {error}")
        self._begin()

    async def started(self) -> int:
        """The engine's id of this request, once a replica has accepted it; raises what the iteration would."""
        while True:
            try:
                return await self._accept()
            except (EngineDead, Overloaded) as error:
                self._move_on(error)
            except BaseException:
                self.replica.streams.discard(self)
                raise

    async def _accept(self) -> int:
        """Wait for the replica to take the request, but not when it has fallen silent."""
        away = asyncio.create_task(self.replica.away())
        starting = asyncio.create_task(self._inner.started())
        try:
            await asyncio.wait({starting, away}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                self._inner.cancel()
                raise EngineDead(self.replica.trouble or "it was away")
            number = starting.result()
            self._accepted = True
            return number
        finally:
            away.cancel()
            starting.cancel()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Any]:
        begun = False
        try:
            while not self.finish_reason:
                try:
                    async for delta in self._inner:
                        begun = begun or bool(delta.text or delta.ids)
                        if delta.finish_reason:
                            self.finish_reason = delta.finish_reason
                            delta.metrics = {**(delta.metrics or {}), "replica": self._mark()}
                        yield delta
                except (EngineDead, Overloaded) as error:
                    if begun:
                        if isinstance(error, EngineDead):
                            self.replica.doubt(str(error))
                        lost = f"{self.replica.title} was lost while it wrote this ({error}). /retry asks another."
                        raise EngineDead(lost) from error
                    self._move_on(error)
                    await self.started()
        finally:
            self.replica.streams.discard(self)

    def _mark(self) -> dict[str, Any]:
        """Who has answered, for the metrics; `passed`: the numbers of those that should have."""
        answered = self.replica
        passed = [replica.number for replica in self._source.replicas if replica.url in self._tried]
        return {"number": answered.number, "name": answered.name, "url": answered.url, "passed": passed}

    def cancel(self) -> None:
        """End it soon; harmless when it has ended."""
        self._cancelled = True
        self._inner.cancel()


class ReplicaSource:
    """Several servers. `pins`: the address that a chat is held to, by the chat's id; `shown`: whose panels are seen."""

    def __init__(
        self, urls: list[str], key: str = "", model: str = "", exact: bool = True, cache: Path | None = None
    ) -> None:
        """`model`: the one that chats are with; by default that of the first in order that does not count as away,
        however soon the others answer. `key`: for all of them. Raises InvalidRequest if one of `urls` is none, or
        there are fewer than two."""
        addresses = list(dict.fromkeys(normalise(url) for url in urls))
        if len(addresses) < 2:
            raise InvalidRequest(f"replicas are at least two servers; this is one: {', '.join(addresses)}", "connect")
        self.exact = exact
        self.codec = None if exact else TextCodec()
        wanted = "" if exact else model
        self.replicas = [Replica(n, url, key, wanted, self.codec, cache) for n, url in enumerate(addresses, 1)]
        self.info: dict[str, Any] = {}
        self.error: str | None = None
        self.shown: Replica | None = None
        self.pins: dict[str, str] = {}
        self.opening: Callable[[str], Opening] = lambda group: Opening(group)
        self._model = model
        self._ready = asyncio.Event()
        self._tending: list[asyncio.Task[None]] = []

    # ---- which

    def reason_against(self, replica: Replica) -> str:
        """Why it cannot answer the chats here; empty if it can."""
        if replica.trouble:
            return replica.trouble
        if not self.info:
            return UNDECIDED
        model = str(self.info["model"])
        asker = replica.asker
        if isinstance(asker, ForeignSource):
            same = not asker.models or model in asker.models
        else:
            same = replica.model == model
        if not same:
            return f"it serves {replica.model}, and the chats here are with {model}: a chat needs one model"
        if self.exact and asker is not None and asker.info["model_dir"] != self.info["model_dir"]:
            return f"its {model} has another tokenizer than that of the chats here"
        return ""

    @property
    def usable(self) -> list[Replica]:
        """Those that can answer the chats here."""
        return [replica for replica in self.replicas if not self.reason_against(replica)]

    def find(self, text: str) -> Replica:
        """By its number, or its address or a part of that; of digits alone, by its port. Raises InvalidRequest."""
        fits = [r for r in self.replicas if text == str(r.number)]
        if not fits:
            fits = [r for r in self.replicas if (r.url.endswith(f":{text}") if text.isdigit() else text in r.url)]
        if len(fits) == 1 and text:
            return fits[0]
        known = ", ".join(f"{r.number} {r.name}" for r in self.replicas)
        raise InvalidRequest(f"{text!r} is {'more than one' if fits else 'none'} of the replicas: {known}", "replica")

    def place(self, group: str, tried: dict[str, str] | None = None) -> Replica:
        """The replica for the next answer of a chat. `tried`: those that did not, and why. Raises EngineDead."""
        against = {r.url: (tried or {}).get(r.url) or self.reason_against(r) for r in self.replicas}
        by_url = {r.url: r for r in self.replicas}
        pinned = by_url.get(self.pins.get(group, ""))
        if pinned is not None:
            if against[pinned.url]:
                raise EngineDead(
                    f"this chat is pinned to {pinned.title}, which cannot answer: {against[pinned.url]}. "
                    "/unpin lets the others answer."
                )
            return pinned
        loads = {r.url: r.load for r in self.replicas if not against[r.url]}
        if not loads:
            reasons = "; ".join(f"{r.number} {r.name}: {against[r.url]}" for r in self.replicas)
            raise EngineDead(f"none of the {len(self.replicas)} replicas can answer ({reasons}). They are tried again.")
        opening = self.opening(group)
        return by_url[routing.order(opening.text or group, loads, opening.last)[0]]

    # ---- life

    async def start(self, on_progress: Progress) -> None:
        """Connect to all of them; returns when one can answer. Raises EngineError with a sentence if none ever will."""
        self.error = None
        on_progress({"stage": "connect", "done": 0, "total": 0, "text": f"connecting to {len(self.replicas)} replicas"})
        self._tending = [asyncio.create_task(replica.tend()) for replica in self.replicas]
        try:
            base = await self._first(on_progress)
            assert base.asker is not None
            self.info = {**base.asker.info, "device": f"{len(self.replicas)} replicas"}
            if base.telemetry is not None:
                await self.watch(base)
        except EngineError as error:
            self.error = str(error)
            await self._stop()
            raise
        finally:
            self._ready.set()

    async def _first(self, on_progress: Progress) -> Replica:
        """The first in order that can be used. One that has not answered yet is waited for, up to PATIENCE_S, and so
        are those before any other: which one this is does not depend on the order of their answers."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            for replica in self.replicas:
                if not replica.tried.is_set():
                    break  # it may be the one
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

    async def ready(self) -> None:
        """Return when it can answer; raises EngineDead if it never will."""
        await self._ready.wait()
        if self.error is not None:
            raise EngineDead(self.error)

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Never called: replicas that are away are tried again, and each answer tells for itself who was there."""

    async def restart(self, on_progress: Progress) -> None:
        """Connect again."""
        self._ready.clear()
        await self._stop()
        await self.start(on_progress)

    async def close(self) -> None:
        """Leave all of them."""
        await self._stop()

    async def _stop(self) -> None:
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        await asyncio.gather(*(replica.leave() for replica in self.replicas), return_exceptions=True)
        self._tending, self.shown = [], None

    # ---- asking

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> ReplicaStream:
        """Ask for an answer. Raises EngineDead if no replica can give it."""
        return ReplicaStream(self, list(ids), params, group)

    def ask(self, replica: Replica, ids: list[int], params: SamplingParams, group: str) -> Any:
        """Ask one replica; its stream."""
        assert replica.asker is not None
        if isinstance(replica.asker, ForeignSource):
            replica.asker.info["model"] = self.info["model"]  # one of those that it lists
        return replica.asker.submit(ids, params, group)

    # ---- the panels

    async def watch(self, replica: Replica) -> None:
        """Let the panels follow this one. Raises EngineError if it does not tell."""
        if replica.telemetry is None:
            why = replica.trouble or "only a minitui server does"
            raise EngineError(f"{replica.title} does not tell what its engine does: {why}")
        for other in self.replicas:
            if other is not replica and other.telemetry is not None:
                await other.telemetry.look_away()
        self.shown = replica
        await replica.telemetry.look()

    @property
    def _telemetry(self) -> RemoteSource | None:
        return self.shown.telemetry if self.shown is not None else None

    @property
    def connection(self) -> str:
        """A sentence while the panels' replica cannot be reached, else empty."""
        return self._telemetry.connection if self._telemetry is not None else ""

    def drain_records(self) -> list[Record]:
        """Those of the replica that is shown."""
        return self._telemetry.drain_records() if self._telemetry is not None else []

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Of the replica that is shown; refused if none is."""
        if self._telemetry is None:
            what = verb.replace("_", " ")
            raise InvalidRequest(f"these servers cannot {what}: only a minitui server can be controlled", verb)
        return await self._telemetry.control(verb, **arguments)

    async def snapshot(self) -> dict[str, Any]:
        """Of the replica that is shown; refused if none is."""
        if self._telemetry is None:
            raise EngineError("these servers do not tell their state: only a minitui server does")
        return await self._telemetry.snapshot()
