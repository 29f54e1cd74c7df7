"""Server-sent events of a test's answer."""

from __future__ import annotations

import json
from typing import Any


def data_of(text: str) -> list[str]:
    """The data of the events, read as the specification has it: line by line."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def chunks_of(text: str) -> list[Any]:
    """The events of an answer that ends with [DONE]."""
    *data, end = data_of(text)
    assert end == "[DONE]"
    return [json.loads(one) for one in data]


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event, after a check that its name is its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found
