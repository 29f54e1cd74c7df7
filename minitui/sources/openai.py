"""A Source for any OpenAI-compatible server. It streams chats, and reads the server's state from its Prometheus page.
The server takes messages, not token ids. So TextCodec gives every text an id, and chats are stored and compared as
token ids, as with other sources. The server has no records, no snapshot and no gate."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.parameters import OPEN_SERVERS
from engine.params import PARAMETERS, SamplingParams
from engine.text.output import Delta
from engine.trace.records import Record
from minitui.sources.base import Progress, Source
from minitui.sources.http import (
    ServerStream,
    check,
    close_client,
    httpx,
    load_json,
    normalise,
    open_client,
    parse,
    unreachable,
)
from minitui.sources.remote_checks import count
from minitui.sources.server_metrics import MetricsPoller, ServerMetrics

KINDS = ("minitui", *OPEN_SERVERS)  # owners of models that minitui knows
MAX_MODELS, MAX_NAME = 1_000, 400  # models in a server's list; characters of a model's name
ROLES = ("system", "user", "assistant")
END = len(ROLES)


class TextCodec:
    """Encodes each text as one id. The roles and the end of a message have control ids. `spelling` is unique to this
    codec: no other codec knows its ids, so a chat from another codec is encoded again."""

    special_ids = frozenset(range(END + 1))

    def __init__(self) -> None:
        self.spelling = f"texts {uuid.uuid4().hex}"
        self._texts = [f"<{role}>" for role in ROLES] + ["<end>"]
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()  # prompts are encoded in threads

    def intern(self, text: str) -> int:
        """Returns the id of a text; a new text gets a new id."""
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
        """Returns the conversation that `ids` encode, without the generation prompt."""
        messages: list[dict[str, str]] = []
        for token in ids:
            if token < END:
                messages.append({"role": ROLES[token], "content": ""})
            elif token > END and messages:
                messages[-1]["content"] += self._texts[token]
        return messages[:-1] if messages and ids[-1] < END else messages


class CompletionStream(ServerStream):
    """An answer of one of OpenAI's endpoints. Subclasses read the choices of its chunks."""

    def __init__(
        self, source: Source, http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(source, http, url, path, body, headers)
        self._began = time.perf_counter()
        self._first = self._last = 0.0  # when the first and the last piece arrived
        self._usage: dict[str, Any] = {}
        self._reason = ""  # the finish reason

    def _event(self, data: str) -> bool:
        if data == "[DONE]":
            return True
        chunk = parse(data)
        usage = chunk.get("usage")
        self._usage = usage if isinstance(usage, dict) else self._usage
        for choice in chunk.get("choices") or ():
            self._take(choice)
            self._reason = str(choice.get("finish_reason") or self._reason)[:40]
        return False

    def _take(self, choice: dict[str, Any]) -> None:
        """Add what a chunk's choice holds to the stream."""
        raise NotImplementedError

    async def _complete(self) -> None:
        if not self._reason:
            raise EngineDead(f"{self._url} ended the answer without a finish reason")
        self._end(self._reason)

    def _cancelled(self) -> None:
        self._end("abort")

    def _measured(self) -> dict[str, Any]:
        """Returns the metrics of the answer."""
        raise NotImplementedError

    def _clocked(self, tokens: int) -> dict[str, Any]:
        """Returns what this client's clock tells of an answer of this many tokens."""
        seconds = self._last - self._first
        return {
            "output_tokens": tokens,
            "ttft_ms": (self._first - self._began) * 1e3 if self._first else None,
            "decode_tok_s": (tokens - 1) / seconds if tokens > 1 and seconds > 0 else 0.0,
        }

    def _add(self, text: str, ids: list[int]) -> None:
        self._count(text)
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.put(Delta(self.request_id or 0, text, ids))

    def _end(self, reason: str) -> None:
        self.put(Delta(self.request_id or 0, "", [], reason, self._measured()))

    def cancel(self) -> None:
        """Close the connection, which ends the request. Does nothing if the request has ended."""
        self._ended_here = True
        self._task.cancel()


class OpenAIStream(CompletionStream):
    """The answer to a chat. Its request id is a number that this client chose."""

    def __init__(self, source: OpenAISource, body: dict[str, Any], number: int) -> None:
        self._codec, self._number, self._thinking = source.codec, number, False
        super().__init__(source, source.http, source.url, "/v1/chat/completions", body)

    def _opened(self) -> None:
        self.accept(self._number)

    def _cancelled(self) -> None:
        self._opened()
        super()._cancelled()

    def _take(self, choice: dict[str, Any]) -> None:
        """Add the text of a chunk to the stream. Reasoning is enclosed in think tags."""
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content = delta.get("content") or ""
        text = ""
        if thought:
            text = thought if self._thinking else f"<think>\n{thought}"
            self._thinking = True
        if content:
            text += f"\n</think>\n\n{content}" if self._thinking else content
            self._thinking = False
        if text:
            self._add(text, [self._codec.intern(text)])

    def _measured(self) -> dict[str, Any]:
        """Returns metrics from the server's usage and this client's clock; unknown values are None. If the server sends
        no usage, each piece counts as one token."""
        details = self._usage.get("prompt_tokens_details")
        return {
            "prompt_tokens": count(self._usage.get("prompt_tokens")),
            "cached_tokens": count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            **self._clocked(count(self._usage.get("completion_tokens")) or self._pieces),
        }


class OpenAISource(Source):
    """One OpenAI-compatible server. `models`: the model names that the server lists."""

    missing = "connecting to the server"

    def __init__(self, url: str, key: str = "", model: str = "", codec: TextCodec | None = None) -> None:
        """`model`: the model to use; by default the first in the server's list. `codec`: a codec shared with other
        sources, so that their chats can continue here."""
        super().__init__()
        self.url = normalise(url)
        self.codec = codec or TextCodec()
        self.models: list[str] = []
        self.http = open_client(self.url, key)
        self.poller = MetricsPoller(self.http)
        self.kind = ""  # the server's name for itself, if minitui knows its API; else "openai". "": not known yet
        self._model = model
        self._answers = 0

    async def start(self, on_progress: Progress) -> None:
        """Get the list of models and choose one. Raises EngineError with a sentence for the user."""
        on_progress({"stage": "connect", "done": 0, "total": 0, "text": f"connecting to {self.url}"})
        with self._starting():
            self.models = names = await self.list_models()
            self.kind = self.kind or "openai"
            if self._model and names and self._model not in names:
                raise EngineError(f"{self.url} has no model {self._model!r}; it has {', '.join(names[:8])}")
            model = self._model or names[0]
            self.info = EngineInfo(model=model, device=self.url, log_file="on the server")
            self.keep(self.poller.run())

    async def list_models(self) -> list[str]:
        """Returns the names of the server's models. Raises EngineError with a sentence for the user. If the user named
        a model, the result may be empty: some servers do not list their models."""
        try:
            response = await self.http.get("/v1/models")
            if response.status_code in (401, 403) or (response.status_code in (429, 503) and not self._model):
                await check(response)
            if response.status_code != 200:
                if not self._model:
                    raise EngineError(
                        f"{self.url} does not list its models (/v1/models answered {response.status_code}): is the "
                        "address right? If it is, name the model with --model"
                    )
                return []
            entries = load_json(response.content)["data"][:MAX_MODELS]
            if not self._model and not entries:
                raise EngineError(f"{self.url} lists no model: choose one with --model")
            self.kind = next((e["owned_by"] for e in entries if e.get("owned_by") in KINDS), "openai")
            return [str(entry["id"])[:MAX_NAME] for entry in entries]
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(self.url, error) from error
        except EngineError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if self._model:
                return []
            raise EngineError(
                f"{self.url} answers /v1/models in an unexpected form: if this server has OpenAI's endpoints, name the "
                "model with --model"
            ) from error

    def server_of(self, group: str) -> tuple[str, MetricsPoller | None]:
        """Returns (name, poller of the metrics) of the server that answers the chat."""
        return self.url, self.poller

    @property
    def metrics(self) -> ServerMetrics:
        """The values of the last Prometheus page that was read."""
        return self.poller.metrics

    @property
    def connection(self) -> str:
        return self.poller.trouble

    def cannot_use(self, name: str) -> str:
        if not self.kind or PARAMETERS[name].known_to(self.kind):
            return ""
        api = "OpenAI's API" if self.kind == "openai" else f"the API of {self.kind}"
        return f"{self.url} cannot use {name}: {api} does not have it. /set {name} default leaves it out"

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> OpenAIStream:
        """Ask for an answer to the conversation that `ids` encode. `group` is not sent."""
        body: dict[str, Any] = {
            "model": self.info.model, "messages": self.codec.messages(ids), "stream": True,
            "stream_options": {"include_usage": True},
            **self.sent(params, ("temperature", "top_p", "max_tokens"), self.kind),
        }
        self._answers += 1
        return OpenAIStream(self, body, self._answers)

    @property
    def uncontrolled(self) -> str:
        return "only a minitui server can be controlled"

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Always raises InvalidRequest: the server has no gate."""
        raise InvalidRequest(f"{self.url} cannot {verb.replace('_', ' ')}: {self.uncontrolled}", verb)

    async def snapshot(self) -> dict[str, Any]:
        """Always raises EngineError: the server does not publish its state."""
        raise EngineError(f"{self.url} does not publish its state: only a minitui server does")

    def drain_records(self) -> list[Record]:
        """Returns an empty list: the server has no records."""
        return []

    async def close(self) -> None:
        await self._stop()
        await close_client(self.http)
