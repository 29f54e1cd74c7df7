"""Renders a checkpoint's chat template in a separate process with limits of time, memory and output.

The method `start` or the first rendering starts the process (`engine/text/template_process.py`), which also serves all
later renderings. A rendering takes about 0.1 ms longer in that process than in this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, EngineError, InvalidRequest
from engine.text.limited_child import TEXT
from engine.text.limited_process import LimitedProcess, LimitExceeded, Limits

SECONDS = 5.0  # for one rendering; the first rendering includes the compilation
MEMORY = 1 << 30  # bytes of address space
LONGEST = 16 << 20  # bytes of a rendering
LONGEST_VALUES = 64 << 20  # bytes of the values (messages, tools, ...) as JSON
LONGEST_SOURCE = 1 << 20  # characters of a template; the longest templates in use have about 30,000


class ChatTemplate(LimitedProcess):
    """One template. Its methods may be called from any thread; one rendering runs at a time. After `stop`, running and
    waiting renderings raise InvalidRequest."""

    def __init__(self, source: str, directory: Path) -> None:
        """`directory`: the directory of the checkpoint, for error messages. The process is not started yet."""
        self.source = source
        self.directory = directory
        setup, limits = json.dumps(source).encode(), Limits(SECONDS, MEMORY, LONGEST)
        super().__init__("template_process.py", "renders chat templates", lambda: setup, limits)

    def render(self, values: dict[str, Any]) -> str:
        """Render the template with `values`, which must be JSON values; return the text. Raises CheckpointError if the
        template cannot be compiled, and InvalidRequest if it refuses the values, fails or exceeds a limit."""
        try:
            kind, contents = self.ask(_as_json(values))
        except LimitExceeded as error:
            raise _refusal(str(error)) from None
        if kind == TEXT:
            return contents.decode("utf-8", "surrogatepass")
        raise self._failure(*json.loads(contents))

    def _failure(self, kind: str, name: str, sentence: str) -> EngineError:
        if name == "MemoryError":
            self.end()  # otherwise Python might keep the memory
            return _refusal(f"needs more than {MEMORY >> 20:,} MiB of memory")
        if name == "TooLong":
            return _refusal(f"writes more than {LONGEST >> 20} MiB")
        if kind == "broken":
            return CheckpointError(f"the chat template of {self.directory} is broken: {sentence or name}")
        if kind == "refused":
            return InvalidRequest(f"the model's chat template refuses these messages: {sentence}", "messages")
        advice = ": each needs a role and a content" if name in ("TypeError", "AttributeError", "KeyError") else ""
        return InvalidRequest(
            f"the model's chat template cannot render these messages ({name}: {sentence}){advice}", "messages"
        )


def _as_json(values: dict[str, Any]) -> bytes:
    try:
        request = json.dumps(values, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"the chat template takes JSON values only, and these messages contain something else: {error}", "messages"
        ) from None
    if len(request) > LONGEST_VALUES:
        raise InvalidRequest(
            f"these messages have {len(request) >> 20:,} MiB; a chat template takes at most {LONGEST_VALUES >> 20} MiB",
            "messages",
        )
    return request


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template {what}; a template may take {SECONDS:g} seconds and {MEMORY >> 20:,} MiB of "
        f"memory, and write {LONGEST >> 20} MiB of text",
        "messages",
    )
