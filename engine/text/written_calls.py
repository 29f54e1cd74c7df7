"""Rewrites the tool calls of a family in the format of Qwen: objects with name and arguments in <tool_call>.

    Granite 3     [{"name": "f", "arguments": {…}}, …]
    Mistral       [{"name": "f", "arguments": {…}}, …], newer ones f[ARGS]{…}, also with [CALL_ID]… after the name
    Seed-OSS      <function=f><parameter=a>…</parameter></function>; the values are text
"""

from __future__ import annotations

import json
import re
from typing import Any

FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"


def as_blocks(text: str) -> str:
    """Returns the calls that a family wrote as blocks of Qwen. Text without a call becomes one block as it is."""
    text = text.strip()
    name, found, arguments = text.partition(ARGUMENTS)
    if found:
        name = name.partition(CALL_ID)[0].strip()
        return _block(f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}')
    functions = FUNCTION.findall(text)
    if functions:
        calls = [{"name": name.strip(), "arguments": dict(map(_value, PARAMETER.findall(body)))}
                 for name, body in functions]  # fmt: skip
    else:
        calls = _listed(text)
    return "\n".join(_block(json.dumps(call, ensure_ascii=False)) for call in calls) if calls else _block(text)


def _block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def _value(parameter: tuple[str, str]) -> tuple[str, str]:
    """Returns (name, value). A value may be on lines of its own."""
    name, value = parameter
    return name.strip(), value.removeprefix("\n").removesuffix("\n")


def _listed(text: str) -> list[dict[str, Any]]:
    """Returns the objects of a list in JSON; [] if the text is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []
