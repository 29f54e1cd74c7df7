"""Keeps the last responses, so that requests can continue them by their ids. The oldest are dropped first."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from minitui.server.errors import ApiError

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    response: bytes  # JSON: its exact size is known, and nothing in it can be changed by accident
    history: bytes  # JSON: the items of the whole conversation, with the response's output
    items: tuple[str, ...]  # the ids of the output items

    @property
    def size(self) -> int:
        return len(self.response) + len(self.history)


class ResponseStore:
    """Holds at most `count` responses and at most `size` bytes. A response that is used becomes the newest."""

    def __init__(self, count: int, size: int) -> None:
        self.used = 0  # bytes
        self._count, self._size = count, size
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._owners: dict[str, str] = {}  # id of an output item -> id of its response

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, response: JsonObject, history: list[JsonObject]) -> None:
        """Keep a response. `history`: the items of the conversation before it."""
        output = response["output"]
        entry = _Entry(_packed(response), _packed([*history, *output]), tuple(item["id"] for item in output))
        self._entries[response["id"]] = entry
        for item in entry.items:
            self._owners[item] = response["id"]
        self.used += entry.size
        while self._entries and (len(self._entries) > self._count or self.used > self._size):
            self._drop(next(iter(self._entries)))

    def response(self, name: str) -> JsonObject:
        """Returns a response. Raises ApiError 404 if it is not stored."""
        found: JsonObject = json.loads(self._find(name, None).response)
        return found

    def history(self, name: str) -> list[JsonObject]:
        """Returns the items of the conversation, including this response. Raises ApiError 404 if it is not stored."""
        found: list[JsonObject] = json.loads(self._find(name, "previous_response_id").history)
        return found

    def item(self, name: str) -> JsonObject:
        """Returns an output item of a stored response. Raises ApiError 404 if no response has it."""
        owner = self._owners.get(name)
        if owner is None:
            raise self._missing("item", name, "input")
        output: list[JsonObject] = self.response(owner)["output"]
        return next(item for item in output if item["id"] == name)

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
        self.used -= entry.size
        for item in entry.items:
            del self._owners[item]

    def _missing(self, kind: str, name: str, field: str | None) -> ApiError:
        code = "previous_response_not_found" if field == "previous_response_id" else f"{kind}_not_found"
        return ApiError(
            404,
            f"there is no stored {kind} {name[:80]!r}: it was not stored, was deleted or was dropped (this server "
            f"keeps the last {self._count:,} responses, up to {self._size >> 20:,} MiB): send the whole conversation",
            field, code,
        )  # fmt: skip


def _packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
