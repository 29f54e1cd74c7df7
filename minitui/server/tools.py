"""The JSON schema of a reply that calls a tool. engine/text/tool_messages.py describes the tools to the model."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_schema(tools: list[Message]) -> dict[str, Any]:
    """Returns the JSON schema of a reply that calls one of these tools.

    The parameters of each tool get a URI of their own, so "#/$defs/…" in them means the definitions of the same tool.
    """
    branches = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": {**(tool["function"].get("parameters") or NO_PARAMETERS), "$id": f"tool:{number}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    return branches[0] if len(branches) == 1 else {"anyOf": branches}
