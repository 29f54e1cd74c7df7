"""`minitui proxy`, and `minitui doctor --prefix`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import EngineDead, EngineError, how_to_install
from minitui.visible import json_text

if TYPE_CHECKING:
    from minitui.prefix.diagnose import Finding

POLL_S = 0.05  # between two looks at a server's records


def proxy(
    to: Annotated[str, typer.Option(help="The server's address, as in http://localhost:8000.")],
    log: Annotated[Path, typer.Option(help="The file for the requests; it must not exist.")] = Path("prefix.jsonl"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 picks a free port.")] = 8080,
    hide_text: Annotated[
        bool, typer.Option("--hide-text", help="Store hashes of the texts, with a secret key.")
    ] = False,
) -> None:
    """Pass requests on to a server, and log their prompts. Servers with OpenAI's or Anthropic's endpoints are known.

    \b
      minitui proxy --to http://localhost:8000 --log run.jsonl
      ANTHROPIC_BASE_URL=http://localhost:8080 claude
      minitui doctor --prefix run.jsonl

    Answers pass unchanged, as they come. Keys pass, too, and are not stored. The log has the texts of the prompts,
    unless --hide-text is given; only you can read the file. Needs the extra `serve`.
    """
    try:
        from minitui.prefix.log import Log
        from minitui.prefix.proxy import CHUNK, Proxy
        from minitui.server.command import address, listen
        from minitui.sources.http import normalise
    except ImportError:
        raise EngineError(f"minitui proxy needs the extra serve: {how_to_install('serve')}") from None
    to = normalise(to)
    bound = listen("127.0.0.1", port)
    written = Log(log, hide_text)

    async def serve() -> None:
        passing = Proxy(to, written)
        server = await asyncio.start_server(passing.serve, sock=bound, limit=CHUNK)
        print(f"{address('127.0.0.1', bound.getsockname()[1])} passes requests on to {to}; log: {log}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            passing.close()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        pass
    finally:
        written.close()


def run_doctor(source: str, seconds: float | None, json: bool, markdown: bool, fail_below: float | None) -> int:
    """Prints why requests did not find their prefix; returns the exit code. `seconds`: how long a server is watched."""
    from minitui.prefix.report import as_data, lines, summarise
    from minitui.prefix.report import markdown as as_markdown

    findings = _findings(source, seconds)
    if not findings:
        raise EngineError(f"{source} has no requests")
    if json:
        print(json_text(as_data(findings, source), indent=2))
    else:
        print(as_markdown(findings, source) if markdown else "\n".join(lines(findings, source)))
    if fail_below is None:
        return 0
    kept = summarise(findings).kept
    if kept is None:
        print("minitui: the server does not tell what was cached: --fail-below cannot be checked", file=sys.stderr)
        return 1
    if kept < fail_below:
        print(f"minitui: {kept:.0%} of what could have been cached was: less than {fail_below:.0%}", file=sys.stderr)
        return 1
    return 0


def _findings(source: str, seconds: float | None) -> list[Finding]:
    from minitui.prefix.diagnose import diagnose
    from minitui.prefix.recorded import findings_in
    from minitui.prefix.session import read_log
    from minitui.trace.bundled import bundled, find_trace
    from minitui.trace.reader import TraceReader

    if source.startswith(("http://", "https://")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "watched.trace")
            until = "Ctrl+C" if seconds is None else f"{seconds:g} s, or Ctrl+C"
            print(f"watching {source}: the report comes after {until}", file=sys.stderr, flush=True)
            with suppress(KeyboardInterrupt):
                asyncio.run(watch(source, path, seconds))
            return findings_in(TraceReader(path))
    if seconds is not None:
        raise EngineError("--seconds is for a server: a recording is read whole")
    path = find_trace(source) if source in bundled() else Path(source)
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    if not gzipped:
        return diagnose(read_log(path))
    reader = TraceReader(path)
    findings = findings_in(reader)
    if reader.cut_off:
        print(reader.cut_off, file=sys.stderr)
    return findings


async def watch(url: str, path: Path, seconds: float | None) -> None:
    """Record what a server's engine does: minitui serve, or vLLM with minitui's recorder. Raises EngineError if the
    server reports nothing, or ends."""
    from minitui.sources.recording import RecordingSource
    from minitui.sources.remote import RemoteSource

    source = RecordingSource(RemoteSource(url, os.environ.get("MINITUI_KEY", "")), path)
    end = time.monotonic() + seconds if seconds is not None else inf
    try:
        await source.start(lambda progress: None)
        while time.monotonic() < end:
            if source.error is not None:
                raise EngineDead(source.error)
            source.drain_records()
            if source.recording.waits_for_snapshot:
                await source.snapshot()
            await asyncio.sleep(POLL_S)
    finally:
        await source.close()
