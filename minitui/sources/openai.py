"""A Source that is any OpenAI-compatible server: chats stream from it, vitals come from its Prometheus page (pulse.py).

Such a server takes messages, not token ids, and its ids are its own business. The codec here makes ids of texts: each
text that was ever said is one id, so that conversations are kept and compared as everywhere else. What the server does
not tell is None, never zero: it has no records, no snapshot, no gate.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.text.output import Delta
from engine.trace.records import Record
from minitui.sources.base import Progress
from minitui.sources.bounds import ANSWER
from minitui.sources.http import (
    Answer,
    check,
    httpx,
    load_json,
    normalise,
    open_client,
    parse,
    server_events,
    unreachable,
)
from minitui.sources.remote_checks import count
from minitui.sources.server_metrics import Pulse, Vitals

LEAVE_S = 1.0  # for the connections to be closed
MAX_MODELS, MAX_NAME = 1_000, 400  # models that a server lists, characters of a name
ROLES = ("system", "user", "assistant")
END = len(ROLES)


class TextCodec:
    """Ids of texts. Control ids are the roles and the end of a message. `spelling` names these ids: no other codec
    knows them, so that a chat that was kept is spelled anew."""

    special_ids = frozenset(range(END + 1))

    def __init__(self) -> None:
        self.spelling = f"texts {uuid.uuid4().hex}"
        self._texts = [f"<{role}>" for role in ROLES] + ["<end>"]
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()  # prompts are made in threads

    def intern(self, text: str) -> int:
        """The id of a text, made when it is new."""
        with self._lock:
            known = self._ids.get(text)
            if known is None:
                known = self._ids[text] = len(self._texts)
                self._texts.append(text)
        return known

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self._texts[i] for i in ids if not (skip_special_tokens and i in self.special_ids))

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [ROLES.index(message["role"]), self.intern(message["content"]), END]
        return [*ids, ROLES.index("assistant")] if add_generation_prompt else ids

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The conversation that these ids stand for, without the opening of the answer."""
        said: list[dict[str, str]] = []
        for token in ids:
            if token < END:
                said.append({"role": ROLES[token], "content": ""})
            elif token > END and said:
                said[-1]["content"] += self._texts[token]
        return said[:-1] if said and ids[-1] < END else said


# ---- the source


class ForeignStream:
    """An answer being written by the server."""

    def __init__(self, source: ForeignSource, body: dict[str, Any], number: int) -> None:
        self.request_id = number
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.metrics: dict[str, Any] = {}
        self._source = source
        self._news: deque[Delta | EngineError] = deque()
        self._wake = asyncio.Event()
        self._accepted = asyncio.Event()
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._pieces = 0
        self._usage: dict[str, Any] = {}
        self._thinking = False
        self._answer = Answer(source.url)
        self._task = asyncio.create_task(self._read(body))

    async def _read(self, body: dict[str, Any]) -> None:
        reason, path, bounds = "", "/v1/chat/completions", ANSWER.extension()
        try:
            async with self._source.http.stream("POST", path, json=body, extensions=bounds) as response:
                await check(response)
                self._accepted.set()
                async for _, data in server_events(response):
                    if data == "[DONE]":
                        break
                    chunk = parse(data)
                    usage = chunk.get("usage")
                    self._usage = usage if isinstance(usage, dict) else self._usage
                    for choice in chunk.get("choices") or ():
                        self._take(choice.get("delta") or {})
                        reason = str(choice.get("finish_reason") or reason)[:40]
            if not reason:
                raise EngineDead(f"{self._source.url} ended the answer without saying why")
            self._end(reason)
        except EngineError as error:
            self._put(error)
        except (httpx.HTTPError, OSError) as error:
            self._put(unreachable(self._source.url, error))
        except (TypeError, AttributeError, ValueError) as error:  # JSON, but not what it should be
            said = f"{self._source.url} answers as no OpenAI-compatible server does ({error}): is the address right?"
            self._put(EngineError(said))
        except asyncio.CancelledError:
            self._end("abort")
        finally:
            self._accepted.set()

    def _take(self, delta: dict[str, Any]) -> None:
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        said = delta.get("content") or ""
        text = ""
        if thought:
            text = thought if self._thinking else f"<think>\n{thought}"
            self._thinking = True
        if said:
            text += f"\n</think>\n\n{said}" if self._thinking else said
            self._thinking = False
        if text:
            self._answer.add(text)
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._pieces += 1
            self._put(Delta(self.request_id, text, [self._source.codec.intern(text)]))

    def _end(self, reason: str) -> None:
        self._put(Delta(self.request_id, "", [], reason, self._figures()))

    def _figures(self) -> dict[str, Any]:
        """What this side has measured and the server has told; a piece is taken for a token where it told nothing."""
        drawn = count(self._usage.get("completion_tokens")) or self._pieces
        spent = self._last - self._first
        details = self._usage.get("prompt_tokens_details")
        return {
            "prompt_tokens": count(self._usage.get("prompt_tokens")),
            "output_tokens": drawn,
            "cached_tokens": count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            "ttft_ms": (self._first - self._began) * 1e3 if self._first else None,
            "decode_tok_s": (drawn - 1) / spent if drawn > 1 and spent > 0 else 0.0,
        }

    def _put(self, item: Delta | EngineError) -> None:
        self._news.append(item)
        self._wake.set()

    async def started(self) -> int:
        """A number for this answer, once the server has accepted it."""
        await self._accepted.wait()
        if self._news and isinstance(self._news[0], EngineError):
            raise self._news[0]
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
        """Hang up, which ends the request; harmless when it has ended."""
        self._task.cancel()


class ForeignSource:
    """One OpenAI-compatible server. `models`: the names that it lists."""

    def __init__(self, url: str, key: str = "", model: str = "", codec: TextCodec | None = None) -> None:
        """`model`: the name to ask for; by default the first that the server lists. `codec`: shared with others whose
        conversations are to go on here."""
        self.url = normalise(url)
        self.info: dict[str, Any] = {}
        self.error: str | None = None
        self.codec = codec or TextCodec()
        self.models: list[str] = []
        self.http = open_client(self.url, key)
        self.pulse = Pulse(self.http)
        self._model = model
        self._answers = 0
        self._ready = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    async def start(self, on_progress: Progress) -> None:
        """Ask for the models. Raises EngineError with a sentence."""
        on_progress({"stage": "connect", "done": 0, "total": 0, "text": f"connecting to {self.url}"})
        self.error = None
        try:
            self.models = names = await self.list_models()
            if self._model and names and self._model not in names:
                raise EngineError(f"{self.url} has no model {self._model!r}; it has {', '.join(names[:8])}")
            if not self._model and not names:
                raise EngineError(f"{self.url} lists no model: name one with --model")
        except EngineError as error:
            self.error = str(error)
            self._ready.set()
            raise
        model = self._model or names[0]
        self.info = {"model": model, "device": self.url, "generation": {}, "log_file": "at the server"}
        self._polling = asyncio.create_task(self.pulse.run())
        self._ready.set()

    async def list_models(self) -> list[str]:
        """The names of the models that the server offers; none if it fails to list them and a model was named, for some
        answer all the same. Raises EngineError with a sentence."""
        try:
            response = await self.http.get("/v1/models")
            if response.status_code in (401, 403) or not self._model:
                await check(response)
            if response.status_code != 200:
                return []
            return [str(entry["id"])[:MAX_NAME] for entry in load_json(response.content)["data"][:MAX_MODELS]]
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(self.url, error) from error
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url} is no OpenAI-compatible server: /v1/models is odd") from error

    @property
    def vitals(self) -> Vitals:
        """What its last Prometheus page told."""
        return self.pulse.vitals

    @property
    def connection(self) -> str:
        """A sentence while it cannot be reached, else empty."""
        return self.pulse.trouble

    async def ready(self) -> None:
        """Return when it can answer; raises EngineDead if it never will."""
        await self._ready.wait()
        if self.error is not None:
            raise EngineDead(self.error)

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> ForeignStream:
        """Ask for an answer to the conversation that `ids` stand for; `group` means nothing to the server."""
        self._answers += 1
        body: dict[str, Any] = {
            "model": self.info["model"], "messages": self.codec.messages(ids), "stream": True,
            "temperature": params.temperature, "top_p": params.top_p, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        if params.seed is not None:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        return ForeignStream(self, body, self._answers)

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Always refused: such a server has nothing to hold it by."""
        what = verb.replace("_", " ")
        raise InvalidRequest(f"{self.url} cannot {what}: only a minitui server can be controlled", verb)

    async def snapshot(self) -> dict[str, Any]:
        """Always refused: such a server does not tell its state."""
        raise EngineError(f"{self.url} does not tell its state: only a minitui server does")

    def drain_records(self) -> list[Record]:
        """None: such a server keeps them to itself."""
        return []

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Never called: each answer tells for itself whether the server was there."""

    async def restart(self, on_progress: Progress) -> None:
        """Connect again."""
        self._ready.clear()
        await self._stop()
        await self.start(on_progress)

    async def close(self) -> None:
        """Leave."""
        await self._stop()
        closing = asyncio.create_task(self.http.aclose())
        await asyncio.wait({closing}, timeout=LEAVE_S)

    async def _stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
