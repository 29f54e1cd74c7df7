"""POST /v1/messages, and the number of tokens in a prompt."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from minitui.server.answer import Output
from minitui.server.bodies import Endpoints
from minitui.server.errors import STREAMED, ApiError
from minitui.server.items import Item, ItemAnswer
from minitui.server.messages.schema import CountRequest, MessagesRequest
from minitui.server.openai.chat import prompt_of
from minitui.server.service import Service
from minitui.server.sse import event

DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ItemAnswer):
    """One message of the assistant."""

    names: ClassVar[dict[str, str]] = {"response_format": "output_config.format", "stop": "stop_sequences"}

    def __init__(self, service: Service, request: MessagesRequest) -> None:
        super().__init__(service, request, **request.chat_fields())
        self._id = f"msg_{uuid.uuid4().hex}"
        self._started = False  # True after message_start

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.service.model, "content": content,
            **end, "usage": usage,
        }

    def reply(self, output: Output) -> dict[str, Any]:
        return self._message([_block(item, item.text) for item in self.items], self._end(output), self._usage(output))

    def _end(self, output: Output) -> dict[str, Any]:
        """Returns why the reply ended."""
        reason, stopped_by = self.choices[0].finish_reason or "", output.metrics.get("stop_reason")
        if reason == "stop" and isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": STOP_REASONS.get(reason, reason), "stop_sequence": None}

    def _usage(self, output: Output) -> dict[str, Any]:
        """Returns the token counts. Anthropic's `input_tokens` are the prompt's tokens that were not in the cache."""
        usage = self.usage([output])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens(output)},
        }

    # ---- events

    def opening(self) -> Iterator[bytes]:
        return iter(())  # message_start has the number of cached tokens, which is known only with the first token

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            unfinished = {"stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message=self._message([], unfinished, self._usage(outputs[0])))
        yield from super().events(index, part, outputs)

    def begin(self, item: Item) -> Iterator[bytes]:
        yield _event("content_block_start", index=item.index, content_block=_block(item, ""))

    def grow(self, item: Item, text: str) -> Iterator[bytes]:
        kind, name = DELTAS[item.kind]
        yield _event("content_block_delta", index=item.index, delta={"type": kind, name: text})

    def end(self, item: Item) -> Iterator[bytes]:
        if item.kind == "reasoning":
            yield _event("content_block_delta", index=item.index, delta={"type": "signature_delta", "signature": ""})
        yield _event("content_block_stop", index=item.index)

    def closing(self, outputs: list[Output]) -> Iterator[bytes]:
        yield _event("message_delta", delta=self._end(outputs[0]), usage=self._usage(outputs[0]))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event(error.anthropic_body, "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _block(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "text":
        return {"type": "text", "text": text}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object. The model may have written something else."""
    try:
        value = json.loads(text or "{}", parse_constant=lambda name: None)  # NaN, which JSON does not have
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


class Message(BaseModel):
    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    input_tokens: int


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = Endpoints(service)

    @routes.post("/v1/messages", response_model=Message, responses=STREAMED)
    async def create(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation with Anthropic's Messages API, whole or as server-sent events."""
        return await MessagesAnswer(service, body).respond(request)

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountRequest) -> TokenCount:
        """Returns the number of tokens that the request's prompt would have."""
        service.check_model(body.model)
        chat = MessagesAnswer.chat_request(body, body.chat_fields())
        return TokenCount(input_tokens=len(await prompt_of(service, chat, chat.described_tools())))

    return routes
