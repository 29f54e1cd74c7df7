"""The sequences behind one HTTP request: submitted together, read together, ended together.

Whatever happens to the caller, `close` gives back what they hold: the engine frees their blocks between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from engine.core.step import TokenLogprobs
from engine.errors import EngineDead, InvalidRequest
from engine.params import SamplingParams
from engine.process.client import Stream
from engine.text.output import Delta
from minitui.server.errors import ApiError
from minitui.server.schema import PromptDetails, Usage
from minitui.server.service import Service
from minitui.server.sse import EventStream, unless_gone

Batch = tuple[int, list[Delta]]


@dataclass
class Gathered:
    """A sequence that has ended."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += delta.ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.metrics = delta.metrics or self.metrics


class Reply:
    """`count` sequences; takes their places in the queue at once, and keeps them until `close`."""

    def __init__(self, service: Service, count: int) -> None:
        self._service = service
        self._places = contextlib.ExitStack()
        self._places.enter_context(service.admit(count))
        self._tasks: list[asyncio.Task[None]] = []
        self._deadline = asyncio.get_running_loop().time() + service.settings.request_s
        self.stalled_s = service.settings.stalled_reader_s
        self.streams: list[Stream] = []
        self._params = SamplingParams()

    async def submit(
        self, prompts: list[list[int]], params: SamplingParams, group: str = "", field: str = "prompt",
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Queue `params.n` sequences for each prompt; returns when the engine has accepted all of them.

        `field`: what the caller calls the prompt; `names`: what he calls fields of the engine's.
        """
        try:
            await self._service.check(prompts, params, field)
        except InvalidRequest as error:
            error.field = (names or {}).get(error.field, error.field)
            raise
        self._service.check_ready()
        client = self._service.client
        self._params = params
        self.streams = [
            client.submit(ids, params, group, sample_index=sample) for ids in prompts for sample in range(params.n)
        ]
        for stream in self.streams:
            await stream.started()

    def close(self) -> None:
        """End what has not ended. Safe to call again."""
        for task in self._tasks:
            task.cancel()
        for stream in self.streams:
            if not stream.finish_reason:
                with contextlib.suppress(EngineDead):
                    stream.cancel()
        self._places.close()

    async def batches(self) -> AsyncIterator[Batch]:
        """(which sequence, its deltas since the last batch), until all have ended. Raises for those that failed."""
        source = self._one() if len(self.streams) == 1 else self._several()
        while True:
            try:
                async with asyncio.timeout_at(self._deadline):
                    batch = await anext(source)
            except StopAsyncIteration:
                self._measure()
                return
            except EngineDead:
                self._service.check_ready()  # has the true reason when it is the server that ends
                raise
            except TimeoutError:
                limit = self._service.settings.request_s
                sentence = f"the reply took longer than {limit:g} s, this server's limit"
                raise ApiError(504, sentence, code="timeout") from None
            for delta in batch[1]:
                self._service.meters.generated.add(len(delta.ids))
                if delta.finish_reason.startswith("error"):
                    raise ApiError(500, f"the engine could not finish this request: {delta.finish_reason[7:]}")
            yield batch

    def _measure(self) -> None:
        samples = self._params.n
        for first in range(0, len(self.streams), samples):
            longest = max(len(stream.ids) for stream in self.streams[first : first + samples])
            self._service.meters.ended(samples, self._params.max_tokens, longest)

    async def _one(self) -> AsyncIterator[Batch]:
        stream = self.streams[0]
        async for delta in stream:
            yield 0, [delta, *stream.drain()]  # what came while the last batch was being sent, in one piece

    async def _several(self) -> AsyncIterator[Batch]:
        news: asyncio.Queue[Batch | Exception | None] = asyncio.Queue(maxsize=len(self.streams))

        async def read(index: int, stream: Stream) -> None:
            try:
                async for delta in stream:
                    await news.put((index, [delta, *stream.drain()]))
            except Exception as error:
                await news.put(error)
            await news.put(None)

        self._tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(self.streams)]
        left = len(self.streams)
        while left:
            item = await news.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item

    async def gather(self) -> list[Gathered]:
        """Every sequence, whole."""
        gathered = [Gathered() for _ in self.streams]
        async for index, deltas in self.batches():
            for delta in deltas:
                gathered[index].add(delta)
        for one in gathered:
            refuse_abort(one.finish_reason)
        return gathered


def refuse_abort(finish_reason: str) -> None:
    """What the operator ended is no answer: raises the error that says so."""
    if finish_reason == "abort":
        raise ApiError(503, "the reply was ended by the operator", code="aborted")


async def respond(
    request: Request, reply: Reply, prepare: Awaitable[None], whole: Callable[[list[Gathered]], Any],
    frames: AsyncIterator[bytes] | None,
) -> Response:  # fmt: skip
    """Answer with `frames`, or with one JSON object made by `whole`.

    `prepare` submits; until it has, errors have a status of their own. The sequences end when the caller has gone.
    """
    streaming = False
    try:
        await unless_gone(request.receive, prepare)
        if frames is not None:
            streaming = True
            return EventStream(frames, reply.close, reply.stalled_s)
        return JSONResponse(whole(await unless_gone(request.receive, reply.gather())))
    finally:
        if not streaming:
            reply.close()


def usage_of(sequences: list[Gathered], samples: int) -> Usage:
    """Tokens of all sequences; a prompt with several samples counts once."""
    first = sequences[::samples]
    prompt = sum(one.metrics.get("prompt_tokens", 0) for one in first)
    drawn = sum(len(one.ids) for one in sequences)
    cached = sum(one.metrics.get("cached_tokens", 0) for one in first)
    return Usage(
        prompt_tokens=prompt, completion_tokens=drawn, total_tokens=prompt + drawn,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )  # fmt: skip
