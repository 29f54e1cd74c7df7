"""`minitui replay`: lists, plays and exports recordings."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.cli.browser import open_in_browser
from minitui.cli.launch import run_app, settings_with
from minitui.cli.options import with_options
from minitui.tui.terminal.guard import need_terminal


@with_options("looks", "opening")
def replay(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    trace: Annotated[
        str | None,
        typer.Argument(
            help="A file written with --record, or the name of a bundled recording. "
            "Default: list the bundled recordings.",
            metavar="[FILE|NAME]",
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            help="1 is the engine's speed, 0.1 is ten times slower. Default: 1; for a bundled recording, the speed at "
            "which it takes about a minute."
        ),
    ] = None,
    export: Annotated[
        str | None, typer.Option(help="Write a file of this format instead of playing: perfetto, json, md, svg or png.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write; - is stdout. Default: a file beside the recording."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step that a picture shows. Default: the last step.")] = None,
    size: Annotated[str, typer.Option(help="Size of a picture: columns x rows.")] = "120x36",
    what_if: Annotated[
        str | None,
        typer.Option(
            help="Play the requests under another setting, beside the recording. Names: budget, seqs, blocks, "
            "block_size, context, policy, eviction, cache, chunking, speculation, gap.",
            metavar="NAME=VALUE,…",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="The same for several values of a setting: budget=512..8192, policy=fcfs|static. Writes JSON and PNG.",
            metavar="NAME=RANGE",
        ),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="Of --what-if and --sweep. recorded: requests come when they came. closed: the next question of a "
            "chat comes as long after the answer as it did."
        ),
    ] = "recorded",
    json: Annotated[bool, typer.Option("--json", help="Of --what-if and --sweep: print JSON.")] = False,
    requests: Annotated[
        bool,
        typer.Option("--requests", help="Of --what-if --json: add each request, and the causes of its waits (slow)."),
    ] = False,
) -> None:
    """Play or export a recording, or ask what another setting does.

    \b
      minitui replay                                 list the bundled recordings
      minitui chat --record class.trace
      minitui replay class.trace                     keys: space pauses, , and . step, B begin, E end
      minitui replay h200-8b --record mine.trace     a copy, which keeps the bookmarks that you add
      minitui replay class.trace --export perfetto   for ui.perfetto.dev
      minitui replay class.trace --export md -o - | less
      minitui replay class.trace --export svg --step 40 --size 160x48
      minitui replay class.trace --export png --theme light    needs an installed Chromium
      minitui replay run.trace --what-if budget=1024,blocks=2000    the same requests under another setting
      minitui replay run.trace --sweep budget=512..8192             first tokens, gaps and speed over a setting

    With --what-if, scheduler, allocator and prefix tree are the real ones; the device is simulated. What a step costs
    is fitted to the recording, and the notes say with which error. Steps that do more than any recorded step, or
    have a number of rows like none, are extrapolated, and the notes say how many. --json has the keys of `minitui
    compare --json`; "what_if" has the fit, and the recorded setting played in the same way. The "requests" of the runs
    are there only with --requests: explaining the waits of 10,000 requests takes a minute, their figures seconds.
    --sweep --json has "points" with their "figures".
    """
    if requests and (what_if is None or not json):
        raise EngineError("--requests belongs to --what-if with --json")
    if what_if is not None or sweep is not None:
        from minitui.cli import whatif

        if trace is None or (what_if is not None and sweep is not None) or export is not None:
            raise EngineError("--what-if and --sweep need a recording, and exclude each other and --export")
        if what_if is not None:
            raise typer.Exit(whatif.run_what_if(trace, what_if, arrivals, json, requests, looks))
        raise typer.Exit(whatif.run_sweep(trace, str(sweep), arrivals, json, out))
    if json or arrivals != "recorded":
        raise EngineError("--json and --arrivals belong to --what-if and --sweep")
    if trace is None:
        run_list()
    elif export is None:
        from minitui.trace.bundled import find_trace

        find_trace(trace)  # a missing file is reported here, not in the browser
        open_in_browser(context, opening, own_engine=False)
        if opening["record"] is not None:
            trace = str(copy_trace(trace, opening["record"]))
        raise typer.Exit(run_replay(trace, speed, looks))
    elif out == Path("-"):
        with tempfile.TemporaryDirectory() as folder:
            path = run_export(trace, export, Path(folder, "export"), step, size, looks["theme"])
            if sys.stdout is not None:
                sys.stdout.buffer.write(path.read_bytes())
    else:
        print(run_export(trace, export, out, step, size, looks["theme"]))


def run_list() -> None:
    """Prints the bundled recordings."""
    from minitui.trace.bundled import bundled, describe
    from minitui.trace.reader import TraceReader

    for name, path in bundled().items():
        print(f"minitui replay {name}\n    {describe(TraceReader(path))}")
    print("minitui replay FILE\n    a recording of your own, written with --record FILE")


def copy_trace(trace: str, path: Path) -> Path:
    """Copies a recording to `path`, which is then played: bookmarks are added to the copy. Raises TraceError."""
    from minitui.trace.bundled import find_trace
    from minitui.trace.reader import TraceError

    try:
        shutil.copyfile(find_trace(trace), path)
    except shutil.SameFileError:
        raise TraceError(f"{path} is the recording itself: bookmarks are added to it without --record") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --record") from None
    return path


def run_replay(trace: str, speed: float | None, looks: dict[str, Any]) -> int:
    """Plays a recording in the application; returns the exit code."""
    from minitui.sources.replay import ReplaySource
    from minitui.trace.bundled import find_trace, is_bundled, watching_speed
    from minitui.trace.reader import TraceReader
    from minitui.tui.apps.replay_app import ReplayApp

    settings = settings_with(looks)
    need_terminal("minitui replay", "minitui tail FILE or minitui replay FILE --export md")
    path = find_trace(trace)
    reader = TraceReader(path)  # if the file is invalid, raises before the application opens
    if speed is None:
        speed = watching_speed(reader) if is_bundled(path) else 1.0
    return run_app(ReplayApp, ReplaySource(path, speed), settings)


def run_export(trace: str | Path, kind: str, out: Path | None, step: int | None, size: str, theme: str | None) -> Path:
    """Exports a recording; returns the path of the written file. If `out` is None, the file is beside the recording, or
    in the working directory for a bundled recording."""
    from minitui.export import PICTURES, SUFFIXES, export
    from minitui.trace.bundled import find_trace, is_bundled

    trace = find_trace(str(trace))
    if out is None and is_bundled(trace) and kind in SUFFIXES:
        out = Path(trace.stem + SUFFIXES[kind])
    if kind not in PICTURES:
        return export(trace, kind, out)
    from minitui.export.svg import write_picture

    columns, _, rows = size.partition("x")
    digits = size.isascii() and columns.isdigit() and rows.isdigit()
    if not (digits and len(size) < 9 and 40 <= int(columns) <= 1000 and 12 <= int(rows) <= 500):
        raise EngineError(f"the size is {size!r}: it must be columns x rows, from 40x12 to 1000x500, as in 120x36")
    name = settings_file.theme_name(theme or "dark")
    return write_picture(str(trace), kind, out, step, (int(columns), int(rows)), name)
