"""`minitui ask`: streams one answer to stdout, for scripts and pipes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TextIO

import typer

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat.conversation import Message, Sampling
from minitui.chat.describe import describe_answer
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.launch import live_source, make_sampling, recorded, report_recording
from minitui.cli.options import Model, Record, System, valid_text, with_options
from minitui.progress import Status
from minitui.sources.base import Source
from minitui.visible import json_text

POLL_S = 0.02


@with_options("sampling", "engine")
def ask(
    sampling: dict[str, Any], engine: dict[str, Any],
    question: Annotated[
        str, typer.Argument(help="The question. Without it, or with '-', stdin is read.", callback=valid_text)
    ] = "-",
    model: Model = None,
    system: System = None,
    json: Annotated[bool, typer.Option("--json", help="Print answer and metrics as one JSON object.")] = False,
    record: Record = None,
) -> None:
    """Ask one question. The answer is streamed to stdout; its metrics are printed to stderr.

    \b
      minitui ask "What is a radix tree?"
      echo "Why is decode slow?" | minitui ask
      minitui ask --json --temperature 0 "What is paging?" | jq .metrics
    """
    if question == "-":
        if sys.stdin.isatty():
            raise typer.BadParameter('give a question, as in minitui ask "What is a KV cache?", or pipe it into stdin')
        question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    settings = settings_file.load()
    choice = choose_model(model, settings.chat.system if system is None else system)
    chosen = make_sampling(sampling, settings.chat)

    async def run() -> int:
        source = recorded(live_source(choice, engine), record)
        status = await ask_source(source, question, choice.system, chosen, json)
        return report_recording(source, status)

    raise typer.Exit(asyncio.run(run()))


async def ask_source(
    source: Source, question: str, system: str, sampling: Sampling, as_json: bool, load: Callable[..., Any] = load_codec
) -> int:
    """Starts the engine, asks the question and prints the answer; returns the exit code. Raises EngineError if the
    answer fails."""
    try:
        with Status(sys.stderr) as status:
            await source.start(status)
        for note in source.info.notes:
            print(note, file=sys.stderr)
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
            answer = {"answer": message.text, "sampling": asdict(session.sampling), "metrics": message.metrics}
            print(json_text(answer, ensure_ascii=True))
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
        if busy and text.endswith("\r"):  # the "\n" of a "\r\n" may follow
            text = text[:-1]
        if out and text:
            out.write(text)
            out.flush()
            shown += len(text)
        if not busy:
            break
        await asyncio.sleep(POLL_S)
    if out and message.text and not message.text.endswith("\n"):
        out.write("\n")
