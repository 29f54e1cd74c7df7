"""`minitui tail`: prints the engine's work as lines of text, for screen readers, logs and pipes.

    0.41 s  step 12  r4 is admitted · 102 prompt tokens · waited 3 ms
    0.41 s  step 12  r4 takes 96 of 102 tokens from the tree · all full blocks were cached
    0.41 s  step 12  r4 prefills tokens 96 to 101 of 102 and samples its first token. 3 other requests decode one
                     token each · 9 of 512 tokens · 2.1 ms
    0.52 s  steps 13 to 37  4 requests decode one token per step · 100 tokens · 2.0 ms per step

Consecutive steps that only decode share one line. The line names the slowest step if that step was slow or took more
than twice the mean. A slow step has its causes. A step that prompts made more than twice as long names these
prompts. Every minute, and at the end, lines sum up what the cache saved, what is evicted next, and
whether the host or the device limits. While a step does not end, a line says so.

With `--requests`, there is one line for each request, when the request has finished: its time to first token, the gaps
between its tokens, and the cause of the longest gap. While a step does not end, a line says so, also with `--json`: it
has "stall_ms" in place of "request". The lines that sum up have "summary" with `--json`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from engine.errors import EngineDead, EngineError
from engine.trace.records import Record
from minitui.chat.conversation import Sampling
from minitui.chat.describe import describe_answer
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.launch import live_source
from minitui.cli.options import KvBlocks
from minitui.sources.base import Source
from minitui.text import count

if TYPE_CHECKING:
    from minitui.viewmodel.view import View
    from minitui.viewmodel.words.teller import Line, Teller

POLL_S = 0.05
RETRY_S = 0.5  # pause before a server is asked for a snapshot again


def tail(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A recording, or the URL of a minitui server. "
            "Default: each line of stdin is a question to the bundled model."
        ),
    ] = None,
    kv_blocks: KvBlocks = None,
    requests: Annotated[
        bool,
        typer.Option("--requests", help="Print one line for each request, with the cause of its longest token gap."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --requests: print each line as JSON, in ms.")] = False,
) -> None:
    """Print the engine's work as lines of text. They name the causes of slow steps, and what the cache saves.

    \b
      minitui tail class.trace
      minitui tail class.trace --requests
      minitui tail http://localhost:8000
      echo "What is a KV cache?" | minitui tail

    With --json, most lines describe a "request", with the figures of the text. Times are in ms. null means not known,
    or not yet: "first_token_ms" is null before the first token, and "queue_ms" then counts until now. Time in which
    the engine was paused is only in "queue_paused_ms" and "paused_ms". "tokens_per_second" counts the tokens after the
    first one, from the arrival of the first token to that of the last one.

    Each minute, also while the engine is idle, and at the end, a line has "summary" instead: what the cache saved in
    the "last_s" seconds of working time up to this moment, at most 60 ("after_step": the last step before it;
    "hit_rate" is a share), the nodes that are evicted next, and what limits: the host, the device, or other programs
    ("steps": all of the last 1,000, or, if that differs, those in whose time the host launched prompts, and the others;
    "number_of_steps" and "share_of_time" of these: 1 for all; "other_programs": the share of their time in which
    another program had the core, measured for "other_programs_steps" of them; "host_waits": in the other time, the
    share in which the host waits, or the least that it can be; then "host_waits_at_most" is larger).

    A line has "stall_ms" instead if the engine has given no results for this time: "step" has not ended, and the
    requests in "waiting" wait for its tokens. The first of these lines comes after a second, and another each time that
    the stall has become twice as long.

    In "causes_ms" of a "longest_gap", the values add up to the gap, and in "first_token_causes_ms" to the time to first
    token: there, prefill is the request's own prompt, and other_prefill are the prompts of other requests in its steps.
    The keys are: usual (the expected time without prompts), prefill, other_prefill, beside_prompts (steps with or
    before prompts usually take so much longer; in place of prefill if the engine reports only when a step ended), queue
    and recompute (after a preemption), other_steps (steps without this request), plan, launch, commit, emit (output and
    commands), device, exchange (between ranks), garbage_collection, other_program (on the core), process_stopped,
    variation (as in other steps), prompts_unknown (contains prompts whose cost too few steps tell), unexplained (no
    cause was measured), not_ended, unknown.
    "text" has the same in words.
    """
    if json and not requests:
        raise EngineError("--json needs --requests: without it, the lines are text")
    kind = ("json" if json else "requests") if requests else "steps"
    if source is not None and source.startswith(("http://", "https://")):
        from minitui.sources.remote import RemoteSource

        server = RemoteSource(source, os.environ.get("MINITUI_KEY", ""))
        raise typer.Exit(asyncio.run(tail_server(server, print, kind=kind)))
    if source is not None:
        from minitui.trace.bundled import find_trace

        raise typer.Exit(tail_trace(find_trace(source), print, kind))
    choice = choose_model(None)
    live = live_source(choice, {"kv_blocks": kv_blocks})
    if sys.stdin.isatty():
        print("Type a question and press Enter; Ctrl+D ends.", file=sys.stderr)
    raise typer.Exit(asyncio.run(tail_live(live, choice.system, Sampling(), sys.stdin, print, kind=kind)))


def teller_for(view: View, kind: str) -> Teller:
    """Returns what turns records into lines. kind: "steps"; "requests" or "json" for one line for each request."""
    from minitui.viewmodel.words.teller import RequestTeller, Teller

    return Teller(view) if kind == "steps" else RequestTeller(view, json=kind == "json")


def tail_trace(path: str | Path, out: Callable[[str], None], kind: str = "steps") -> int:
    """Prints a whole recording; returns the exit code. kind: as in `teller_for`."""
    from minitui.trace.reader import TraceReader
    from minitui.viewmodel.view import View

    reader = TraceReader(path)
    view = View()
    view.texts.ids_to_text = reader.decode
    view.texts.group_names = reader.names
    for line in teller_for(view, kind).tell_all(reader):
        out(str(line))
    if not reader.complete:
        (to_stderr if kind == "json" else out)("(the recording is incomplete: it was cut off here)")
    return 0


def to_stderr(text: str) -> None:
    """Print what is no JSON: stdout has only JSON then."""
    print(text, file=sys.stderr)


async def tail_live(
    source: Source, system: str, sampling: Sampling, questions: TextIO, out: Callable[[str], None],
    load: Any = load_codec, *, kind: str = "steps",
) -> int:
    """Starts the engine, asks the questions one after the other in one chat, and prints the records and answers.
    Returns the exit code. kind: as in `teller_for`."""
    from minitui.viewmodel.view import View

    try:
        await source.start(lambda progress: None)
        chats = Chats(source, sampling=sampling)
        chats.use(await asyncio.to_thread(load, source.info))
        view = View()
        assert chats.codec is not None
        view.texts.ids_to_text = chats.codec.decode
        view.reset(await source.snapshot())
        teller = teller_for(view, kind)
        session = chats.new(system, "chat")
        view.texts.group_names = {session.id: "chat"}
        while question := (await asyncio.to_thread(questions.readline)):
            if not question.strip():
                continue
            chats.send(session, question.strip())
            quiet = Quiet(teller)
            while session.busy:
                await asyncio.sleep(POLL_S)
                for line in quiet.tell(source.drain_records()):
                    out(_since(view, line))
            await source.snapshot()  # all records of this answer arrive before the snapshot
            for line in [*teller.tell(source.drain_records()), *teller.rest(), *teller.summary()]:
                out(_since(view, line))
            if kind == "json":
                continue
            answer = session.messages[-1]
            out(f"answer: {' '.join((answer.text or answer.error).split())}")
            out("        " + " · ".join(text for text, _ in describe_answer(answer)))
        return 0
    finally:
        await source.close()


async def tail_server(
    source: Source, out: Callable[[str], None], load: Any = load_codec, *, kind: str = "steps"
) -> int:
    """Prints the work of a server's engine until the user interrupts; kind: as in `teller_for`. Raises EngineDead when
    the server ends."""
    from minitui.viewmodel.view import View

    try:
        await source.start(lambda progress: None)
        view = View()
        view.texts.ids_to_text = (await asyncio.to_thread(load, source.info)).decode
        view.reset(await source.snapshot())
        quiet, lost = Quiet(teller_for(view, kind)), False
        note = to_stderr if kind == "json" else out
        while source.error is None:
            for line in quiet.tell(source.drain_records(), not source.connection):
                out(_since(view, line))
            if source.connection and not lost:
                note(f"({source.connection})")
            lost = bool(source.connection)
            if view.history.gap:
                note(f"({count(view.history.dropped, 'record')} lost; the lines continue from here)")
                view.reset(await _snapshot(source))
                quiet = Quiet(teller_for(view, kind))
            await asyncio.sleep(POLL_S)
        raise EngineDead(source.error)
    finally:
        await source.close()


def _since(view: View, line: Line) -> str:
    """Returns the line with the time since the first record, as a recording of these records has it."""
    return str(replace(line, t=line.t - view.history.origin))


class Quiet:
    """Tells the records of a source, and says when none arrive while requests wait."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._since = time.monotonic()  # of the last record

    def tell(self, records: list[Record], connected: bool = True) -> Iterator[Line]:
        """Yields the lines for the records that have just arrived. `connected`: the engine could have sent some."""
        if records or not connected:
            self._since = time.monotonic()
        yield from self._teller.tell(records)
        seconds = time.monotonic() - self._since
        yield from self._teller.stalled(seconds)
        yield from self._teller.idle(seconds)


async def _snapshot(source: Source) -> dict[str, Any]:
    """Returns a snapshot; asks again while the server restarts its engine. Raises EngineDead when the server ends."""
    while True:
        try:
            return await source.snapshot()
        except EngineError:
            if source.error is not None:
                raise EngineDead(source.error) from None
            await asyncio.sleep(RETRY_S)
