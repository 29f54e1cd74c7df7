"""The base of the Responses and the Messages API: requests become chat requests, and replies are lists of items. An
item is reasoning, text or a tool call. OpenAI's Responses API calls such parts output items, Anthropic's Messages API
calls them content blocks. Both APIs stream one item after the other."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.errors import InvalidRequest
from minitui.server.answer import Output
from minitui.server.errors import ApiError, as_api_error
from minitui.server.openai.chat import ChatAnswer
from minitui.server.openai.chat_schema import ChatRequest
from minitui.server.openai.reply_parser import END_THINK
from minitui.server.schema import Sampled
from minitui.server.service import Service
from minitui.server.strict import Open

Message = dict[str, Any]


@dataclass
class Item:
    """A part of a reply. `text`: what it says so far; for a call, the arguments as JSON."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""  # of the called function
    call_id: str = ""
    text: str = ""
    complete: bool = True  # False: the reply reached its length limit inside this item


class Typed(Open):
    """A part of a request whose type decides which fields it needs."""

    kind: ClassVar[str]  # the part in an error: "a block"
    needs: ClassVar[Mapping[str, tuple[str, ...]]]  # type -> the fields that it needs

    type: str = Field(max_length=64)

    @model_validator(mode="after")
    def _has_its_fields(self) -> Self:
        if self.type not in self.needs:
            raise ValueError(f"{self.kind} of type {self.type!r} is not supported; known: {', '.join(self.needs)}")
        for name in self.needs[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"{self.kind} of type {self.type} needs {name}")
        return self


class Turns:
    """Builds the messages of a chat request from the items of a conversation."""

    def __init__(self) -> None:
        self._messages: list[Message] = []  # the content of a system message: its texts

    @property
    def messages(self) -> list[Message]:
        """The messages so far."""
        return [
            {**message, "content": "\n\n".join(message["content"])} if message["role"] == "system" else message
            for message in self._messages
        ]

    def say(self, role: str, text: str) -> None:
        """Add a text. The assistant's text joins reasoning that precedes it; system texts in a row become one."""
        last = self._messages[-1] if self._messages else {}
        if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        elif role == "system" and last.get("role") == role:
            last["content"].append(text)
        else:
            self._messages.append({"role": role, "content": [text] if role == "system" else text})

    def reason(self, text: str) -> None:
        """Add reasoning of the assistant."""
        self._messages.append({"role": "assistant", "content": "", "reasoning_content": text})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call. It joins the reasoning, text and calls that precede it."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a tool call."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


class ItemAnswer(ChatAnswer):
    """The answer to a request that became a ChatRequest. Subclasses write the events of an item and the whole reply."""

    names: ClassVar[Mapping[str, str]]  # a field of the chat request -> the field that the caller knows

    def __init__(self, service: Service, request: Sampled, **fields: Any) -> None:
        """`request`: the caller's; `fields`: what the chat request has besides the sampling parameters."""
        service.check_ready()
        super().__init__(service, self.chat_request(request, fields))
        self.items: list[Item] = []

    @classmethod
    def chat_request(cls, request: Sampled, fields: Mapping[str, Any]) -> ChatRequest:
        """Returns the request as a chat request. Raises ApiError, which names the caller's field, if it is invalid."""
        given = request.model_dump(include=set(Sampled.model_fields), exclude_unset=True, by_alias=True)
        given |= {name: value for name, value in fields.items() if value is not None}
        try:
            return ChatRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            field, *_ = [str(part) for part in first["loc"]] or [""]
            message = f"{field or 'the request'}: {first['msg'].removeprefix('Value error, ')}"
            raise cls._renamed(ApiError(400, message, field or None)) from error

    # ---- for subclasses

    def begin(self, item: Item) -> Iterator[bytes]:
        """Yields the events before the first text of an item."""
        raise NotImplementedError

    def grow(self, item: Item, text: str) -> Iterator[bytes]:
        """Yields the events for the next text of an item. `item.text` contains this text."""
        raise NotImplementedError

    def end(self, item: Item) -> Iterator[bytes]:
        """Yields the events after the last text of an item."""
        raise NotImplementedError

    def reply(self, output: Output) -> dict[str, Any]:
        """Returns the whole answer as JSON. All items have ended."""
        raise NotImplementedError

    # ---- reading the reply

    async def prepare(self) -> None:
        try:
            await super().prepare()
        except (ApiError, InvalidRequest) as error:
            raise self._renamed(as_api_error(error)) from error

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        for _ in self.events(0, outputs[0], outputs):
            pass  # this fills `items`
        return self.reply(outputs[0])

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        choice = self.choices[index]
        choice.take(part.text, part.finish_reason)
        for change in choice.changes():
            if text := change.get("reasoning_content"):
                yield from self._add("reasoning", text)
            if text := change.get("content"):
                yield from self._add("text", text)
            for call in change.get("tool_calls", ()):
                yield from self._end_last()
                self.items.append(Item("call", len(self.items), call["function"]["name"], call["id"]))
                yield from self.begin(self.items[-1])
                yield from self._add("call", call["function"]["arguments"])
        if part.finish_reason:
            yield from self._end_last(complete=part.finish_reason != "length")

    def reasoning_tokens(self, output: Output) -> int:
        """Returns how many of a reply's tokens are reasoning, including the end tag."""
        if not any(item.kind == "reasoning" for item in self.items):
            return 0

        def ended(count: int) -> bool:
            return END_THINK in self.tokenizer.decode(output.ids[:count], skip_special_tokens=False)

        return min(bisect.bisect_left(range(len(output.ids) + 1), True, key=ended), len(output.ids))

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[bytes]:
        if not self.items or self.items[-1].kind != kind:
            yield from self._end_last()
            self.items.append(Item(kind, len(self.items)))
            yield from self.begin(self.items[-1])
        self.items[-1].text += text
        yield from self.grow(self.items[-1], text)

    def _end_last(self, complete: bool = True) -> Iterator[bytes]:
        if self.items:
            self.items[-1].complete = complete
            yield from self.end(self.items[-1])

    @classmethod
    def _renamed(cls, error: ApiError) -> ApiError:
        """Returns the error with the caller's field in place of the chat request's."""
        for name, own in cls.names.items():
            if re.match(rf"{name}\b", error.param or ""):
                message = re.sub(rf"^{name}(\.\d+\.tool_calls)?\b", own, error.message)
                return ApiError(error.status, message, own, error.code, error.headers)
        return error
