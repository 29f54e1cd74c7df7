"""A log of requests: what `minitui proxy` writes, and the doctor reads. One line of JSON for each request.

A request is a list of parts, in the order in which templates put them before the model: tools, the system prompt,
the messages. With hidden texts, a part has the hashes of its pieces instead of its text. The key of the hashes is
random and not in the log, so that nobody can test guesses of a text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError

FORMAT = "minitui-prefix-1"
PIECE = 32  # characters of a piece of a hidden text
MOST_LINE = 64 << 20  # characters
MOST_REQUESTS = 100_000


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A piece of a prompt: its kind ("tool", "system", "user", "assistant", …) and its text; or the hashes of its
    pieces of PIECE characters, and its length."""

    kind: str
    text: str = ""
    hashes: tuple[str, ...] = ()
    length: int = 0

    def __len__(self) -> int:
        return self.length if self.hashes else len(self.text)

    def hide(self, key: bytes) -> Part:
        """Returns the part without its text."""
        hashes: list[str] = []
        before = ""  # each hash covers all before it: repeated pieces do not show
        for i in range(0, max(1, len(self.text)), PIECE):
            piece = before + self.text[i : i + PIECE]
            before = hashlib.blake2b(piece.encode("utf-8", "replace"), key=key, digest_size=8).hexdigest()
            hashes.append(before)
        return Part(self.kind, "", tuple(hashes), len(self.text))

    def common(self, other: Part) -> int:
        """Returns the number of equal characters at the beginning of two parts; 0 if their kinds differ."""
        if self.kind != other.kind:
            return 0
        if self == other:
            return len(self)
        a, b = (self.hashes, other.hashes) if self.hashes else (self.text, other.text)
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return min(n * PIECE, len(self), len(other)) if self.hashes else n


@dataclass(slots=True)
class Turn:
    """One request. `at`: seconds since the log began; `first_ms`: until the first byte of the answer. `replica`: what
    the server's answer calls itself; empty: unknown. `prompt`, `cached`: tokens, as the server reports; None: it does
    not tell. Both of `salt` and `adapter` (the name of the model) separate caches."""

    number: int
    at: float
    parts: list[Part]
    adapter: str = ""
    salt: str = ""
    replica: str = ""
    prompt: int | None = None
    cached: int | None = None
    first_ms: float | None = None

    def to_json(self) -> str:
        """Returns the line of the log."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def from_json(data: Any) -> Turn:
        """Returns the request of a line. Raises ValueError."""
        if type(data) is not dict:
            raise ValueError("not an object")
        try:
            parts = [
                Part(str(p["kind"]), str(p.get("text", "")), tuple(map(str, p.get("hashes", ()))),
                     int(p.get("length", 0)))
                for p in data["parts"]
            ]
            adapter, salt, replica = (str(data.get(name, "")) for name in ("adapter", "salt", "replica"))
            numbers = (data.get(name) for name in ("prompt", "cached", "first_ms"))
            turn = Turn(int(data["number"]), float(data["at"]), parts, adapter, salt, replica, *numbers)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or wrong: {error}") from None
        for value in (turn.prompt, turn.cached, turn.first_ms):
            if value is not None and (type(value) not in (int, float) or value < 0):
                raise ValueError("a number is wrong")
        return turn


def read_log(path: Path) -> list[Turn]:
    """Returns the requests of a log. Raises EngineError with the number of the first wrong line."""
    turns: list[Turn] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if number > MOST_REQUESTS + 1 or len(line) > MOST_LINE:
                    raise EngineError(f"{path} is too large: at most {MOST_REQUESTS:,} requests are read")
                try:
                    data = json.loads(line)
                    if number == 1:
                        if type(data) is not dict or data.get("format") != FORMAT:
                            raise ValueError("not the first line of a log of minitui proxy")
                        continue
                    turns.append(Turn.from_json(data))
                except (ValueError, RecursionError) as error:
                    raise EngineError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    return turns


# ---- requests of APIs


def parts_of(body: dict[str, Any]) -> list[Part]:
    """Returns the parts of a request to an OpenAI- or Anthropic-like endpoint: chat, responses, messages, completions.
    Unknown forms become JSON."""
    parts = [Part("tool", _text(tool)) for tool in _list(body.get("tools"))]
    for name in ("system", "instructions"):
        if body.get(name):
            parts += [Part("system", _text(each)) for each in _list(body[name])]
    for name in ("messages", "input"):
        for message in _list(body.get(name)):
            parts += _message(message)
    parts += [Part("prompt", _text(each)) for each in _list(body.get("prompt"))]
    return parts


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _message(message: Any) -> list[Part]:
    if not isinstance(message, dict):
        return [Part("user", _text(message))]
    kind = str(message.get("role") or message.get("type") or "user")[:40]
    thoughts = (message.get(name) for name in ("reasoning_content", "reasoning"))
    parts = [Part("thinking", _text(thought)) for thought in thoughts if thought]
    for content in _list(message.get("content")):
        thought = isinstance(content, dict) and content.get("type") in ("thinking", "redacted_thinking", "reasoning")
        parts.append(Part("thinking" if thought else kind, _text(content)))
    rest = {
        name: value for name, value in message.items()
        if name not in ("role", "content", "reasoning_content", "reasoning", "cache_control") and value
    }
    if rest and (set(rest) != {"type"} or "content" not in message):
        parts.append(Part(kind, _text(rest)))
    return parts


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if isinstance(value.get("text"), str) and value.get("type", "text") in ("text", "input_text", "output_text"):
            return value["text"]
        value = {name: each for name, each in value.items() if name != "cache_control"}
    return json.dumps(value, ensure_ascii=False)
