"""POST /v1/messages, and the number of tokens in a prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from minitui.server.bodies import Endpoints
from minitui.server.errors import STREAMED
from minitui.server.messages.answer import MessagesAnswer
from minitui.server.messages.schema import CountRequest, MessagesRequest
from minitui.server.openai.chat import prompt_of
from minitui.server.service import Service


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
