"""A Source that is a minitui server elsewhere: the application shows and talks to it as to an engine of its own.

Everything arrives as it would from an engine process: records in order, deltas with ids, snapshots. If the connection
is lost it is made again, and what was missed shows as a gap in the records' numbers, which a snapshot closes. Should
the engine behind the server have been started anew meanwhile, its numbers, which begin anew, are moved behind those
already seen, with a gap between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.text.output import Delta
from engine.trace.records import Record
from minitui.protocol import TOKENIZER_FILES
from minitui.sources import remote_checks
from minitui.sources.base import Progress
from minitui.sources.bounds import ANSWER, LARGE, RECORDS
from minitui.sources.http import (
    CONNECT_S,
    Answer,
    check,
    httpx,
    load_json,
    normalise,
    open_client,
    parse,
    reason_of,
    server_events,
    unreachable,
)
from minitui.sources.remote_checks import Refused, Watch

MAX_RECORDS = 200_000  # kept for a reader that does not drain
GIVE_UP_S = 60.0  # a server that cannot be reached for so long is dead
AT_ONCE = 2_000  # records checked at a time: a few frames' worth, at the fastest
CATCH_UP_S = 1.0  # for records that a snapshot knows already
LEAVE_S = 1.0  # for the connections to be closed
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0)
CONNECTED_S = 15.0  # for the record stream to begin
BEAT = httpx.Timeout(22.0, connect=CONNECT_S)  # the record stream has a comment every 10 s, if nothing else
LOADING_S = 600.0  # a server may load its model for so long
SENT = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "max_tokens", "seed", "ignore_eos", "skip_special_tokens", "logprobs",
)  # fmt: skip


class RemoteStream:
    """An answer being written by the server; like engine.process.client.Stream."""

    def __init__(self, source: RemoteSource, body: dict[str, Any]) -> None:
        self.request_id: int | None = None
        self.seed: int | None = None
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.metrics: dict[str, Any] = {}
        self._source = source
        self._tag = str(body["tag"])
        self._news: deque[Delta | EngineError] = deque()
        self._wake = asyncio.Event()
        self._accepted = asyncio.Event()
        self._cancelled = False
        self._task = source.keep(self._read(body))

    async def _read(self, body: dict[str, Any]) -> None:
        url = self._source.url
        bounds = ANSWER.extension()
        answer = Answer(url)
        try:
            async with self._source.http.stream("POST", "/minitui/submit", json=body, extensions=bounds) as response:
                await check(response)
                async for _, data in server_events(response):
                    event = parse(data)
                    if "request" in event:
                        self.request_id, self.seed = remote_checks.accepted(event)
                        self._accepted.set()
                        if self._cancelled:
                            self.cancel()  # the first wish may have come before the request
                        continue
                    event = remote_checks.delta(event)
                    answer.add(event["text"])
                    delta = Delta(self.request_id or 0, event["text"], event["ids"], event["finish_reason"])
                    delta.metrics = event["metrics"]
                    self._put(delta)
                    if delta.finish_reason:
                        return
            self._put(EngineDead(f"{url} ended the answer without saying why"))
        except Refused as error:
            self._put(EngineError(f"{url} answers as no minitui server of this version does: {error}"))
        except EngineError as error:
            self._put(error)
        except (httpx.HTTPError, OSError) as error:
            self._put(unreachable(url, error))
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # JSON, but not what it should be
            said = f"{url} answers as no minitui server of this version does ({type(error).__name__}: {error})"
            self._put(EngineError(said))
        except asyncio.CancelledError:
            self._put(EngineDead(f"the connection to {url} was closed"))
            raise

    def _put(self, item: Delta | EngineError) -> None:
        self._news.append(item)
        self._wake.set()
        if isinstance(item, EngineError):
            self._accepted.set()

    async def started(self) -> int:
        """The request's id, once the engine has accepted it; raises what the iteration would if it did not."""
        await self._accepted.wait()
        if self.request_id is None:
            for item in self._news:
                if isinstance(item, EngineError):
                    raise item
            raise EngineDead(f"{self._source.url} did not accept the request")
        return self.request_id

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Delta]:
        while not self.finish_reason:
            while not self._news:
                self._wake.clear()
                await self._wake.wait()
            item = self._news.popleft()
            if isinstance(item, EngineError):
                self.finish_reason = f"error: {item}"
                raise item
            self.ids += item.ids
            self.text += item.text
            if item.finish_reason:
                self.finish_reason, self.metrics = item.finish_reason, item.metrics or {}
            yield item

    def cancel(self) -> None:
        """Ask the server to end this request; its last delta says "abort"."""
        self._cancelled = True
        if not self._task.done():
            self._source.spawn(self._source.post("/minitui/cancel", {"tag": self._tag}))


class RemoteSource:
    """One minitui server. `connection` is a sentence while there is something to say about it, else empty."""

    def __init__(
        self, url: str, key: str = "", cache: Path | None = None, give_up_s: float = GIVE_UP_S, watching: bool = True
    ) -> None:
        """`cache`: where the tokenizers of servers are kept. Not `watching`, it only asks, until `look` is called.

        Raises InvalidRequest if `url` is none.
        """
        self.url = normalise(url)
        self.info: dict[str, Any] = {}
        self.error: str | None = None
        self.connection = ""
        self.http = open_client(self.url, key, client=uuid.uuid4().hex)
        self._cache = cache
        self._give_up_s = give_up_s
        self._wants_records = watching
        self._ready = asyncio.Event()
        self._hello = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)
        self._syncing = 0  # snapshots under way: records wait for them
        self._watch_state: Watch | None = None  # what the records are checked against; None: a snapshot is needed
        self._checked: list[Record] = []
        self._began = ""
        self._offset = 0  # added to the server's record numbers
        self._seq = 0  # of the last record, offset included

    # ---- life

    async def start(self, on_progress: Progress) -> None:
        """Connect, waiting while the server loads its model. Raises EngineError with a sentence."""
        self.error = None
        on_progress({"stage": "connect", "done": 0, "total": 0, "text": f"connecting to {self.url}"})
        try:
            info = await self._load_info(on_progress)
            directory = await self._load_tokenizer(info)
            if self._wants_records:
                await self.look()
        except (httpx.HTTPError, OSError) as error:
            raise self._failed(unreachable(self.url, error)) from error
        except EngineError as error:
            raise self._failed(error) from error
        self.info = {**info, "model_dir": str(directory), "log_file": f"at the server {self.url}"}
        self._ready.set()

    async def look(self) -> None:
        """Follow its records; returns when they come. Raises EngineDead if they do not, and goes on trying."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(CONNECTED_S):
                await self._hello.wait()
        except TimeoutError:
            raise EngineDead(f"{self.url} does not stream its records: {self.connection}") from None

    async def look_away(self) -> None:
        """Follow its records no longer; what this client held of the engine's gate is let go by the server."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._hello.clear()
        self._records.clear()
        self._checked.clear()
        self._watch_state = None
        self.connection = ""

    def _failed(self, error: EngineError) -> EngineError:
        self.error = str(error)
        self._ready.set()  # whoever waits is told the error
        return error

    async def _load_info(self, on_progress: Progress) -> dict[str, Any]:
        deadline = time.monotonic() + LOADING_S
        while True:
            response = await self.http.get("/minitui/info")
            if response.status_code == 404:
                raise EngineError(f"{self.url} is no minitui server: it does not know /minitui/info")
            try:
                return read_info(self.url, (await check(response)).content)
            except EngineDead as error:
                if time.monotonic() > deadline:
                    raise
                on_progress({"stage": "connect", "done": 0, "total": 0, "text": str(error)})
                await asyncio.sleep(0.5)

    async def _load_tokenizer(self, info: dict[str, Any]) -> Path:
        """The tokenizer's files, from the cache or the server; the directory they are in."""
        files: dict[str, str] = info["tokenizer_files"]
        if not set(files) <= set(TOKENIZER_FILES):
            foreign = sorted(set(files) - set(TOKENIZER_FILES))
            raise EngineError(f"{self.url} offers files that are no tokenizer's: {', '.join(foreign)}")
        if self._cache is None:
            from minitui.settings import data_dir

            self._cache = data_dir() / "tokenizers"
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        directory = self._cache / digest[:24]
        directory.mkdir(parents=True, exist_ok=True)
        for name, wanted in files.items():
            path = directory / name
            if path.is_file():
                continue
            response = await self.http.get(f"/minitui/tokenizer/{name}", extensions=LARGE.extension())
            content = (await check(response)).content
            if hashlib.sha256(content).hexdigest() != wanted:
                raise EngineError(f"{self.url} sent another {name} than it announced: connect again")
            partial = directory / f"{name}.{uuid.uuid4().hex[:8]}"
            partial.write_bytes(content)
            partial.replace(path)
        return directory

    async def ready(self) -> None:
        """Return when it can answer; raises EngineDead if it never will."""
        await self._ready.wait()
        if self.error is not None:
            raise EngineDead(self.error)

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call back with a sentence when the server has not been reached for a while."""
        self._callbacks.append(callback)

    async def restart(self, on_progress: Progress) -> None:
        """Connect again after it was given up."""
        self._ready.clear()
        await self._stop()
        await self.start(on_progress)

    async def close(self) -> None:
        """Leave; what this client held of the engine's gate is let go by the server."""
        await self._stop()
        closing = asyncio.create_task(self.http.aclose())
        await asyncio.wait({closing}, timeout=LEAVE_S)

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(self.look_away(), *tasks, return_exceptions=True)

    # ---- records

    async def _watch(self) -> None:
        """Read the record stream, and connect again when it ends."""
        lost_at: float | None = None
        attempt = 0
        while True:
            try:
                stream = self.http.stream("GET", "/minitui/records", timeout=BEAT, extensions=RECORDS.extension())
                async with stream as response:
                    await check(response)
                    async for name, data in server_events(response, quiet_s=None):
                        self._take(name, load_json(data))
                        lost_at, attempt = None, 0
                reason = "the server ended the connection"
            except Refused as error:
                self._refuse(error)
                return
            except (httpx.HTTPError, OSError) as error:
                reason = reason_of(error)
            except (EngineError, ValueError) as error:
                reason = str(error)
            lost_at = lost_at or time.monotonic()
            away = time.monotonic() - lost_at
            self.connection = f"no connection to {self.url} for {away:.0f} s ({reason}); trying again"
            if away > self._give_up_s:
                self._die(f"{self.url} has not been reached for {away:.0f} s: {reason}")
                return
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)] * random.uniform(0.7, 1.3))
            attempt += 1

    def _die(self, sentence: str) -> None:
        self.error = sentence
        for callback in self._callbacks:
            callback(sentence)

    def _refuse(self, error: Refused) -> EngineError:
        """Follow it no longer; the sentence for that."""
        said = f"{self.url} sends what cannot be shown: {error}"
        self._watch_state = None
        self._records.clear()
        self._checked.clear()
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        self.connection = said
        self._die(said)
        return EngineError(said)

    def _take(self, name: str, data: Any) -> None:
        if name in ("hello", "began"):
            self._met(*remote_checks.greeting(data))
            return
        for record in remote_checks.records(data):
            self._seq = record[0] + self._offset
            self._records.append((self._seq, *record[1:]))

    def _met(self, began: str, seq: int) -> None:
        """The stream begins, at this record's number. If anything was missed, the next number leaves a gap."""
        first = not self._hello.is_set() and not self._began
        if began != self._began and not first:
            self._offset = self._seq + 2  # its numbers begin anew, behind ours and a gap
        elif seq + self._offset != self._seq and not first:
            self._offset += 1  # even one missed record must show
        if not first and seq + self._offset != self._seq:
            self._seq = seq + self._offset
            # A record that changes nothing: its number tells that others are missing, also when none follows.
            self._records.append((self._seq, 0.0, "refuse", "", "the connection to the server was lost"))
        self._began, self.connection = began, ""
        if first:
            self._seq = seq
        self._hello.set()

    def drain_records(self) -> list[Record]:
        """The records since the last call that follow the last snapshot, about AT_ONCE of them at most. None before the
        first snapshot, or while one is on its way; after a gap, the one behind it and then none until a snapshot."""
        if self._syncing:
            return []
        self._check_records()
        records, self._checked = self._checked, []
        return records

    def _check_records(self) -> None:
        watch = self._watch_state
        if watch is None:
            return
        try:
            for _ in range(min(AT_ONCE, len(self._records))):
                record = self._records.popleft()
                if record[0] <= watch.state.seq:
                    continue
                self._checked.append(record)
                if record[0] > watch.state.seq + 1:
                    self._watch_state = None
                    return
                watch.take(record)
        except Refused as error:
            self._refuse(error)

    async def _caught_up(self, seq: int) -> bool:
        """Have the records come up to this one? They may be on their way for a moment."""
        end = time.monotonic() + CATCH_UP_S
        while self._watch_state is not None and self._watch_state.state.seq < seq and time.monotonic() < end:
            self._check_records()
            await asyncio.sleep(0 if self._records else 0.02)
        return self._watch_state is not None and self._watch_state.state.seq >= seq

    @property
    def backlog(self) -> int:
        """Records that have come and were not drained."""
        return len(self._records) + len(self._checked)

    async def snapshot(self) -> dict[str, Any]:
        """The state at a record's number; records drained later may begin before that."""
        self._syncing += 1
        try:
            for _ in range(100):
                response = await self._ask("GET", "/minitui/snapshot", extensions=LARGE.extension())
                snapshot = decode_snapshot(response.content)
                if snapshot.pop("began") == self._began:
                    snapshot["seq"] += self._offset
                    for node in snapshot["nodes"].values():
                        node["last_used"] += self._offset
                    if await self._caught_up(snapshot["seq"]) and self._watch_state is not None:
                        return self._watch_state.state.snapshot()  # which the records drained later follow
                    self._watch_state = Watch(snapshot)
                    return snapshot
                await asyncio.sleep(0.1)  # another engine: its greeting is on its way
            raise EngineDead(f"{self.url} starts its engine again and again")
        except Refused as error:
            raise self._refuse(error) from error
        finally:
            self._syncing -= 1

    # ---- asking

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> RemoteStream:
        """Ask for an answer; returns at once. A refusal is raised by the stream's iteration."""
        if params.structured or params.logit_bias or params.stop_token_ids:
            raise InvalidRequest("grammars, logit_bias and stop_token_ids do not travel to a server", "params")
        values = {name: getattr(params, name) for name in SENT}
        values["stop"] = list(params.stop) or None
        return RemoteStream(self, {"tag": uuid.uuid4().hex, "ids": list(ids), "group": group, "params": values})

    async def control(self, verb: str, **arguments: Any) -> Any:
        """pause | resume | step n= | run_until predicate= | pace factor= | clear_cache."""
        return (await self.post("/minitui/control", {"action": verb, **arguments})).get("value")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON object; the answer's. Raises EngineError."""
        told = load_json((await self._ask("POST", path, body)).content)
        return told if isinstance(told, dict) else {}

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, extensions: dict[str, Any] | None = None
    ) -> httpx.Response:
        try:
            return await check(await self.http.request(method, path, json=body, extensions=extensions))
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(self.url, error) from error

    def spawn(self, work: Any) -> None:
        """Run something whose failure changes nothing."""

        async def run() -> None:
            with contextlib.suppress(EngineError):
                await work

        self.keep(run())

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with this source, at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def probe(url: str, key: str = "") -> dict[str, Any] | None:
    """What a server says about itself before the application is drawn; None if it is another kind of server.

    Raises EngineError with a sentence if it cannot be reached or does not let us in. A server that still loads its
    model says nothing yet: {}.
    """
    return asyncio.run(introduce(normalise(url), key))


def probe_all(urls: list[str], key: str = "") -> list[dict[str, Any] | EngineError | None]:
    """`probe` of several servers at once; its error in the place of one. InvalidRequest if one of `urls` is none."""
    addresses = [normalise(url) for url in urls]

    async def ask(url: str) -> dict[str, Any] | EngineError | None:
        try:
            return await introduce(url, key)
        except EngineError as error:
            return error

    async def ask_all() -> list[dict[str, Any] | EngineError | None]:
        return await asyncio.gather(*(ask(url) for url in addresses))

    return asyncio.run(ask_all())


async def introduce(url: str, key: str = "") -> dict[str, Any] | None:
    """See `probe`."""
    async with open_client(url, key) as client:
        try:
            response = await client.get("/minitui/info")
            if response.status_code in (404, 405):
                return None
            return read_info(url, (await check(response)).content)
        except EngineDead:
            return {}
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(url, error) from error


def read_info(url: str, text: bytes) -> dict[str, Any]:
    """What a server says about itself. Raises EngineError."""
    try:
        return remote_checks.info(load_json(text))
    except Refused as error:
        raise EngineError(f"{url} is no minitui server of this version: {error}") from error


def decode_snapshot(text: str | bytes) -> dict[str, Any]:
    """A snapshot as JSON carries it (keys are strings there) back in the form of engine.trace.state. Raises Refused."""
    return remote_checks.snapshot(load_json(text))
