"""`minitui ask`: one question, its answer streamed to stdout; for scripts and pipes."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from engine.errors import EngineError
from minitui.chat.model_choice import load_codec
from minitui.chat.sessions import Chats, Message, Sampling, describe_answer
from minitui.progress import Status
from minitui.sources.base import Source
from minitui.visible import json_text

if TYPE_CHECKING:
    from collections.abc import Callable

POLL = 0.02  # seconds between two looks at the answer


async def ask(
    source: Source, question: str, system: str, sampling: Sampling, as_json: bool, load: Callable[..., Any] = load_codec
) -> int:
    """Start the engine, ask, stream; returns the exit code. The last line under the answer goes to stderr."""
    status = Status(sys.stderr)
    try:
        try:
            await source.start(status)
        finally:
            status.clear()
        chats = Chats(source, sampling=sampling)
        chats.use(await asyncio.to_thread(load, source.info))
        session = chats.new(system)
        chats.send(session, question)
        message = session.messages[-1]
        try:
            await _stream(message, None if as_json else sys.stdout)
        except BaseException:
            chats.cancel_all()
            raise
        if message.state == "error":
            raise EngineError(message.error)
        if as_json:
            told = {"answer": message.text, "sampling": asdict(session.sampling), "metrics": message.metrics}
            print(json_text(told, ensure_ascii=True))
        else:
            print("\n" + " · ".join(text for text, _ in describe_answer(message)), file=sys.stderr)
        return 0
    finally:
        await source.close()


async def _stream(message: Message, out: TextIO | None) -> None:
    shown = 0
    while True:
        busy = message.busy
        text = message.text[shown:]
        if busy and text.endswith("\r"):  # its "\n" may follow
            text = text[:-1]
        if out and text:
            out.write(text)
            out.flush()
            shown += len(text)
        if not busy:
            break
        await asyncio.sleep(POLL)
    if out and message.text and not message.text.endswith("\n"):
        out.write("\n")
