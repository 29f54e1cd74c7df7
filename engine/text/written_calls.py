"""Rewrites the tool calls of a family in the format of Qwen: objects with name and arguments in <tool_call>.

    Granite 3     [{"name": "f", "arguments": {…}}, …]
    Mistral       [{"name": "f", "arguments": {…}}, …], newer ones f[ARGS]{…}, also with [CALL_ID]… after the name
    Seed-OSS      <function=f><parameter=a>…</parameter></function>; the values are text
"""

from __future__ import annotations

import json
from typing import Any

ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"


def as_blocks(text: str) -> str:
    """Returns the calls that a family wrote as blocks of Qwen. Text without a call becomes one block as it is."""
    text = text.strip()
    name, found, arguments = text.partition(ARGUMENTS)
    if found:
        name = name.partition(CALL_ID)[0].strip()
        return _block(f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}')
    functions = _tagged(text, "function")
    if functions:
        calls = [{"name": name, "arguments": dict(_tagged(body, "parameter"))} for name, body in functions]
    else:
        calls = _listed(text)
    return "\n".join(_block(json.dumps(call, ensure_ascii=False)) for call in calls) if calls else _block(text)


def _block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def _tagged(text: str, tag: str) -> list[tuple[str, str]]:
    """Returns (name, content) of each <tag=name>content</tag>. The content may be on lines of its own."""
    found = []
    for part in text.split(f"<{tag}=")[1:]:
        name, _, rest = part.partition(">")
        content, end, _ = rest.partition(f"</{tag}>")
        if end:
            found.append((name.strip(), content.removeprefix("\n").removesuffix("\n")))
    return found


def _listed(text: str) -> list[dict[str, Any]]:
    """Returns the objects of a list in JSON; [] if the text is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []
