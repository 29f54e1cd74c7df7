"""POST /v1/completions and POST /generate: a text goes on as it stands.

The caller writes the whole prompt, so control tokens spelled in it count as such: that is how a template is written by
hand. Conversations, where a user's text must stay text, belong to /v1/chat/completions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minitui.server.errors import RESPONSES, STREAMED, ApiError
from minitui.server.generation import Gathered, Reply, refuse_abort, respond, usage_of
from minitui.server.logprobs import Offsets, completion_logprobs, without_end
from minitui.server.prompts import encode
from minitui.server.schema import Answer, CompletionRequest, Generated, GenerateRequest
from minitui.server.service import Service
from minitui.server.sse import DONE, event


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(responses=RESPONSES)

    @routes.post("/v1/completions", response_model=Answer, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, several texts, or token ids."""
        service.check_ready()
        service.check_model(body.model)
        answer = CompletionAnswer(service, body)
        frames = answer.frames() if body.stream else None
        return await respond(request, answer.reply, answer.prepare(), answer.whole, frames)

    @routes.post("/generate", response_model=Generated, responses=STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a text: the plain endpoint. Streams `data: {"text": ...}` and ends with `data: [DONE]`."""
        service.check_ready()
        reply = Reply(service, 1)

        async def prepare() -> None:
            ids = await service.in_thread(encode, service.tokenizer, body.prompt, True, service.longest)
            info = service.info
            await reply.submit([ids], body.sampled().params(body.max_tokens, info["generation"], info["vocab_size"]))

        async def frames() -> AsyncIterator[bytes]:
            async for _, deltas in reply.batches():
                refuse_abort(deltas[-1].finish_reason)
                text = "".join(delta.text for delta in deltas)
                if text:
                    yield event({"text": text})
            yield DONE

        def whole(sequences: list[Gathered]) -> dict[str, Any]:
            one = sequences[0]
            return {
                "text": one.text, "finish_reason": one.finish_reason, "usage": usage_of(sequences, 1).model_dump()
            }  # fmt: skip

        return await respond(request, reply, prepare(), whole, frames() if body.stream else None)

    return routes


class CompletionAnswer:
    """One request's choices: `n` for each of its prompts, in order."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo and logprobs do not go together here: ask for one of them", "echo")
        self.service, self.body = service, body
        self.tokenizer = service.tokenizer
        self.samples = body.n or 1
        prompt = body.prompt
        self.given: list[str | list[int]]
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            self.given = [prompt]
        else:
            self.given = list(prompt)
        self.reply = Reply(service, self.samples * len(self.given))
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model,
                     "object": "text_completion"}  # fmt: skip

    async def prepare(self) -> None:
        """Encode, submit."""
        prompts = [
            await self.service.in_thread(
                encode, self.tokenizer, given, self.body.add_special_tokens, self.service.longest
            )
            if isinstance(given, str) else given
            for given in self.given
        ]  # fmt: skip
        info = self.service.info
        params = self.body.params(
            self.body.max_tokens, info["generation"], info["vocab_size"], logprobs=self.body.logprobs
        )
        await self.reply.submit(prompts, params, self.service.label(user=self.body.user), names=self.body.field_names)

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        given = self.given[index // self.samples]
        return given if isinstance(given, str) else self.tokenizer.decode(given, skip_special_tokens=False)

    def whole(self, sequences: list[Gathered]) -> dict[str, Any]:
        """The answer as one object."""
        choices = [
            {
                "index": index, "text": self._echo(index) + one.text, "finish_reason": one.finish_reason,
                "logprobs": self._logprobs(one.logprobs, one.finish_reason, self._offsets()),
            }
            for index, one in enumerate(sequences)
        ]  # fmt: skip
        return {**self.head, "choices": choices, "usage": usage_of(sequences, self.samples).model_dump()}

    async def frames(self) -> AsyncIterator[bytes]:
        """The answer as events."""
        sequences = [Gathered() for _ in self.reply.streams]
        offsets = [self._offsets() for _ in sequences]
        if self.body.echo:
            for index in range(len(sequences)):
                yield self._chunk(index, self._echo(index), None, None)
        async for index, deltas in self.reply.batches():
            for delta in deltas:
                sequences[index].add(delta)
            refuse_abort(deltas[-1].finish_reason)
            text = "".join(delta.text for delta in deltas)
            entries = [entry for delta in deltas for entry in delta.logprobs]
            logprobs = self._logprobs(entries, deltas[-1].finish_reason, offsets[index])
            if text or deltas[-1].finish_reason or (logprobs and logprobs["tokens"]):
                yield self._chunk(index, text, deltas[-1].finish_reason or None, logprobs)
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield event({**self.head, "choices": [], "usage": usage_of(sequences, self.samples).model_dump()})
        yield DONE

    def _offsets(self) -> Offsets:
        return Offsets(self.tokenizer, self.body.skip_special_tokens)

    def _logprobs(self, entries: list[Any], finish_reason: str, offsets: Offsets) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        shown = without_end(entries, finish_reason, self.service.info["eos_ids"])
        return completion_logprobs(self.tokenizer, shown, self.body.logprobs, offsets)

    def _chunk(self, index: int, text: str, finish: str | None, logprobs: Any) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return event({**self.head, "choices": [choice]})
