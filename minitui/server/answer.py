"""Answers one HTTP request: its sequences are queued, read and ended together. Subclasses for chat, completions,
/generate and /minitui/submit encode the prompt and format the response. `close` frees the request's places in the
queue. The engine frees the sequences' blocks between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from engine.core.step import TokenLogprobs
from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.process.stream import Merged, Stream
from engine.text.output import Delta
from engine.text.structured import CANNOT_CONTINUE
from minitui.server.access import owner_of
from minitui.server.errors import ApiError
from minitui.server.notices import notice
from minitui.server.schema import Sampled, StreamOptions
from minitui.server.service import Service
from minitui.server.sse import DONE, EventStream, event, failure, unless_disconnected


@dataclass(slots=True)
class Output:
    """The output of a sequence so far, or its next part."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all prompt tokens but the first

    def add(self, part: Delta | Output) -> None:
        """Append the next part."""
        self.text += part.text
        self.count(part)

    def count(self, part: Delta | Output) -> None:
        """Append all of the next part but its text, which has been sent."""
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.prompt_logprobs += part.prompt_logprobs
        self.finish_reason = part.finish_reason or self.finish_reason
        self.metrics = part.metrics or self.metrics


class TookTooLong(EngineError):
    """The reply has reached `request_s` (settings.py)."""


Part = tuple[int, Output]  # (index of the sequence, its next part)


class Answer:
    """The sequences of one request. The constructor reserves their places in the queue; `close` frees them."""

    # True: the caller may abort sequences. False: an abort comes from the operator, and the caller gets an error.
    cancellable: ClassVar[bool] = False
    _params = SamplingParams()  # until they are known

    def __init__(self, service: Service, sequences: int, stream: bool) -> None:
        """`stream`: True for a stream of events. Raises ApiError if the server is not ready or the queue is full."""
        self.service = service
        self.streams: list[Stream] = []
        self._stream_events = stream
        self._places = contextlib.ExitStack()
        self._places.enter_context(service.admit(sequences))
        self._merged: Merged[Output] | None = None  # of several sequences
        self._outputs: list[Output] = []  # so far, of a stream of events
        self._write: Callable[[bytes], bool] | None = None  # Connection._write: sends events at once
        self._fault: Exception | None = None  # of `_send_at_once`
        self._deadline = asyncio.get_running_loop().time() + service.settings.request_s
        self._timer: asyncio.TimerHandle | None = None  # one for the answer: one for each part costs more than the part
        self._owner = ""  # the API key of the request
        self._constraint = ""  # the field that constrains the reply
        self.prompts: list[list[int]] = []  # their token ids, once they are submitted

    # ---- for subclasses

    async def prepare(self) -> None:
        """Encode the prompts and `submit` them."""
        raise NotImplementedError

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """Returns the answer as one JSON object."""
        raise NotImplementedError

    def opening(self) -> Iterator[bytes]:
        """Yields the events before the first text."""
        return iter(())

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        """Yields the events for the next part of a sequence. `outputs`: all outputs so far, with this part."""
        raise NotImplementedError

    def shown(self, part: Output) -> Output:
        """Returns what the caller gets of a part."""
        return part

    def closing(self, outputs: list[Output]) -> Iterator[bytes]:
        """Yields the events after all sequences have ended."""
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that ends with an error."""
        return failure(error)

    async def submit(
        self, prompts: list[list[int]], params: SamplingParams, group: str = "", field: str = "prompt",
        names: Mapping[str, str] | None = None, **options: Any,
    ) -> None:
        """Queue `params.n` sequences for each prompt; returns when the engine has accepted all of them. `field`: the
        prompt's field in the request; `names`: the engine's field name -> the request's field name; `options`: further
        arguments of EngineClient.submit."""
        self._constraint = (names or {}).get(params.constraint or "", params.constraint or "")
        try:
            self.service.check(prompts, params, field)
            await self._submit(prompts, params, group, **options)
        except InvalidRequest as error:
            own = (names or {}).get(error.field)
            if own is None:
                raise
            raise InvalidRequest(re.sub(rf"^{error.field}\b", own, str(error)), own) from error

    async def _submit(self, prompts: list[list[int]], params: SamplingParams, group: str, **options: Any) -> None:
        self.service.check_ready()
        client = self.service.client
        self._params, self.prompts = params, prompts
        room = self.service.longest - max(map(len, prompts))
        if params.max_tokens is not None and params.max_tokens > room:
            notice(f"max_tokens is {params.max_tokens:,}, but the context has room for {room:,}: the reply may be cut")
        async with self.service.compilation(self._owner) if params.structured else contextlib.nullcontext():
            for ids, sample in itertools.product(prompts, range(params.n)):
                self.streams.append(client.submit(ids, params, group, sample, **options))
                if params.structured:  # the first one compiles the grammar, for all
                    await self.streams[-1].started()
        for stream in self.streams:
            await stream.started()

    # ---- the response

    async def respond(self, request: Request) -> Response:
        """Returns an event stream, which prepares the request, or one JSON object. If the caller disconnects, the
        sequences are ended."""
        self._owner = owner_of(request)
        if self._stream_events:
            self._write = request.scope["state"].get("write")
            return EventStream(self._all_events(), self.close, self.service.settings.stalled_reader_s, self.failed)
        try:
            return JSONResponse(self.whole(await unless_disconnected(request.receive, self._all_outputs())))
        finally:
            self.close()

    def close(self) -> None:
        """End the unfinished sequences and free their places in the queue. Repeated calls are allowed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._merged is not None:
            self._merged.cancel()
        self._cancel_streams()
        self._places.close()

    def _cancel_streams(self) -> None:
        for stream in self.streams:
            if not stream.finish_reason:
                with contextlib.suppress(EngineDead):
                    stream.cancel()

    def _time_out(self) -> None:
        """End the sequences with an error, because the reply has reached the server's limit of time."""
        self._cancel_streams()
        for stream in self.streams:
            stream.put(TookTooLong())

    async def _all_outputs(self) -> list[Output]:
        await self.prepare()
        outputs = [Output() for _ in self.streams]
        async for index, part in self._parts():
            outputs[index].add(part)
        return outputs

    async def _all_events(self) -> AsyncIterator[bytes]:
        """Yields what is sent next: the events of each part are sent together."""
        await self.prepare()
        self._outputs = outputs = [Output() for _ in self.streams]
        last = b""
        yield b"".join(self.opening())
        async for index, part in self._parts():
            events = self._events_of(index, part)
            if part.finish_reason and all(output.finish_reason for output in outputs):
                last = events  # sent with the closing events
            elif events:
                yield events
        if last := last + b"".join(self.closing(outputs)):
            yield last

    def _events_of(self, index: int, part: Output) -> bytes:
        self._outputs[index].count(part)
        return b"".join(self.events(index, part, self._outputs))

    def _send_at_once(self) -> bool:
        """Send the events of what has arrived of the only sequence. Returns False if the task of the response must read
        it: at the end, and while the peer reads too slowly."""
        stream = self.streams[0]
        if self._write is None or stream.ending or not self._write(b""):
            return False
        part = _joined(stream.drain())
        self.service.metrics.generated.add(len(part.ids))
        try:
            return self._write(self._events_of(0, self.shown(part)))
        except Exception as error:
            self._fault = error
            return False

    # ---- reading the sequences

    async def _parts(self) -> AsyncIterator[Part]:
        """Yields parts until all sequences have ended. Raises the error of a sequence that failed."""
        if len(self.streams) > 1:
            self._merged = Merged([_read(stream) for stream in self.streams])
        self._timer = asyncio.get_running_loop().call_at(self._deadline, self._time_out)
        try:
            while (found := await self._next()) is not None:
                index, part = found
                self.service.metrics.generated.add(len(part.ids))
                if part.finish_reason.startswith(f"error: {CANNOT_CONTINUE}"):
                    raise ApiError(400, part.finish_reason[7:], self._constraint)
                if part.finish_reason.startswith("error"):
                    raise ApiError(500, f"the engine could not finish this request: {part.finish_reason[7:]}")
                if part.finish_reason == "abort" and not self.cancellable:
                    raise ApiError(503, "the operator ended this reply", code="aborted")
                yield index, self.shown(part)
        except EngineDead:
            self.service.check_ready()  # raises a more precise error if the server is stopping
            raise
        except TookTooLong:
            limit = self.service.settings.request_s
            sentence = f"the reply took longer than {limit:g} s, this server's limit"
            raise ApiError(504, sentence, code="timeout") from None
        finally:
            self._places.close()  # before the caller sees the end: the next request may need these places
        self._measure()

    def _measure(self) -> None:
        samples = self._params.n
        for first in range(0, len(self.streams), samples):
            longest = max(len(stream.ids) for stream in self.streams[first : first + samples])
            self.service.metrics.ended(samples, self._params.max_tokens, longest)

    async def _next(self) -> Part | None:
        """Returns the next part; None after the last one. Layers of generators would take most of a part's time."""
        if self._merged is not None:
            return await anext(self._merged, None)
        stream = self.streams[0]
        if stream.finish_reason:
            return None
        await stream.wait(self._send_at_once)
        if self._fault is not None:
            raise self._fault
        return 0, _joined(stream.drain())


async def _read(stream: Stream) -> AsyncIterator[Output]:
    while not stream.finish_reason:
        await stream.wait()
        yield _joined(stream.drain())


def _joined(deltas: list[Delta]) -> Output:
    """Returns the deltas as one part."""
    first, *more = deltas
    part = Output(
        first.text, first.ids, first.finish_reason, first.metrics or {}, [*first.logprobs], [*first.prompt_logprobs]
    )
    for delta in more:
        part.add(delta)
    return part


class OpenAIAnswer(Answer):
    """The base class of chat and completions: adds the common fields (id, created, model), usage and last events."""

    prefix: ClassVar[str]  # prefix of the answer's id
    object: ClassVar[str]  # "object" field of the whole answer
    chunk_object: ClassVar[str]  # "object" field of an event

    def __init__(self, service: Service, body: Any, prompts: int) -> None:
        """`body`: a ChatRequest or CompletionRequest; `prompts`: the number of its prompts."""
        service.check_ready()
        name = service.check_model(body.model)
        self.samples = body.n or 1
        super().__init__(service, self.samples * prompts, bool(body.stream))
        self.tokenizer = service.tokenizer
        self._options = body.stream_options or StreamOptions()
        # True: all events but the last have only text.
        self.only_text = (body.logprobs is None or body.logprobs is False) and not (
            body.return_token_ids or self._options.continuous_usage_stats
        )
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def last_tokens(self, body: Sampled, max_tokens: int | None) -> int | None:
        """Returns how many of the prompt's last tokens the request keeps; None: all."""
        asked = body.truncate_prompt_tokens
        fitting = max(1, self.service.longest - (max_tokens or 1))
        return asked if asked is None else fitting if asked == -1 else min(asked, fitting)

    def scheduling(self, body: Sampled) -> dict[str, Any]:
        """Returns the arguments of EngineClient.submit for the request's priority and cache salt."""
        if body.priority and self.service.config.scheduling_policy != "priority":
            sentence = "priority has no effect: leave it out, or start the server with --scheduling-policy priority"
            raise ApiError(400, sentence, "priority")
        return {"priority": body.priority or 0, "cache_salt": body.cache_salt or ""}

    def token_ids(self, body: Sampled, output: Output) -> dict[str, Any]:
        """Returns the field of a choice with its token ids, if the request asks for them."""
        return {"token_ids": output.ids} if body.return_token_ids else {}

    def usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Returns the token counts of all sequences."""
        return usage_of(self.prompts, outputs)

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(outputs)}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """Returns one choice of the whole answer."""
        raise NotImplementedError

    def chunk(self, choices: list[dict[str, Any]], outputs: list[Output] | None = None, **more: Any) -> bytes:
        """Returns one event of a streamed answer, with the usage of `outputs` if the request asks for that."""
        body = {**self._head, "object": self.chunk_object, "choices": choices, **more}
        usage = self._options.continuous_usage_stats and outputs is not None
        return event({**body, "usage": self.usage(outputs)} if usage and outputs is not None else body)

    @functools.cached_property
    def _before_choices(self) -> bytes:
        return event({**self._head, "object": self.chunk_object, "choices": []}).removesuffix(b"]}\n\n")

    def text_chunk(self, index: int, field: str) -> bytes:
        """Returns the event of a choice that only has new text. `field`: this part of the choice, as JSON. Equal to
        `chunk`, in a tenth of its time: most events differ in their text only."""
        choice = f'{{"index":{index},{field},"logprobs":null,"finish_reason":null}}]}}\n\n'
        return self._before_choices + choice.encode("ascii")

    def closing(self, outputs: list[Output]) -> Iterator[bytes]:
        if self._options.include_usage:
            yield self.chunk([], usage=self.usage(outputs))
        yield DONE


def usage_of(prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> dict[str, Any]:
    """Returns the token counts of all sequences, as in OpenAI's API; a prompt with several samples counts once."""
    prompt = sum(map(len, prompts))
    written = sum(len(output.ids) for output in outputs)
    first = outputs[:: len(outputs) // len(prompts)]
    cached = sum(output.metrics.get("cached_tokens", 0) for output in first)
    return {
        "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
