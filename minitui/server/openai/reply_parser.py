"""Parses a reply while it is written: reasoning, content and tool calls.

    <think>...</think>                      reasoning; Granite has its answer in <response>...</response> after it
    <tool_call>{"name", "arguments"}</tool_call>   a call, in the format of Hermes and Qwen; Qwen3.5 and Qwen3-Coder
                                            have <function=f><parameter=a>1</parameter></function> in it
    a call without markers                  if the reply's content begins with it (BareCalls)
    everything else                         content

A marker may arrive in pieces. Text that may be the beginning of a marker is held back until later text shows whether it
is a marker.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, dict[str, Any]]

LONGEST = 65_536  # characters of calls in Python's syntax; their parser needs much memory
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_RESPONSE = "<response>", "</response>"
KINDS: dict[str, Any] = {  # types of JSON schema other than text
    "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict, "null": type(None),
}
TAGGED = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
BEGUN_CALL = re.compile(r'\{"name": (?P<name>"(?:[^"\\]|\\.)*")(?:, "arguments": (?P<arguments>.*))?', re.DOTALL)


@dataclass
class Parts:
    """The parsed parts of a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __iadd__(self, later: Parts) -> Parts:
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls += later.calls
        return self


class ReplyParser:
    """Parses one reply. `thinking`: the prompt ends with an open think tag. `tools`: look for calls of these tools."""

    def __init__(self, thinking: bool = False, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._mode = "think" if thinking else "start"
        self._types = {tool["function"]["name"]: _types(tool["function"].get("parameters")) for tool in tools}
        self._bare = BareCalls(self._types)
        self._held = ""
        self._skip_newlines = False
        self._thought = False  # True directly after the reasoning
        self._in_response = False

    def push(self, text: str) -> Parts:
        """Take the next text; returns all parts that later text cannot change."""
        self._held += text
        parts = Parts()
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> Parts:
        """End the reply; returns the parts of the text that was held back."""
        parts = Parts()
        if self._mode == "think":
            parts.reasoning = self._held
        elif self._mode == "call":
            self._take_call(self._held, parts, CALL + self._held)
        elif self._types and self._mode in ("first", "bare") and (calls := self._bare.parse(self._held)):
            parts.calls = [_call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        else:
            parts.content = self._held
        self._held = ""
        return parts

    def _advance(self, parts: Parts) -> bool:
        """Parse the next part of the held text; returns False when more text is needed."""
        if self._mode == "start":
            stripped = self._held.lstrip()
            if stripped.startswith(THINK):
                self._held, self._mode = stripped[len(THINK) :], "think"
                return True
            if THINK.startswith(stripped):
                return False  # no text yet, or an incomplete tag: "<thi"
            self._mode = "first"
            return True
        if self._mode == "think":
            found, text = self._until(END_THINK)
            parts.reasoning += text
            if found:
                self._mode, self._skip_newlines, self._thought = "first", True, True
            return found
        if self._mode == "call":
            body, end, rest = self._held.partition(END_CALL)
            if not end:
                return False
            self._take_call(body, parts, CALL + body + END_CALL)
            self._held, self._mode, self._skip_newlines = rest, "content", True
            return True
        if self._skip_newlines:  # empty lines between the content and the reasoning or call before it are dropped
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._skip_newlines = False
        if self._mode == "first":
            if self._thought and RESPONSE.startswith(self._held[: len(RESPONSE)]):
                if len(self._held) < len(RESPONSE):
                    return False
                self._held, self._in_response, self._thought = self._held[len(RESPONSE) :], True, False
            begins = self._bare.begins(self._held.lstrip()) if self._types else False
            if begins is not None:
                self._mode = "bare" if begins else "content"
            return begins is not None
        if self._mode == "bare":
            return False
        marker = END_RESPONSE if self._in_response else CALL if self._types else ""
        if not marker:
            parts.content += self._held
            self._held = ""
            return False
        found, text = self._until(marker)
        parts.content += text.rstrip("\n") if found else text
        if found and self._in_response:
            self._in_response = False
        elif found:
            self._mode = "call"
        return found

    def _until(self, marker: str) -> tuple[bool, str]:
        """Remove the text before the marker from the held text; returns (True if the marker was found, that text). If
        the marker is not found, the end of the text stays held if it may be the beginning of the marker."""
        before, found, rest = self._held.partition(marker)
        if found:
            self._held = rest
            return True, before
        keep = next((n for n in range(min(len(marker) - 1, len(before)), 0, -1) if marker.startswith(before[-n:])), 0)
        cut = len(before) - keep
        if marker == CALL:  # newlines before a call are not content
            cut = len(before[:cut].rstrip("\n"))
        self._held = before[cut:]
        return False, before[:cut]

    def _take_call(self, text: str, parts: Parts, as_written: str) -> None:
        """Add the tool call in `text` to `parts`. If `text` is not a valid call, add `as_written` as content."""
        try:
            value = json.loads(text)
            name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        except (ValueError, TypeError, KeyError, RecursionError):
            name, arguments = _tagged(text) or (None, None)
        if not isinstance(name, str):
            parts.content += as_written
            return
        if isinstance(arguments, dict):
            types = self._types.get(name, {})
            arguments = {key: _typed(value, types.get(key, [])) for key, value in arguments.items()}
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.calls.append(_call(name, written))


class ForcedCallParser(ReplyParser):
    """Parses a reply whose grammar allows exactly one tool call and no other text. A reply that was cut at the length
    limit is a call with the arguments so far, as in OpenAI's API."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        """`tools`: the reply calls one of these."""
        super().__init__(tools=tools)
        self._only = tools[0]["function"]["name"] if len(tools) == 1 else None

    def _advance(self, parts: Parts) -> bool:
        return False

    def flush(self) -> Parts:
        parts = Parts()
        held, self._held = self._held, ""
        self._take_call(held, parts, "")
        if not parts.calls:
            begun = BEGUN_CALL.match(held)
            name = json.loads(begun["name"]) if begun else self._only
            arguments = begun["arguments"] if begun else None
            if name is not None:
                parts.calls.append(_call(name, arguments or ""))
        return parts


def _tagged(text: str) -> Call | None:
    """Returns a call in tags; None if the text is something else. The arguments are texts: `_typed` reads them."""
    found = TAGGED.fullmatch(text.strip())
    if found is None or PARAMETER.sub("", found[2]).strip():
        return None
    return found[1], dict(PARAMETER.findall(found[2]))


def _types(schema: Any) -> dict[str, list[Any]]:
    """Returns the types that each parameter in a JSON schema may have, also those of alternatives ("int or null")."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.items() if isinstance(properties, dict) else ()
    return {name: _kinds(each) for name, each in found if isinstance(each, dict)}


def _kinds(schema: dict[str, Any]) -> list[Any]:
    options = [schema, *(one for name in ("anyOf", "oneOf") for one in _list(schema.get(name)))]
    return [kind for one in options if isinstance(one, dict) for kind in _list(one.get("type"))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _typed(value: Any, wanted: list[Any]) -> Any:
    """Returns the value of a text if the tool wants no text: some families write all arguments as text."""
    if value in ("null", "None") and "null" in wanted:
        return None
    if not isinstance(value, str) or not set(map(str, wanted)) <= set(KINDS):
        return value
    try:
        found = json.loads(value.lower() if value in ("True", "False", "None") else value)
    except (ValueError, RecursionError):
        return value
    fits = any(isinstance(found, KINDS[each]) and (type(found) is bool) == (each == "boolean") for each in wanted)
    return found if fits else value


def _call(name: str, arguments: str) -> dict[str, Any]:
    # JSON can contain escaped lone surrogates, which cannot be sent.
    name, arguments = (text.encode("utf-8", "replace").decode() for text in (name, arguments))
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class BareCalls:
    """Finds calls without markers: a reply that begins with a call of one of the tools. `names`: of the tools. Llama
    3.1, 3.3 {"name": "f", "parameters": {…}}, several with ; between them Llama 3.2 [f(a=1, b="x"), g()] GLM-4 f, a new
    line, {…}"""

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
