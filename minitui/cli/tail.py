"""The story of an engine as plain lines of text: for screen readers, for logs, and for pipes.

    0.41 s  step 12  r4 runs · 102 prompt tokens · waited 3 ms
    0.41 s  step 12  r4 takes 96 of 102 tokens from the tree · all that can be shared
    0.41 s  step 12  6 tokens of r4's prompt, 3 requests decode · 9 of 512 tokens · 2.1 ms
    0.52 s  steps 13 to 37  4 requests decode one token each · 100 tokens · 2.0 ms a step

Steps in which nothing but decoding happens are told together, with their extremes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine.errors import EngineDead
from minitui.chat.model_choice import load_codec
from minitui.chat.sessions import Chats, Sampling, describe_answer
from minitui.sources.base import Source
from minitui.viewmodel.model import View

if TYPE_CHECKING:
    pass
from minitui.viewmodel.teller import Teller

POLL_S = 0.05


def tail_trace(path: str | Path, out: Callable[[str], None]) -> int:
    """`minitui tail FILE`: the whole recording as lines; returns the exit code."""
    from minitui.trace.reader import TraceReader

    reader = TraceReader(path)
    view = View()
    view.ids_to_text = reader.decode
    view.group_names = reader.names
    for line in Teller(view).tell_all(reader):
        out(str(line))
    if not reader.complete:
        out("(the recording ends here without its end: it was cut off)")
    return 0


async def tail_live(
    source: Source, system: str, sampling: Sampling, questions: TextIO, out: Callable[[str], None],
    load: Any = load_codec,
) -> int:  # fmt: skip
    """Start the engine, ask one question after the other in one chat, and tell what it does; returns the exit code."""
    try:
        await source.start(lambda progress: None)
        chats = Chats(source, sampling=sampling)
        chats.use(await asyncio.to_thread(load, source.info))
        view = View()
        assert chats.codec is not None
        view.ids_to_text = chats.codec.decode
        view.reset(await source.snapshot())
        teller = Teller(view)
        session = chats.new(system, "chat")
        view.group_names = {session.id: "chat"}
        while question := (await asyncio.to_thread(questions.readline)):
            if not question.strip():
                continue
            chats.send(session, question.strip())
            while session.busy:
                await asyncio.sleep(POLL_S)
                for line in teller.tell(source.drain_records()):
                    out(str(line))
            await source.snapshot()  # its records have come before its answer
            for line in [*teller.tell(source.drain_records()), *teller.rest()]:
                out(str(line))
            answer = session.messages[-1]
            out(f"answer: {' '.join((answer.text or answer.error).split())}")
            out("        " + " · ".join(text for text, _ in describe_answer(answer)))
        return 0
    finally:
        await source.close()


async def tail_watch(source: Source, out: Callable[[str], None], load: Any = load_codec) -> int:
    """Tell what a server elsewhere does, until it ends or is interrupted; returns the exit code."""
    try:
        await source.start(lambda progress: None)
        view = View()
        view.ids_to_text = (await asyncio.to_thread(load, source.info)).decode
        view.reset(await source.snapshot())
        teller = Teller(view)
        while source.error is None:
            for line in teller.tell(source.drain_records()):
                out(str(line))
            if view.gap:
                out(f"({view.dropped:,} records were lost on the way: the story goes on from here)")
                view.reset(await source.snapshot())
                teller = Teller(view)
            await asyncio.sleep(POLL_S)
        raise EngineDead(source.error)
    finally:
        await source.close()
