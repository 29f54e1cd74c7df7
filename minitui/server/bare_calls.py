"""Finds tool calls without markers: a reply that begins with a call of one of the tools that the request offers.

    Llama 3.1, 3.3    {"name": "f", "parameters": {…}}, several with ; between them
    Llama 3.2         [f(a=1, b="x"), g()]
    GLM-4             f, a new line, {…}
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from typing import Any

Call = tuple[str, dict[str, Any]]

LONGEST = 65_536  # characters of calls in Python's syntax; their parser needs much memory


class BareCalls:
    """The calls of some tools. `names`: the names of the tools."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(set(names), key=len, reverse=True)
        one = "|".join(map(re.escape, self._names))
        self._json = re.compile(
            rf'\[?\s*{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?:{one})"\s*,\s*"(?:parameters|arguments)"'
        )
        self._python = re.compile(rf"\[\s*(?:{one})\s*\(")
        self._line = re.compile(rf"({one})\n\s*(?={{)")
        self._longest = 64 + max(map(len, self._names), default=0)

    def begins(self, text: str) -> bool | None:
        """Returns whether a reply that begins with this text begins with a call; None if this is not known yet."""
        if any(pattern.match(text) for pattern in (self._json, self._python, self._line)):
            return True
        heads = [f"{name}\n" for name in self._names]
        possible = text[:1] in ("", "{", "[") or any(
            head.startswith(text) or (text.startswith(head) and not text[len(head) :].strip()) for head in heads
        )
        return None if possible and len(text) < self._longest else False

    def parse(self, text: str) -> list[Call]:
        """Returns the calls in a whole reply; [] if it is something else."""
        text = text.strip()
        if found := self._line.match(text):
            values = _values(text[found.end() :])
            return [(found[1], values[0])] if len(values) == 1 and isinstance(values[0], dict) else []
        calls = _python_calls(text) if self._python.match(text) else [_named(each) for each in _values(text)]
        return [] if any(call is None or call[0] not in self._names for call in calls) else [c for c in calls if c]


def _python_calls(text: str) -> list[Call | None]:
    if len(text) > LONGEST:
        return []
    try:
        tree = ast.parse(text, mode="eval").body
        return [_python_call(call) for call in tree.elts] if isinstance(tree, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> Call | None:
    """Returns a call such as f(a=1). Raises ValueError or TypeError if an argument is not a value in JSON."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        return None
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return call.func.id, json.loads(json.dumps(arguments))


def _values(text: str) -> list[Any]:
    """Returns the values in JSON that follow each other, with ; or spaces between them; [] if there is other text."""
    decoder, at, found = json.JSONDecoder(), 0, []
    try:
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            found += value if isinstance(value, list) else [value]
            at = len(text) - len(text[end:].lstrip("; \n"))
    except (ValueError, RecursionError):
        return []
    return found


def _named(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("parameters", value.get("arguments"))
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
