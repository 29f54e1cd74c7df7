"""POST /v1/completions and POST /generate: continue a text without a chat template. The caller writes the whole prompt.
If the prompt spells out control tokens, they are encoded as control tokens, so that the caller can write a chat
template by hand. In /v1/chat/completions, control tokens in a user's text are encoded as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.text.tokenizer import LONG_TEXT
from minitui.server.answer import Answer, OpenAIAnswer, Output, usage_of
from minitui.server.bodies import Endpoints
from minitui.server.errors import STREAMED
from minitui.server.openai.logprobs import (
    Offsets,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
    without_end,
)
from minitui.server.openai.prompts import encode, needed
from minitui.server.openai.reply_schema import Generated, OpenAIResponse
from minitui.server.openai.text_schema import CompletionRequest, GenerateRequest
from minitui.server.service import Service
from minitui.server.sse import as_json, event


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = Endpoints(service)

    @routes.post("/v1/completions", response_model=OpenAIResponse, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, several texts, or token ids."""
        return await CompletionAnswer(service, body).respond(request)

    @routes.post("/generate", response_model=Generated, responses=STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a text with up to 64 greedy tokens, unless the body says otherwise.

        By default, the answer is a stream of events `data: {"text": ...}`, then `data: [DONE]`. With "stream": false it
        is one JSON object.
        """
        return await GenerateAnswer(service, body).respond(request)

    return routes


class GenerateAnswer(Answer):
    """The answer of /generate: one continuation."""

    def __init__(self, service: Service, body: GenerateRequest) -> None:
        super().__init__(service, 1, body.stream is not False)
        self.body = body

    async def prepare(self) -> None:
        service, body = self.service, self.body
        ids = await _encode(service, len(body.prompt), body.prompt, True)
        await self.submit([ids], body.params())

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        output = outputs[0]
        return {"text": output.text, "finish_reason": output.finish_reason, "usage": usage_of(self.prompts, outputs)}

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        if part.text:
            yield event({"text": part.text})


class CompletionAnswer(OpenAIAnswer):
    """The choices of one request: `n` choices for each prompt, in the order of the prompts."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        prompt = body.prompt
        self.given: list[str | list[int]]
        self.given = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else [*prompt]
        super().__init__(service, body, len(self.given))
        self.body = body
        self._only_prompt = body.max_tokens == 0
        self._offsets: dict[int, Offsets] = {}  # choice -> text offsets of its tokens so far

    async def prepare(self) -> None:
        service, body, info = self.service, self.body, self.service.info
        last = self.last_tokens(body, body.max_tokens)
        size = sum(map(len, self.given))
        added = body.add_special_tokens is not False
        prompts = [
            await _encode(service, size, prompt, added, last)
            if isinstance(prompt, str) else prompt if last is None else prompt[-last:]
            for prompt in self.given
        ]
        scored = [top for top in (body.prompt_logprobs, body.logprobs if body.echo else None) if top is not None]
        # The engine draws at least one token. With max_tokens 0, that token is not a part of the answer.
        limit = None if body.max_tokens is None else max(1, body.max_tokens)
        params = body.params(limit, info.generation, logprobs=body.logprobs, prompt_logprobs=max(scored, default=None))
        await self.submit(
            prompts, params, service.label(user=body.user), names=body.field_names, **self.scheduling(body)
        )

    def shown(self, part: Output) -> Output:
        if not self._only_prompt:
            return part
        ended = part.finish_reason and "length"
        return Output(finish_reason=ended, metrics=part.metrics, prompt_logprobs=part.prompt_logprobs)

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        body, ids = self.body, self.prompts[index // self.samples]
        echo = self._echo(index, output)
        logprobs = self._logprobs(index, output)
        if "logprobs" in echo and logprobs is not None:
            logprobs = joined(echo["logprobs"], logprobs)
        choice = self._choice(index, echo.get("text", "") + output.text, output.finish_reason, logprobs)
        choice |= {"stop_reason": output.metrics.get("stop_reason"), **self.token_ids(body, output)}
        if body.return_token_ids:
            choice["prompt_token_ids"] = ids
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, output.prompt_logprobs, body.prompt_logprobs)
        return choice

    def _echo(self, index: int, output: Output) -> dict[str, Any]:
        """Returns the text and the logprobs of the prompt, for a choice of a request with echo. `output`: of this
        choice; it must have the prompt logprobs."""
        body = self.body
        if not body.echo:
            return {}
        given, ids = self.given[index // self.samples], self.prompts[index // self.samples]
        whole = isinstance(given, str) and body.truncate_prompt_tokens is None
        text = str(given) if whole else self.tokenizer.decode(ids, skip_special_tokens=False)
        self._offsets[index] = Offsets(self.tokenizer, body.skip_special_tokens is not False, len(text))
        if body.logprobs is None:
            return {"text": text}
        scores = echoed_logprobs(self.tokenizer, ids, output.prompt_logprobs, body.logprobs, text)
        return {"text": text, "logprobs": scores}

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        if index not in self._offsets and (part.ids or part.finish_reason):  # all of the prompt has been computed
            self._offsets[index] = Offsets(self.tokenizer, self.body.skip_special_tokens is not False)
            echo = self._echo(index, outputs[index])
            if echo or self.body.return_token_ids:
                choice = self._choice(index, echo.get("text", ""), None, echo.get("logprobs"))
                if self.body.return_token_ids:
                    choice["prompt_token_ids"] = self.prompts[index // self.samples]
                yield self.chunk([choice], outputs)
        if self.only_text and not part.finish_reason:
            if part.text:
                yield self.text_chunk(index, f'"text":{as_json(part.text)}')
            return
        logprobs = self._logprobs(index, part)
        more = self.token_ids(self.body, part)
        if part.text or part.finish_reason or (logprobs and logprobs["tokens"]) or more.get("token_ids"):
            choice = self._choice(index, part.text, part.finish_reason or None, logprobs)
            if part.finish_reason:
                more["stop_reason"] = part.metrics.get("stop_reason")
            yield self.chunk([{**choice, **more}], outputs)

    def _choice(self, index: int, text: str, finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, part: Output) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        offsets = self._offsets.setdefault(index, Offsets(self.tokenizer, self.body.skip_special_tokens is not False))
        # With echo the end token is listed, as in vLLM: programs that score texts drop the last entry.
        ends = () if self.body.echo else self.service.info.eos_ids
        shown = without_end(part.logprobs, part.finish_reason, ends)
        return completion_logprobs(self.tokenizer, shown, self.body.logprobs, offsets)


async def _encode(service: Service, size: int, text: str, added: bool, last: int | None = None) -> list[int]:
    """Returns the result of `encode`. `size`: the number of characters of all prompts of the request."""
    if size >= LONG_TEXT:
        return await service.in_thread(encode, service.tokenizer, text, added, service.longest, last)
    text = needed(service.tokenizer, text, service.longest, last)
    ids = await service.encoder.encode(service.tokenizer, text, added)
    return ids if last is None else ids[-last:]
