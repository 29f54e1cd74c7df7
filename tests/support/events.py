"""Server-sent events of a test's answer."""

from __future__ import annotations

import json
from typing import Any


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event, after a check that its name is its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found
