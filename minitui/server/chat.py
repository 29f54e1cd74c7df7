"""POST /v1/chat/completions: encodes a conversation with the model's chat template, and parses the reply.

The parser (reply_parser.py) separates reasoning, content and tool calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import InvalidRequest
from engine.params import SamplingParams
from minitui.server.answer import OpenAIAnswer, Output
from minitui.server.errors import RESPONSES, STREAMED, ApiError
from minitui.server.logprobs import chat_logprobs, without_end
from minitui.server.prompts import conversation
from minitui.server.reply_parser import THINK, ForcedCallParser, Parts, ReplyParser
from minitui.server.schema import ChatRequest, NamedTool, OpenAIResponse
from minitui.server.service import Service
from minitui.server.tools import call_schema


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = APIRouter(responses=RESPONSES)

    @routes.post("/v1/chat/completions", response_model=OpenAIResponse, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation. The reply is one JSON object, or a stream of server-sent events."""
        return await ChatAnswer(service, body).respond(request)

    return routes


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """Returns the tools that the model may call."""
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.tool_choice != "none" else []


async def prompt_of(service: Service, body: ChatRequest, tools: list[dict[str, Any]]) -> list[int]:
    """Returns the ids of a request's prompt. Raises InvalidRequest or ApiError if it has none."""
    values = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        values.setdefault("enable_thinking", False)
    try:
        return await service.in_thread(
            conversation, service.tokenizer, body.messages, tools or None, True, values, service.longest
        )
    except InvalidRequest as error:
        if error.field == "prompt":  # the tokenizer's name for the text
            error.field = "messages"
        raise


class ChatAnswer(OpenAIAnswer):
    """The choices of one request. `tools`: the model may call these; `forced`: the model must call one of these."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body, 1)
        self.body = body
        choice = body.tool_choice or "auto"
        self.tools = offered_tools(body)
        self.forced = self.tools if choice == "required" else []
        self.thinking = False  # True if the prompt ends with an open think tag
        self.choices: list[Choice] = []

    async def prepare(self) -> None:
        service, body = self.service, self.body
        if isinstance(body.tool_choice, NamedTool):
            name = body.tool_choice.function.name
            self.forced = [tool for tool in self.tools if tool["function"]["name"] == name]
            if not self.forced:
                raise ApiError(400, f"tool_choice names {name!r}, which is not one of the tools", "tool_choice")
        ids = await prompt_of(service, body, self.tools)
        prompt_end = self.tokenizer.decode(ids[-8:], skip_special_tokens=False)
        self.thinking = not self.forced and prompt_end.rstrip().endswith(THINK)
        self.choices = [Choice(self) for _ in range(self.samples)]
        await self.submit([ids], self._sampling_params(), service.label(user=body.user), "messages", body.field_names)

    def _sampling_params(self) -> SamplingParams:
        body = self.body
        schema = body.response_format.grammar() if body.response_format else None
        if self.forced:
            if schema is not None:
                raise InvalidRequest("response_format cannot be combined with a tool_choice that requires a call",
                                     "response_format")  # fmt: skip
            schema = call_schema(self.forced)
        limit = body.max_completion_tokens or body.max_tokens
        info = self.service.info
        return body.params(
            limit, info["generation"], info["vocab_size"], json_schema=schema,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )  # fmt: skip

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        return {**super().whole(outputs), "system_fingerprint": None}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        choice = self.choices[index]
        choice.take(output.text, output.finish_reason)
        return {
            "index": index, "message": choice.message(), "logprobs": self._logprobs(output),
            "finish_reason": choice.finish_reason,
        }  # fmt: skip

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self.choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        choice = self.choices[index]
        choice.take(part.text, part.finish_reason)
        logprobs = self._logprobs(part)
        for change in choice.changes() or ([{}] if logprobs and logprobs["content"] else []):
            yield self._chunk(index, change, logprobs=logprobs)
            logprobs = None  # only the first chunk contains logprobs
        if choice.finish_reason:
            with_usage = self._options is not None and self._options.continuous_usage_stats
            usage = self.usage(outputs) if with_usage else None
            yield self._chunk(index, {}, choice.finish_reason, logprobs, usage)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.chunk([choice], usage)

    def _logprobs(self, part: Output) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        shown = without_end(part.logprobs, part.finish_reason, self.service.info["eos_ids"])
        return chat_logprobs(self.tokenizer, shown, self.body.top_logprobs or 0)


class Choice:
    """One of n replies, parsed as it arrives. `parts`: everything parsed so far."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._single = answer.body.parallel_tool_calls is False
        free = ReplyParser(answer.thinking, bool(answer.tools))
        self._parser = ForcedCallParser(answer.forced) if answer.forced else free
        self._new = Parts()
        self.parts = Parts()
        self.finish_reason: str | None = None

    def take(self, text: str, finish_reason: str) -> None:
        """Parse the next part of the reply. `finish_reason` is empty until the reply ends."""
        found = [self._parser.push(text)]
        if finish_reason:
            found.append(self._parser.flush())
        self._new = Parts("".join(p.content for p in found), "".join(p.reasoning for p in found))
        for call in [call for parts in found for call in parts.calls]:
            if not (self._single and (self.parts.calls or self._new.calls)):
                self._new.calls.append(call)
        self.parts.content += self._new.content
        self.parts.reasoning += self._new.reasoning
        self.parts.calls += self._new.calls
        if finish_reason:
            self.finish_reason = "tool_calls" if self.parts.calls and finish_reason == "stop" else finish_reason

    def changes(self) -> list[dict[str, Any]]:
        """Returns the result of the last `take` as deltas for a stream."""
        changes: list[dict[str, Any]] = []
        if self._new.reasoning:
            changes.append({"reasoning_content": self._new.reasoning})
        if self._new.content:
            changes.append({"content": self._new.content})
        before = len(self.parts.calls) - len(self._new.calls)
        for number, call in enumerate(self._new.calls, before):
            changes.append({"tool_calls": [{"index": number, **call}]})
        return changes

    def message(self) -> dict[str, Any]:
        """Returns the whole reply as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.parts.content, "refusal": None}
        if self.parts.reasoning:
            message["reasoning_content"] = self.parts.reasoning
        if self.parts.calls:
            message["tool_calls"] = self.parts.calls
            message["content"] = self.parts.content or None
        return message
