"""A Source for vLLM with minitui's recorder: chats use vLLM's own endpoint, records come from the recorder's telemetry.

`find` looks for the telemetry on the port after vLLM's (minitui/vllm/ports.py); it names the ports of the other data
parallel ranks. Prompts and replies are token ids. A request's header X-Request-Id names its chat, and the records then
have this name as its group. RANK_HEADER names the rank that answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineError, InvalidRequest
from engine.params import PARAMETERS, RECOMMENDED, SamplingParams
from engine.trace.kind import Reader, Record, kind_of, named
from minitui.protocol import MOST_RANKS, ServerInfo
from minitui.sources.base import Progress
from minitui.sources.http import check, close_client, httpx, load_json, normalise, open_client
from minitui.sources.openai import CompletionStream
from minitui.sources.remote import RemoteSource
from minitui.sources.remote_checks import count, probe

FIND_S = 2.0  # the longest search for the telemetry
LATE_S = 1.0  # after the first piece of an answer, the longest wait for the record of its request
LAST_RECORDS_S = 0.5  # the longest wait for the records about the end of an answer
RANK_HEADER = "X-data-parallel-rank"
UNKNOWN = -1  # the id of a request whose records did not arrive
HOW = "start vLLM with --scheduler-cls minitui.vllm.RecordingScheduler"
ONLY_WATCHES = "this minitui only watches the server: minitui chat --connect sends chats"


@dataclass(frozen=True)
class Engine:
    """An engine of a vLLM server. `api`, `telemetry`: addresses; `info`: the telemetry's, empty if it was not asked.
    `place`: the engine's number among the data parallel ranks behind this address, for RANK_HEADER; None: it is the
    only one. `label`: its number among all ranks, as in /metrics."""

    api: str
    telemetry: str
    place: int | None = None
    label: int = 0
    info: ServerInfo = field(default_factory=ServerInfo, compare=False)

    @property
    def name(self) -> str:
        """Its address, with its rank."""
        name = urlsplit(self.api).netloc
        return name if self.place is None else f"{name} rank {self.label}"


Found = tuple[ServerInfo | None, list["Engine"]]


def look_at(urls: list[str], key: str = "") -> list[Found | EngineError]:
    """Returns for each server what `look` finds, or the EngineError that it raises. Blocks: call it before the event
    loop runs. Raises InvalidRequest if one of `urls` is not an address."""
    addresses = [normalise(url) for url in urls]

    async def ask(url: str) -> Found | EngineError:
        try:
            return await look(url, key)
        except EngineError as error:
            return error

    async def ask_all() -> list[Found | EngineError]:
        return await asyncio.gather(*(ask(url) for url in addresses))

    return asyncio.run(ask_all())


async def look(url: str, key: str = "") -> Found:
    """Returns a minitui server's /minitui/info (empty: it is not ready yet); for other servers None, and the engines of
    `find`. Raises EngineError if the server cannot be reached or refuses the key."""
    info = await probe(url, key)
    if info is not None and info.api_port < 0:
        return info, []
    return None, await find(url, key)


async def find(url: str, key: str = "") -> list[Engine]:
    """Returns the engines of vLLM that minitui records, in the order of their ranks. `url`: the normalised address of
    vLLM, or of the telemetry of one engine."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for telemetry in (url, _with_port(url, port + 1)):
        try:
            async with asyncio.timeout(FIND_S):
                info = await probe(telemetry, key)
        except (EngineError, TimeoutError):
            continue
        if engine := _engine(telemetry, info or ServerInfo()):
            return [engine] if telemetry == url else [*_ranks(engine)]
    return []


def _engine(telemetry: str, info: ServerInfo) -> Engine | None:
    """Returns the engine whose telemetry says this about itself; None if it is not vLLM's."""
    api, own, ports, rank = info.api_port, info.telemetry_port, info.telemetry_ports, info.rank
    if not info.engine.startswith("vLLM ") or rank < 0:
        return None
    if len(ports) > MOST_RANKS or own not in ports:
        return None
    if not all(type(port) is int and 0 < port < 65536 for port in (api, *ports)):
        return None
    place = ports.index(own) if len(ports) > 1 else None
    return Engine(_with_port(telemetry, api), telemetry, place, rank, info)


def _ranks(engine: Engine) -> Iterator[Engine]:
    """Yields an engine and the other ranks behind the same address."""
    if engine.place is None:
        yield engine
        return
    for place, port in enumerate(engine.info.telemetry_ports):
        label = engine.label - engine.place + place
        others = Engine(engine.api, _with_port(engine.telemetry, port), place, label)
        yield engine if place == engine.place else others


def _with_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


class VllmStream(CompletionStream, Reader):
    """An answer of vLLM. The records of its request supply the request's id and what vLLM's endpoint does not say."""

    def __init__(self, source: VllmSource, body: dict[str, Any], group: str, tokens: int) -> None:
        self.group, self._vllm = group, source
        self._tokens, self._output = tokens, 0
        self._metrics: dict[str, Any] = {"preemptions": 0}
        self._over = asyncio.Event()  # the record of its end has arrived
        headers = {"X-Request-Id": f"minitui.{group}.{uuid.uuid4().hex[:12]}"}
        super().__init__(source, source.api, source.api_url, "/v1/completions", body, headers)
        self._task.add_done_callback(lambda _: source.forget(self))

    # The records of this request:

    def on_submit(self, request: int) -> None:
        self.accept(request)

    def on_match(self, tokens: int, stop: str, at: int, detail: str) -> None:
        if "match" not in self._metrics:
            self._metrics |= {"cached_tokens": tokens, "match": {"stop": stop, "at": at, "detail": detail}}

    def on_preempt(self) -> None:
        self._metrics["preemptions"] += 1

    def on_first(self, queue_ms: float, prefill_ms: float) -> None:
        self._metrics |= {"queue_ms": queue_ms, "prefill_ms": prefill_ms, "ttft_ms": queue_ms + prefill_ms}

    def on_finish(self) -> None:
        self._over.set()

    def _take(self, choice: dict[str, Any]) -> None:
        ids, text = choice.get("token_ids") or [], choice.get("text") or ""
        if not (type(ids) is list and all(count(token) is not None for token in ids) and type(text) is str):
            raise ValueError("a piece has no valid token ids")
        self._output += len(ids)
        if not self._pieces:
            wait = LATE_S if self._vllm.records.following else 0.0  # else no records arrive
            asyncio.get_running_loop().call_later(wait, self._give_up)
        if ids or text:
            self._add(text, ids)

    async def _complete(self) -> None:
        if self._reason and self._vllm.records.following:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_RECORDS_S):
                    await self._over.wait()
        self._give_up()
        await super()._complete()

    def _give_up(self) -> None:
        """The records of this request are late or lost: the answer is shown without them."""
        if not self._decided.is_set():
            self.accept(UNKNOWN)

    def _cancelled(self) -> None:
        self._give_up()
        super()._cancelled()

    def _measured(self) -> dict[str, Any]:
        return {"prompt_tokens": self._tokens, "cached_tokens": None, **self._clocked(self._output), **self._metrics}


class VllmSource(RemoteSource):
    """One engine of vLLM: `api` is vLLM's endpoint, `http` the engine's telemetry."""

    def __init__(self, engine: Engine, key: str = "", **options: Any) -> None:
        """`options`: those of RemoteSource."""
        super().__init__(engine.telemetry, key, **options)
        self.api_url = engine.api
        self.api = open_client(self.api_url, key)
        if engine.place is not None:
            self.api.headers[RANK_HEADER] = str(engine.place)
        self._served: str | None = None  # the model's name; None: vLLM's only one
        self._answers: list[VllmStream] = []  # without their request's end, the oldest first

    async def start(self, on_progress: Progress) -> None:
        """Connect to both addresses. Raises EngineError with a sentence for the user. If vLLM's endpoint cannot be
        reached, this source only watches: a machine whose ranks serve another machine's endpoint (--headless) has
        none."""
        with contextlib.suppress(httpx.HTTPError, OSError):
            response = await check(await self.api.get("/v1/models"))
            try:
                self._served = str(load_json(response.content)["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise EngineError(f"{self.api_url} lists no model: is it vLLM's address?") from error
        await super().start(on_progress)

    async def close(self) -> None:
        await super().close()
        await close_client(self.api)

    def cannot_use(self, name: str) -> str:
        usable = PARAMETERS[name].remote and PARAMETERS[name].known_to("vllm")
        return "" if usable else f"a chat with vLLM cannot use {name}"

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> VllmStream:  # type: ignore[override]
        """Ask for an answer; returns at once. If vLLM refuses the request, the stream raises the error."""
        values = self.sent(params, RECOMMENDED, "vllm")  # vLLM's own defaults may come from the checkpoint
        room = (self.info.max_model_len or 1 << 31) - len(ids)
        if room < 1:
            raise InvalidRequest(f"the chat has {len(ids):,} tokens; this model takes {room + len(ids):,}", "ids")
        values["max_tokens"] = min(params.max_tokens or room, room)
        body = {"model": self._served, "prompt": list(ids), "stream": True, "return_token_ids": True, **values}
        stream = VllmStream(self, body, group or uuid.uuid4().hex[:8], len(ids))
        self._answers.append(stream)
        return stream

    def forget(self, stream: VllmStream) -> None:
        """The answer has ended."""
        self._answers.remove(stream)

    @property
    def uncontrolled(self) -> str:
        return "minitui watches vLLM and does not control it"

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Always raises InvalidRequest: the recorder only watches vLLM."""
        raise InvalidRequest(f"vLLM cannot {verb.replace('_', ' ')}: {self.uncontrolled}", verb)

    def drain_records(self) -> list[Record]:
        records = super().drain_records()
        if self._answers:
            for record in records:
                if kind_of(record) in VllmStream.READS:
                    self._observe(record)
        return records

    def _observe(self, record: Record) -> None:
        found = named(record)
        begins = found.kind == "submit"
        for stream in self._answers:
            unknown = stream.request_id is None
            if (unknown and found.group == stream.group) if begins else found.request == stream.request_id:
                stream.read(record)
                return


