"""Keeps the last responses of an API key, so that requests can continue them by their ids."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minitui.server.errors import ApiError

JsonObject = dict[str, Any]

POINTER = 8  # bytes of a reference to an item
IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc",
       "function_call_output": "fco", "custom_tool_call_output": "ctco"}  # type of an item -> prefix of its id


@dataclass(slots=True, eq=False)
class StoredItem:
    """An item of a conversation, as JSON. All responses that continue the conversation share it."""

    id: str
    data: bytes  # JSON: its exact size is known, and nothing in it can be changed by accident
    uses: int = 0  # by stored responses

    @classmethod
    def pack(cls, item: JsonObject) -> StoredItem:
        """Returns the item for the store. An item without an id gets one. Raises ApiError 400 for lone surrogates."""
        name = item.get("id") or f"{IDS.get(item['type'], 'item')}_{uuid.uuid4().hex}"
        try:
            return cls(name, _packed({**item, "id": name}))
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise ApiError(400, f"input has a lone surrogate (U+{code:04X}), not a character", "input") from None

    def plain(self) -> JsonObject:
        """Returns the item."""
        found: JsonObject = json.loads(self.data)
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    response: bytes  # JSON, without the output
    history: tuple[StoredItem, ...]  # the conversation before the response
    output: tuple[StoredItem, ...]

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return self.history + self.output

    @property
    def own_size(self) -> int:
        return len(self.response) + POINTER * len(self.items)


class ResponseStore:
    """Holds at most `count` responses and at most `size` bytes. The response that was not used for longest is dropped.
    A response that alone is larger than `size` is not kept."""

    def __init__(self, count: int, size: int) -> None:
        self.used = 0  # bytes
        self._count, self._size = count, size
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._items: dict[str, StoredItem] = {}  # by id

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, response: JsonObject, history: Sequence[StoredItem]) -> None:
        """Keep a response. `history`: the items of the conversation before it."""
        output = tuple(StoredItem.pack(item) for item in response["output"])
        rest = {name: value for name, value in response.items() if name != "output"}
        entry = _Entry(_packed(rest), tuple(history), output)
        if entry.own_size + sum(len(item.data) for item in set(entry.items)) > self._size:
            return
        self._entries[response["id"]] = entry
        self.used += entry.own_size
        for item in entry.items:
            if not item.uses:
                self.used += len(item.data)
                self._items[item.id] = item
            item.uses += 1
        while len(self._entries) > self._count or self.used > self._size:
            self._drop(next(iter(self._entries)))

    def response(self, name: str) -> bytes:
        """Returns a response as JSON. Raises ApiError 404 if it is not stored."""
        entry = self._find(name, None)
        output = b",".join(item.data for item in entry.output)
        return entry.response[:-1] + b',"output":[' + output + b"]}"

    def history(self, name: str) -> tuple[StoredItem, ...]:
        """Returns the items of the conversation before this response. Raises ApiError 404 if it is not stored."""
        return self._find(name, None).history

    def conversation(self, name: str) -> tuple[StoredItem, ...]:
        """Returns the items of the conversation, including this response. Raises ApiError 404 if it is not stored."""
        return self._find(name, "previous_response_id").items

    def item(self, name: str) -> StoredItem:
        """Returns an item of a stored conversation. Raises ApiError 404 if no conversation has it."""
        item = self._items.get(name)
        if item is None:
            raise self._missing("item", name, "input")
        return item

    def delete(self, name: str) -> None:
        """Drop a response. Raises ApiError 404 if it is not stored."""
        self._find(name, None)
        self._drop(name)

    def _find(self, name: str, field: str | None) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise self._missing("response", name, field)
        self._entries.move_to_end(name)
        return entry

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        self.used -= entry.own_size
        for item in entry.items:
            item.uses -= 1
            if not item.uses:
                self.used -= len(item.data)
                if self._items.get(item.id) is item:  # else a client gave this id to a later item, too
                    del self._items[item.id]

    def _missing(self, kind: str, name: str, field: str | None) -> ApiError:
        code = "previous_response_not_found" if field == "previous_response_id" else f"{kind}_not_found"
        return ApiError(
            404,
            f"there is no stored {kind} {name[:80]!r} of this API key: it was not stored, was deleted or was dropped "
            f"(this server keeps the key's last {self._count:,} responses, up to {self._size / (1 << 20):,.3g} MiB): "
            "send the whole conversation",
            field, code,
        )


def _packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
