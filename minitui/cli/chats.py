"""`minitui chats`: lists, searches, prints and exports the stored chats."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import EngineError
from minitui.chat import transcripts
from minitui.chat.store import Store
from minitui.cli.options import valid_text
from minitui.settings import data_dir
from minitui.visible import visible_line


def chats(
    words: Annotated[list[str] | None, typer.Argument(help="List only chats that contain all these words.")] = None,
    show: Annotated[
        str | None, typer.Option(help="Print the chat with this id as Markdown.", callback=valid_text)
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="With --show: write to this file, as JSON if its name ends in .json, else as Markdown."),
    ] = None,
) -> None:
    """List, search, print or export stored chats.

    \b
      minitui chats                   all chats, newest first
      minitui chats radix tree        chats that contain both words
      minitui chats --show 3f2a
      minitui chats --show 3f2a --export paging.json
    """
    store = Store(data_dir() / "chats.sqlite")
    try:
        if show is not None:
            _show(store, show, export)
        elif export is not None:
            raise EngineError("--export needs --show ID: minitui chats lists the ids")
        else:
            _list(store, " ".join(words or []))
    finally:
        store.close()


def _show(store: Store, id: str, export: Path | None) -> None:
    chat = store.load(id)
    if chat is None:
        raise EngineError(f"{id!r} must be the beginning of exactly one chat's id: minitui chats lists the ids")
    if export is None:
        print(transcripts.as_markdown(chat), end="")
    else:
        transcripts.write(chat, export)
        print(f"written to {export}")


def _list(store: Store, words: str) -> None:
    found = store.search(words, most=1000)
    if not found:
        raise EngineError(f"no chat contains {words!r}" if words else "no chats are stored yet")
    titles = {chat.id: chat.title for chat in store.search(most=100_000)} if any(chat.parent for chat in found) else {}
    for chat in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.created))
        fork = f", fork of {titles.get(chat.parent, chat.parent)}" if chat.parent else ""
        title = f"{chat.title} ({chat.messages} messages{', closed' if chat.closed else ''}{fork})"
        print(f"{chat.id}  {when}  {visible_line(title)}")
        print(f"          {visible_line(chat.line[:100])}")
