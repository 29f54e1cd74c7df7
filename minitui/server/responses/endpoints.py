"""POST /v1/responses, GET and DELETE of a stored response, and GET of the items before it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from minitui.server.access import owner_of
from minitui.server.bodies import Endpoints
from minitui.server.errors import STREAMED, ApiError
from minitui.server.responses.answer import ResponsesAnswer
from minitui.server.responses.schema import ResponsesRequest
from minitui.server.responses.store import ResponseStore
from minitui.server.service import Service
from minitui.server.settings import Role


class ResponseObject(BaseModel):
    """The fields of a response that every client reads."""

    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ItemList(BaseModel):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    id: str
    object: str = "response"
    deleted: bool = True


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = Endpoints(service)
    stores: dict[str, ResponseStore] = {}  # by API key: no key can read, delete, continue or push out those of others

    def stored_for(request: Request) -> ResponseStore:
        settings = service.settings
        share = settings.stored_bytes // max(1, sum(role >= Role.CHAT for role in settings.keys.values()))
        return stores.setdefault(owner_of(request), ResponseStore(settings.stored_responses, share))

    @routes.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation with OpenAI's Responses API, whole or as server-sent events."""
        return await (await ResponsesAnswer.create(service, body, stored_for(request))).respond(request)

    @routes.get("/v1/responses/{name}", response_model=None, responses={200: {"model": ResponseObject}})
    async def retrieve(name: str, request: Request, stream: bool = False) -> Response:
        """Returns a stored response."""
        if stream:
            raise ApiError(400, "a stored response cannot be streamed: leave stream out", "stream")
        return Response(stored_for(request).response(name), media_type="application/json")

    @routes.get("/v1/responses/{name}/input_items", response_model=ItemList)
    async def input_items(
        name: str, request: Request, after: str | None = None, order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> ItemList:  # fmt: skip
        """Returns the items of the conversation before a stored response, in pages."""
        once = {item.id: item for item in stored_for(request).history(name)}  # an item may be referred to repeatedly
        items = list(once.values())[:: 1 if order == "asc" else -1]
        ids = [item.id for item in items]
        if after is not None and after not in ids:
            raise ApiError(400, f"the response has no input item {after[:80]!r}", "after")
        start = 0 if after is None else ids.index(after) + 1
        page = ids[start : start + limit]
        return ItemList(
            data=[item.plain() for item in items[start : start + limit]], first_id=page[0] if page else None,
            last_id=page[-1] if page else None, has_more=start + limit < len(ids),
        )  # fmt: skip

    @routes.delete("/v1/responses/{name}", response_model=Deleted)
    async def delete(name: str, request: Request) -> Deleted:
        """Drops a stored response."""
        stored_for(request).delete(name)
        return Deleted(id=name)

    return routes
