"""POST /v1/responses, GET and DELETE of a stored response, and GET of the items before it.

The events of an answer are those of OpenAI, in its order, each with a sequence number:

    response.created, response.in_progress
    for each item:   output_item.added, content_part.added, deltas, the whole text, content_part.done, output_item.done
    response.completed, or response.incomplete if the reply reached its length limit, or error and response.failed
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from minitui.server.access import owner_of
from minitui.server.answer import Output
from minitui.server.bodies import Endpoints
from minitui.server.errors import STREAMED, ApiError
from minitui.server.items import Item, ItemAnswer
from minitui.server.responses.schema import InputItem, ResponsesRequest, messages
from minitui.server.responses.store import ResponseStore, StoredItem
from minitui.server.responses.tools import Called, as_input, functions
from minitui.server.service import Service
from minitui.server.settings import Role
from minitui.server.sse import event

ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key",
          "reasoning", "safety_identifier", "text", "tool_choice", "truncation", "user")
IDS = {"text": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}  # kind of an item -> prefix of its id
EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text",
          "call": "response.function_call_arguments", "custom": "response.custom_tool_call_input"}
WHOLE = {"text": "text", "reasoning": "text", "call": "arguments", "custom": "input"}  # kind -> field of its text


class ResponsesAnswer(ItemAnswer):
    """One response. `store`: where earlier responses are, and where this one will be."""

    names: ClassVar[dict[str, str]] = {
        "messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(
        self, service: Service, request: ResponsesRequest, store: ResponseStore, history: Sequence[StoredItem],
        said: list[dict[str, Any]],
    ) -> None:
        """`history`: the items of the conversation; `said`: the chat messages that these are."""
        self._request, self._store, self._history = request, store, history
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._echo = _echo(request)
        self._numbers = itertools.count()
        self._item_ids: list[str] = []
        offered = functions(request.tools or ())
        self._called = {called.function: called for called in offered}
        super().__init__(service, request, messages=said, **request.tool_fields(offered), **request.format_fields())

    @classmethod
    async def create(cls, service: Service, request: ResponsesRequest, store: ResponseStore) -> Self:
        """Returns the answer. Raises ApiError if stored items are missing or too large."""
        service.check_ready()
        previous, limit = request.previous_response_id, service.settings.max_body
        items = [
            *(store.conversation(previous) if previous is not None else ()),
            *(store.item(item.id or "") if item.type == "item_reference" else item for item in request.input),
        ]
        if (size := sum(len(item.data) for item in items if isinstance(item, StoredItem))) > limit:
            raise ApiError(
                400, f"the stored items of this conversation have {size:,} bytes; the limit is {limit:,}: begin a new "
                "conversation, for example with a summary of this one", "previous_response_id" if previous else "input",
            )
        return cls(service, request, store, *await service.in_thread(_conversation, request.instructions, items))

    # ---- the response

    def _response(self, status: str, output: Output | None = None, error: ApiError | None = None) -> dict[str, Any]:
        kind = "rate_limit_exceeded" if error is not None and error.status == 429 else "server_error"
        return {
            "id": self._id, "object": "response", **self._echo, "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None, "status": status, "background": False,
            "error": None if error is None else {"code": kind, "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.service.model,
            "output": [self._item(item, self._status(item)) for item in self.items] if status != "in_progress" else [],
            "parallel_tool_calls": self._request.parallel_tool_calls is not False, "service_tier": "default",
            "store": self._request.store is not False, "temperature": self._params.temperature, "top_logprobs": 0,
            "top_p": self._params.top_p, "usage": None if output is None else self._usage(output),
        }

    def reply(self, output: Output) -> dict[str, Any]:
        response = self._response("incomplete" if output.finish_reason == "length" else "completed", output)
        if self._request.store is not False:
            self._store.add(response, self._history)
        return response

    def _usage(self, output: Output) -> dict[str, Any]:
        usage = self.usage([output])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens(output)},
            "total_tokens": usage["total_tokens"],
        }

    # ---- items

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        kind, started = self._kind(item), status == "in_progress"
        if item.index == len(self._item_ids):
            self._item_ids.append(f"{IDS[kind]}_{uuid.uuid4().hex}")
        head = {"id": self._item_ids[item.index], "status": status}
        if item.kind == "call":
            called = self._known(item)
            namespace = {} if called.namespace is None else {"namespace": called.namespace}
            return {
                **head, "type": "custom_tool_call" if called.custom else "function_call", "call_id": item.call_id,
                "name": called.name, **namespace, WHOLE[kind]: "" if started else self._text(item),
            }
        content = [] if started else [_part(kind, item.text)]
        if kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _known(self, item: Item) -> Called:
        """Returns how the client knows the called function."""
        return self._called.get(item.name, Called(item.name))

    def _kind(self, item: Item) -> str:
        """Returns the item's kind; calls of custom tools are a kind of their own."""
        return "custom" if item.kind == "call" and self._known(item).custom else item.kind

    def _text(self, item: Item) -> str:
        return as_input(item.text) if self._kind(item) == "custom" else item.text

    @staticmethod
    def _status(item: Item) -> str:
        return "completed" if item.complete else "incomplete"

    # ---- events

    def opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def begin(self, item: Item) -> Iterator[bytes]:
        added = self._item(item, "in_progress")
        yield self._event("response.output_item.added", output_index=item.index, item=added)
        if item.kind != "call":
            yield self._item_event("response.content_part.added", item, part=_part(item.kind, ""))

    def grow(self, item: Item, text: str) -> Iterator[bytes]:
        delta = self._text(item) if item.kind == "call" else text  # a call arrives whole
        yield self._item_event(f"{EVENTS[self._kind(item)]}.delta", item, delta=delta, **_no_logprobs(item))

    def end(self, item: Item) -> Iterator[bytes]:
        kind = self._kind(item)
        yield self._item_event(f"{EVENTS[kind]}.done", item, **{WHOLE[kind]: self._text(item)}, **_no_logprobs(item))
        if item.kind != "call":
            yield self._item_event("response.content_part.done", item, part=_part(item.kind, item.text))
        done = self._item(item, self._status(item))
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def closing(self, outputs: list[Output]) -> Iterator[bytes]:
        response = self.reply(outputs[0])
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        if self.items:
            self.items[-1].complete = False
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        return told + self._event("response.failed", response=self._response("failed", error=error))

    def _item_event(self, kind: str, item: Item, **fields: Any) -> bytes:
        place = {} if item.kind == "call" else {"content_index": 0}
        return self._event(kind, item_id=self._item_ids[item.index], output_index=item.index, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields, "sequence_number": next(self._numbers)}, kind)


def _conversation(
    instructions: str | None, items: Sequence[StoredItem | InputItem]
) -> tuple[list[StoredItem], list[dict[str, Any]]]:
    """Returns a conversation as items for the store, and as chat messages."""
    packed = [item if isinstance(item, StoredItem) else StoredItem.pack(item.plain()) for item in items]
    return packed, messages(instructions, [item.plain() for item in packed])


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _no_logprobs(item: Item) -> dict[str, Any]:
    return {"logprobs": []} if item.kind == "text" else {}


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of the request that the response repeats. Raises ApiError if they cannot be sent as JSON."""
    named = request.model_dump(include=set(ECHOED), by_alias=True, exclude_none=True)
    given = {
        **dict.fromkeys(ECHOED), "metadata": {}, "tool_choice": "auto", "truncation": "disabled", **named,
        "text": {"format": {"type": "text"}, **named.get("text", {})},
        "tools": [tool.model_dump(exclude=None if tool.tools else {"tools", "format"}) for tool in request.tools or ()],
        "reasoning": {"effort": None, "summary": None, **named.get("reasoning", {})},
    }
    try:  # JSON can contain NaN and escaped lone surrogates, which cannot be sent
        text = json.dumps(given, allow_nan=False, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise ApiError(400, "tools or text.format has numbers that are not finite, or is nested too deeply") from None
    echoed: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
    return echoed


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
    ) -> ItemList:
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
        )

    @routes.delete("/v1/responses/{name}", response_model=Deleted)
    async def delete(name: str, request: Request) -> Deleted:
        """Drops a stored response."""
        stored_for(request).delete(name)
        return Deleted(id=name)

    return routes
