"""POST /v1/chat/completions: a conversation through the model's own template, its reply taken apart again."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import InvalidRequest
from engine.params import SamplingParams
from minitui.server.errors import RESPONSES, STREAMED, ApiError
from minitui.server.generation import Gathered, Reply, refuse_abort, respond, usage_of
from minitui.server.logprobs import chat_logprobs, without_end
from minitui.server.prompts import conversation
from minitui.server.reply_parser import THINK, ForcedCallParser, Parts, ReplyParser
from minitui.server.schema import Answer, ChatRequest, NamedTool
from minitui.server.service import Service
from minitui.server.sse import DONE, event
from minitui.server.tools import call_schema, on_one_line


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(responses=RESPONSES)

    @routes.post("/v1/chat/completions", response_model=Answer, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation, whole or as server-sent events."""
        service.check_ready()
        service.check_model(body.model)
        answer = ChatAnswer(service, body)
        frames = answer.frames() if body.stream else None
        return await respond(request, answer.reply, answer.prepare(), answer.whole, frames)

    return routes


class ChatAnswer:
    """One request's choices on their way. Takes their places in the queue when made."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self.service, self.body = service, body
        self.tokenizer = service.tokenizer
        self.samples = body.n or 1
        self.reply = Reply(service, self.samples)
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model}
        choice = body.tool_choice or "auto"
        self.tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if choice != "none" else []
        self.forced = self.tools if choice == "required" else []
        self.thinking = False
        if isinstance(choice, NamedTool):
            self.forced = [tool for tool in self.tools if tool["function"]["name"] == choice.function.name]
            if not self.forced:
                self.reply.close()
                name = choice.function.name
                raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
        self.choices: list[Choice] = []

    async def prepare(self) -> None:
        """Encode, submit."""
        body = self.body
        values = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort == "none":
            values.setdefault("enable_thinking", False)
        ids = await self.service.in_thread(
            conversation, self.tokenizer, body.messages, self.tools or None, True, values, self.service.longest
        )
        opening = self.tokenizer.decode(ids[-8:], skip_special_tokens=False)
        self.thinking = not self.forced and opening.rstrip().endswith(THINK)
        self.choices = [Choice(self) for _ in range(self.samples)]
        await self.reply.submit([ids], self._params(), self.service.label(user=body.user), "messages", body.field_names)

    def _params(self) -> SamplingParams:
        body = self.body
        schema = body.response_format.grammar() if body.response_format else None
        if self.forced:
            if schema is not None:
                raise InvalidRequest("response_format and a tool_choice that demands a call exclude each other",
                                     "response_format")  # fmt: skip
            schema = call_schema(self.forced)
        schema = on_one_line(schema) if schema is not None else None
        limit = body.max_completion_tokens or body.max_tokens
        info = self.service.info
        return body.params(
            limit, info["generation"], info["vocab_size"], json_schema=schema,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )  # fmt: skip

    def whole(self, sequences: list[Gathered]) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        for index, (choice, sequence) in enumerate(zip(self.choices, sequences, strict=True)):
            choice.take(sequence.text, sequence.finish_reason)
            choices.append(choice.message(index, sequence))
        return {
            **self.head, "object": "chat.completion", "choices": choices, "system_fingerprint": None,
            "usage": usage_of(sequences, self.samples).model_dump(),
        }  # fmt: skip

    async def frames(self) -> AsyncIterator[bytes]:
        """The answer as events."""
        options = self.body.stream_options
        sequences = [Gathered() for _ in self.choices]
        for index in range(len(self.choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, deltas in self.reply.batches():
            sequence, choice = sequences[index], self.choices[index]
            for delta in deltas:
                sequence.add(delta)
            choice.take("".join(delta.text for delta in deltas), deltas[-1].finish_reason)
            logprobs = self.logprobs([entry for delta in deltas for entry in delta.logprobs], deltas[-1].finish_reason)
            for changes in choice.changes() or ([{}] if logprobs and logprobs["content"] else []):
                yield self._chunk(index, changes, logprobs=logprobs)
                logprobs = None  # they stand in the first chunk of their tokens
            if finish := choice.finish_reason:
                told = options is not None and options.continuous_usage_stats
                usage = usage_of(sequences, self.samples).model_dump() if told else None
                yield self._chunk(index, {}, finish, logprobs, usage)
        if options and options.include_usage:
            usage = usage_of(sequences, self.samples).model_dump()
            yield event({**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def logprobs(self, entries: list[Any], finish_reason: str) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        shown = without_end(entries, finish_reason, self.service.info["eos_ids"])
        return chat_logprobs(self.tokenizer, shown, self.body.top_logprobs or 0)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, usage: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        return event({**chunk, "usage": usage} if usage else chunk)


class Choice:
    """One of n replies: what its parser has found so far."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._single = answer.body.parallel_tool_calls is False
        self._parser = ForcedCallParser() if answer.forced else ReplyParser(answer.thinking, bool(answer.tools))
        self._news = Parts()
        self.parts = Parts()
        self.finish_reason: str | None = None

    def take(self, text: str, finish_reason: str) -> None:
        """The next text, and how the reply ended if it has."""
        found = [self._parser.push(text)]
        if finish_reason:
            found.append(self._parser.flush())
        self._news = Parts("".join(p.content for p in found), "".join(p.reasoning for p in found))
        for call in [call for parts in found for call in parts.calls]:
            if not (self._single and (self.parts.calls or self._news.calls)):
                self._news.calls.append(call)
        self.parts.content += self._news.content
        self.parts.reasoning += self._news.reasoning
        self.parts.calls += self._news.calls
        refuse_abort(finish_reason)
        if finish_reason:
            self.finish_reason = "tool_calls" if self.parts.calls and finish_reason == "stop" else finish_reason

    def changes(self) -> list[dict[str, Any]]:
        """The last news as deltas of a stream."""
        changes: list[dict[str, Any]] = []
        if self._news.reasoning:
            changes.append({"reasoning_content": self._news.reasoning})
        if self._news.content:
            changes.append({"content": self._news.content})
        before = len(self.parts.calls) - len(self._news.calls)
        for number, call in enumerate(self._news.calls, before):
            changes.append({"tool_calls": [{"index": number, **call}]})
        return changes

    def message(self, index: int, sequence: Gathered) -> dict[str, Any]:
        """The choice as a whole."""
        message: dict[str, Any] = {"role": "assistant", "content": self.parts.content, "refusal": None}
        if self.parts.reasoning:
            message["reasoning_content"] = self.parts.reasoning
        if self.parts.calls:
            message["tool_calls"] = self.parts.calls
            message["content"] = self.parts.content or None
        logprobs = self._answer.logprobs(sequence.logprobs, sequence.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}
