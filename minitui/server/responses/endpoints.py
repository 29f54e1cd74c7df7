"""POST /v1/responses, and GET and DELETE of a stored response."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from minitui.server.errors import RESPONSES, STREAMED, ApiError
from minitui.server.responses.answer import ResponsesAnswer
from minitui.server.responses.schema import ResponsesRequest
from minitui.server.responses.store import ResponseStore
from minitui.server.service import Service


class ResponseObject(BaseModel):
    """The fields of a response that every client reads."""

    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class Deleted(BaseModel):
    id: str
    object: str = "response"
    deleted: bool = True


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter(responses=RESPONSES)
    store = ResponseStore(service.settings.stored_responses, service.settings.stored_bytes)

    @routes.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation with OpenAI's Responses API, whole or as server-sent events."""
        return await ResponsesAnswer(service, body, store).respond(request)

    @routes.get("/v1/responses/{name}", response_model=None, responses={200: {"model": ResponseObject}})
    async def retrieve(name: str, stream: bool = False) -> dict[str, Any]:
        """Returns a stored response."""
        if stream:
            raise ApiError(400, "a stored response cannot be streamed: leave stream out", "stream")
        return store.response(name)

    @routes.delete("/v1/responses/{name}", response_model=Deleted)
    async def delete(name: str) -> Deleted:
        """Drops a stored response."""
        store.delete(name)
        return Deleted(id=name)

    return routes
