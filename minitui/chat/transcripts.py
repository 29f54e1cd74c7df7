"""Writes chats as Markdown and JSON, finds the pieces of a chat that can be copied, and quotes files in prompts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import EngineError
from minitui.chat.conversation import Message, Session
from minitui.visible import json_text, visible

LARGEST_FILE = 256 * 1024  # maximum size of a text file that a prompt quotes, in bytes


def as_markdown(chat: Session, names: tuple[str, str] = ("You", "Assistant")) -> str:
    """Returns the chat as a Markdown document."""
    quoted = "\n".join(f"> {line}".rstrip() for line in chat.system.split("\n"))
    parts = [f"# {chat.title}", quoted if chat.system else ""]
    for m in chat.messages:
        ended = {"cancelled": f"\n\n*({m.error or 'cancelled'})*", "error": f"\n\n*({m.error})*"}.get(m.state, "")
        parts.append(f"## {names[m.role != 'user']}\n\n{m.text}{ended}")
    return visible("\n\n".join(p for p in parts if p)) + "\n"


def as_json(chat: Session) -> str:
    """Returns the chat as one JSON object: messages, times, and the final state and metrics of each answer."""
    messages = [
        {
            "role": m.role, "content": m.text, "created": _when(m.created),
            **({"state": m.state, "metrics": m.metrics} if m.role != "user" else {}),
            **({"error": m.error} if m.error else {}),
        }
        for m in chat.messages
    ]
    head = {"id": chat.id, "title": chat.title, "system": chat.system, "forked_from": chat.parent}
    whole = {**head, "created": _when(chat.created), "messages": messages}
    return json_text(whole, indent=2) + "\n"


def named_file(name: str) -> Path:
    """Returns the path of a typed file name, with "~" expanded. Raises EngineError for an invalid name."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise EngineError(f"{name} cannot be found: this machine has no user {name.partition('/')[0][1:]!r}") from None
    if "\0" in name:
        raise EngineError(f"{name!r} is not a file name: it contains a zero byte")
    return path


def write(chat: Session, path: Path) -> None:
    """Writes the chat to a new file, as JSON if `path` ends in .json, else as Markdown. Raises EngineError."""
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            try:
                file.write(as_json(chat) if path.suffix == ".json" else as_markdown(chat))
                file.flush()
            except OSError:  # an incomplete file would make the next attempt fail
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise EngineError(f"{path} exists already: choose another file") from None
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}") from None


def file_name(chat: Session) -> str:
    """Returns a file name for the chat: "kv-cache.md"."""
    return (re.sub(r"[^a-z0-9]+", "-", chat.title.lower()).strip("-") or "chat") + ".md"


def code_blocks(text: str) -> list[str]:
    """Returns the code blocks of a Markdown text, in order. An unclosed block extends to the end of the text."""
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


def pieces(messages: Iterable[Message]) -> list[tuple[str, str]]:
    """Returns every question, answer and code block as (kind, text), newest first."""
    found: list[tuple[str, str]] = []
    for m in messages:
        if m.text:
            found.append(("question" if m.role == "user" else "answer", m.text))
            found += [("code", block) for block in code_blocks(m.text) if block]
    return found[::-1]


def quoted_file(path: Path) -> str:
    """Returns a text file as part of a prompt: its name, then its text between code fences. Raises EngineError."""
    try:
        if not path.is_file() and path.exists() and not path.is_dir():  # reading from a device or a pipe may never end
            raise EngineError(f"{path} is a device or a pipe: prompts can quote only text")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise EngineError(f"{path} has {size:,} bytes: a prompt can quote at most {LARGEST_FILE:,}; shorten it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EngineError(f"{path} is not UTF-8 text (byte {error.start:,}): prompts can quote only text") from None
    if "\0" in text:
        raise EngineError(f"{path} contains zero bytes: prompts can quote only text")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}\n"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
