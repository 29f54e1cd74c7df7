"""POST /v1/completions and POST /generate: continue a text without a chat template.

The caller writes the whole prompt. If the prompt spells out control tokens, they are encoded as control tokens, so that
the caller can write a chat template by hand. In /v1/chat/completions, control tokens in a user's text are encoded as
plain text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minitui.server.answer import Answer, OpenAIAnswer, Output, usage_of
from minitui.server.errors import RESPONSES, STREAMED, ApiError
from minitui.server.logprobs import Offsets, completion_logprobs, without_end
from minitui.server.prompts import encode
from minitui.server.schema import CompletionRequest, Generated, GenerateRequest, OpenAIResponse
from minitui.server.service import Service
from minitui.server.sse import event


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter(responses=RESPONSES)

    @routes.post("/v1/completions", response_model=OpenAIResponse, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, several texts, or token ids."""
        return await CompletionAnswer(service, body).respond(request)

    @routes.post("/generate", response_model=Generated, responses=STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a text. A stream consists of events `data: {"text": ...}`, then `data: [DONE]`."""
        return await GenerateAnswer(service, body).respond(request)

    return routes


class GenerateAnswer(Answer):
    """The answer of /generate: one continuation."""

    def __init__(self, service: Service, body: GenerateRequest) -> None:
        super().__init__(service, 1, body.stream)
        self.body = body

    async def prepare(self) -> None:
        service, body = self.service, self.body
        ids = await service.in_thread(encode, service.tokenizer, body.prompt, True, service.longest)
        info = service.info
        await self.submit([ids], body.sampled().params(body.max_tokens, info["generation"], info["vocab_size"]))

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        output = outputs[0]
        return {"text": output.text, "finish_reason": output.finish_reason, "usage": usage_of(outputs, 1)}

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        if part.text:
            yield event({"text": part.text})


class CompletionAnswer(OpenAIAnswer):
    """The choices of one request: `n` choices for each prompt, in the order of the prompts."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        prompt = body.prompt
        self.prompts: list[str | list[int]]
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            self.prompts = [prompt]
        else:
            self.prompts = list(prompt)
        super().__init__(service, body, len(self.prompts))
        self.body = body
        self._offsets: dict[int, Offsets] = {}  # choice -> text offsets of its tokens so far

    async def prepare(self) -> None:
        service, body = self.service, self.body
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo and logprobs cannot be combined: ask for one of them", "echo")
        prompts = [
            await service.in_thread(encode, self.tokenizer, prompt, body.add_special_tokens, service.longest)
            if isinstance(prompt, str) else prompt
            for prompt in self.prompts
        ]  # fmt: skip
        info = service.info
        params = body.params(body.max_tokens, info["generation"], info["vocab_size"], logprobs=body.logprobs)
        await self.submit(prompts, params, service.label(user=body.user), names=body.field_names)

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.prompts[index // self.samples]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        return self._choice(index, self._echo(index) + output.text, output.finish_reason, self._logprobs(index, output))

    def opening(self) -> Iterator[bytes]:
        if self.body.echo:
            for index in range(len(self.streams)):
                yield self.chunk([self._choice(index, self._echo(index), None, None)])

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        logprobs = self._logprobs(index, part)
        if part.text or part.finish_reason or (logprobs and logprobs["tokens"]):
            yield self.chunk([self._choice(index, part.text, part.finish_reason or None, logprobs)])

    def _choice(self, index: int, text: str, finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}

    def _logprobs(self, index: int, part: Output) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        offsets = self._offsets.setdefault(index, Offsets(self.tokenizer, self.body.skip_special_tokens))
        shown = without_end(part.logprobs, part.finish_reason, self.service.info["eos_ids"])
        return completion_logprobs(self.tokenizer, shown, self.body.logprobs, offsets)
