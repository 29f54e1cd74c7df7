"""`minitui proxy`, and `minitui doctor --prefix`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import EngineError, how_to_install
from minitui.visible import json_text


def proxy(
    to: Annotated[str, typer.Option(help="The server's address, as in http://localhost:8000.")],
    log: Annotated[Path, typer.Option(help="The file for the requests; it must not exist.")] = Path("prefix.jsonl"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 picks a free port.")] = 8080,
    hide_text: Annotated[
        bool, typer.Option("--hide-text", help="Store hashes of the texts, with a secret key.")
    ] = False,
) -> None:
    """Pass requests on to a server with OpenAI's or Anthropic's endpoints, and log their prompts for the doctor.

    \b
      minitui proxy --to http://localhost:8000 --log run.jsonl
      ANTHROPIC_BASE_URL=http://localhost:8080 claude
      minitui doctor --prefix run.jsonl

    Answers pass unchanged, as they come. Keys pass, too, and are not stored. The log has the texts of the prompts,
    unless --hide-text is given; only you can read the file. Needs the extra `serve`.
    """
    try:
        import uvicorn

        from minitui.prefix.proxy import Log, Proxy
        from minitui.server.command import address, listen
        from minitui.sources.http import normalise
    except ImportError:
        raise EngineError(f"minitui proxy needs the extra serve: {how_to_install('serve')}") from None
    app = Proxy(normalise(to), Log(log, hide_text))
    bound = listen("127.0.0.1", port)
    print(f"{address('127.0.0.1', bound.getsockname()[1])} passes requests on to {to}; log: {log}", flush=True)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, date_header=False)
    uvicorn.Server(config).run(sockets=[bound])


def run_doctor(source: str, json: bool, markdown: bool, fail_below: float | None) -> int:
    """Prints why requests did not find their prefix; returns the exit code."""
    from minitui.prefix.diagnose import Finding, diagnose
    from minitui.prefix.report import as_data, lines, summarise
    from minitui.prefix.report import markdown as as_markdown
    from minitui.prefix.session import read_log
    from minitui.trace.bundled import bundled, find_trace

    findings: list[Finding]
    path = find_trace(source) if source in bundled() else Path(source)
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    if gzipped:
        from minitui.prefix.recorded import findings_of
        from minitui.trace.reader import TraceReader

        findings = findings_of(TraceReader(path))
    else:
        findings = diagnose(read_log(path))
    if not findings:
        raise EngineError(f"{path} has no requests")
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
