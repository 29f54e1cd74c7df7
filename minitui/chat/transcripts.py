"""A chat as a document: Markdown to read, JSON to work with; and the pieces of it that one copies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from engine.errors import EngineError
from minitui.visible import json_text, visible

LARGEST_FILE = 256 * 1024  # bytes of a text file that goes into a prompt


class Spoken(Protocol):
    """As much of a message as a transcript needs."""

    role: str
    text: str
    state: str
    error: str
    created: float

    @property
    def metrics(self) -> Any:
        """What the engine said with the answer: a dict, or nothing."""


class Chat(Protocol):
    """As much of a chat: one that is open, or one from the chat file."""

    id: str
    title: str
    system: str
    parent: str | None
    created: float

    @property
    def messages(self) -> Sequence[Spoken]:
        """In order."""


def as_markdown(chat: Chat, names: tuple[str, str] = ("You", "Assistant")) -> str:
    """The chat as a Markdown document."""
    quoted = "\n".join(f"> {line}".rstrip() for line in chat.system.split("\n"))
    parts = [f"# {chat.title}", quoted if chat.system else ""]
    for m in chat.messages:
        ended = {"cancelled": f"\n\n*({m.error or 'cancelled'})*", "error": f"\n\n*({m.error})*"}.get(m.state, "")
        parts.append(f"## {names[m.role != 'user']}\n\n{m.text}{ended}")
    return visible("\n\n".join(p for p in parts if p)) + "\n"


def as_json(chat: Chat) -> str:
    """The chat as one JSON object: what was said, when, how each answer ended, and the engine's figures for it."""
    messages = [
        {
            "role": m.role, "content": m.text, "created": _when(m.created),
            **({"state": m.state, "metrics": m.metrics or {}} if m.role != "user" else {}),
            **({"error": m.error} if m.error else {}),
        }
        for m in chat.messages
    ]  # fmt: skip
    head = {"id": chat.id, "title": chat.title, "system": chat.system, "forked_from": chat.parent}
    whole = {**head, "created": _when(chat.created), "messages": messages}
    return json_text(whole, indent=2) + "\n"


def named_file(name: str) -> Path:
    """The file that a user's `name` means, "~" being his home. EngineError for what cannot be a file's name."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise EngineError(f"{name} cannot be found: there is no user {name.partition('/')[0][1:]!r} here") from None
    if "\0" in name:
        raise EngineError(f"{name!r} is no name of a file: it holds a zero byte")
    return path


def write(chat: Chat, path: Path) -> None:
    """Write it to `path`, as JSON if that ends in .json, else as Markdown. EngineError if it cannot be written."""
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            try:
                file.write(as_json(chat) if path.suffix == ".json" else as_markdown(chat))
                file.flush()
            except OSError:  # half a file is none, and the name is free for another attempt
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise EngineError(f"{path} exists already: name another file") from None
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}") from None


def file_name(chat: Chat) -> str:
    """A name for its file: "kv-cache.md"."""
    return (re.sub(r"[^a-z0-9]+", "-", chat.title.lower()).strip("-") or "chat") + ".md"


def code_blocks(text: str) -> list[str]:
    """What stands between the code fences of a Markdown text, in order; one that is not closed reaches to the end."""
    blocks: list[str] = []
    fence = ""
    lines: list[str] = []
    for line in text.split("\n"):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                blocks.append("\n".join(lines))
                fence = ""
            else:
                lines.append(line)
        elif mark:
            fence, lines = mark[1], []
    return [*blocks, "\n".join(lines)] if fence else blocks


def pieces(messages: Iterable[Spoken]) -> list[tuple[str, str]]:
    """Everything one may want to copy, the newest first: (what it is, its text)."""
    found: list[tuple[str, str]] = []
    for m in messages:
        if m.text:
            found.append(("question" if m.role == "user" else "answer", m.text))
            found += [("code", block) for block in code_blocks(m.text) if block]
    return found[::-1]


def quoted_file(path: Path) -> str:
    """A text file as a prompt holds it: its name, and its text between fences. EngineError says why it cannot be."""
    try:
        if not path.is_file() and path.exists() and not path.is_dir():  # a device or a pipe may never end
            raise EngineError(f"{path} is no file but a device or a pipe: only text goes into a prompt")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise EngineError(f"{path} has {size:,} bytes: at most {LARGEST_FILE:,} go into a prompt; cut it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EngineError(f"{path} is no text in UTF-8 (byte {error.start:,}): only text goes into a prompt") from None
    if "\0" in text:
        raise EngineError(f"{path} has zero bytes in it: only text goes into a prompt")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}\n"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
