"""Takes a reply apart as it comes: what the model thought, what it said, and the tools it called.

    <think>...</think>                      reasoning
    <tool_call>{"name", "arguments"}</tool_call>   a call, in the format of Hermes and Qwen
    everything else                         content

A marker may come in pieces: text that may be the beginning of one is held back until it is decided.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass
class Parts:
    """What a piece of a reply turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ReplyParser:
    """One reply. `thinking`: its prompt has opened the thinking already; `tools`: calls are looked for."""

    def __init__(self, thinking: bool = False, tools: bool = False) -> None:
        self._mode = "think" if thinking else "start"
        self._tools = tools
        self._held = ""
        self._after_thinking = False

    def push(self, text: str) -> Parts:
        """The next piece of text; what can be said of it now."""
        self._held += text
        parts = Parts()
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> Parts:
        """The reply has ended: what was held back is what it looks like. A call without its end is content."""
        parts = Parts()
        if self._mode == "think":
            parts.reasoning = self._held
        elif self._mode == "call":
            _take_call(self._held, parts, CALL + self._held)
        else:
            parts.content = self._held
        self._held = ""
        return parts

    def _advance(self, parts: Parts) -> bool:
        """Decide about a part of what is held; False when more is needed."""
        if self._mode == "start":
            stripped = self._held.lstrip()
            if stripped.startswith(THINK):
                self._held, self._mode = stripped[len(THINK) :], "think"
                return True
            if THINK.startswith(stripped):
                return False  # nothing yet, or "<thi"
            self._mode = "content"
            return True
        if self._mode == "think":
            found, parts_text = self._until(END_THINK)
            parts.reasoning += parts_text
            if found:
                self._mode, self._after_thinking = "content", True
            return found
        if self._mode == "call":
            body, end, rest = self._held.partition(END_CALL)
            if not end:
                return False
            _take_call(body, parts, CALL + body + END_CALL)
            self._held, self._mode, self._after_thinking = rest, "content", True
            return True
        if self._after_thinking:  # the empty lines after a part that is not content
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._after_thinking = False
        if not self._tools:
            parts.content += self._held
            self._held = ""
            return False
        found, text = self._until(CALL)
        parts.content += text.rstrip("\n") if found else text
        if found:
            self._mode = "call"
        return found

    def _until(self, marker: str) -> tuple[bool, str]:
        """Take the text before a marker off what is held, and the marker; or what cannot belong to one."""
        before, found, rest = self._held.partition(marker)
        if found:
            self._held = rest
            return True, before
        keep = next((n for n in range(min(len(marker) - 1, len(before)), 0, -1) if marker.startswith(before[-n:])), 0)
        cut = len(before) - keep
        if marker == CALL:  # newlines before a call belong to it
            cut = len(before[:cut].rstrip("\n"))
        self._held = before[cut:]
        return False, before[:cut]


class ForcedCallParser(ReplyParser):
    """A reply whose grammar leaves it nothing but one call: it is a call when it is whole."""

    def _advance(self, parts: Parts) -> bool:
        return False

    def flush(self) -> Parts:
        parts = Parts()
        _take_call(self._held, parts, self._held)
        self._held = ""
        return parts


def _take_call(text: str, parts: Parts, as_written: str) -> None:
    """A call if it is one; else the text as it was written: nothing a model says is lost."""
    try:
        value = json.loads(text)
        name, arguments = value["name"], value.get("arguments", {})
    except (ValueError, TypeError, KeyError, RecursionError):
        name, arguments = None, None
    if not isinstance(name, str):
        parts.content += as_written
        return
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    # JSON can spell half a surrogate pair, which is no text and could not be sent.
    name, written = (spelled.encode("utf-8", "replace").decode() for spelled in (name, written))
    function = {"name": name, "arguments": written}
    parts.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
