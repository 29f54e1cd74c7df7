"""`minitui compare`: two runs side by side."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import EngineError
from engine.info import EngineInfo
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import Choice, choose_model, load_codec
from minitui.cli.browser import open_in_browser
from minitui.cli.launch import changing_source, run_app, settings_with
from minitui.cli.options import Device, DType, Model, with_options
from minitui.tui.terminal.guard import has_terminal
from minitui.visible import json_text

if TYPE_CHECKING:
    from minitui.sources.base import Source
    from minitui.teaching.compare import Outcome
    from minitui.teaching.contrasts import Contrast
    from minitui.teaching.stage import Restart
    from minitui.trace.reader import TraceReader
    from minitui.viewmodel.compare.comparison import Comparison


@with_options("looks", "opening")
def compare(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="cache, batching, chunked-prefill, fairness, speculation, allocation or pool; or two recordings. "
            "Default: list them.",
            metavar="[NAME | A.trace B.trace]",
        ),
    ] = None,
    model: Model = None,
    device: Device = "auto",
    dtype: DType = "auto",
    pools: Annotated[str | None, typer.Option(help="Of `compare pool`: the two sizes in blocks, as in 24,64.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Save the two runs as recordings; their names begin with this. In the application: key S."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", "--headless", help="Print the figures as text; the default without a terminal.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Run the same work under two settings. See both runs on one clock, and what differs, in numbers and a sentence.

    \b
      minitui compare cache               six chats with one system prompt, without and with the prefix cache
      minitui compare batching            static and continuous batching
      minitui compare chunked-prefill     a long prompt beside running replies: in one step and in chunks
      minitui compare speculation         without and with drafts from the text
      minitui compare allocation          one piece of memory for each request, and paging
      minitui compare pool --pools 24,64  two sizes of the KV pool
      minitui compare cache --save demo   also write demo.cache-off.trace and demo.cache-on.trace
      minitui compare demo.cache-off.trace demo.cache-on.trace
      minitui compare cache --json | jq .sentence
      minitui compare old.json new.json   two results of minitui bench --url --out

    With --json, "differences" has each figure of the text: "first" and "second" are its values, and "change_share" is
    the change as a share of the first. The name of a figure ends with its unit ("time_ms", "gap_p99_ms",
    "reply_tokens_per_second"), or says what is counted ("steps", "prompt_tokens_cached"). "better" is true or false if
    the second run is clearly better or worse. null means not known. "runs" has each run: its "settings", all its
    "figures", and its "requests", as in `minitui tail --requests --json`.
    """
    names = what or []
    record: Path | None = opening["record"]
    text = plain or json or not has_terminal()
    if not names:
        _list()
    elif len(names) == 1:
        contrast = _contrast(names[0], pools)
        options = {"device": device, "dtype": dtype}
        open_in_browser(context, opening)
        raise typer.Exit(_run(contrast, choose_model(model), options, save, record, looks, text, json))
    elif len(names) == 2:
        if pools or save or record or model or (device, dtype) != ("auto", "auto"):
            wrong = "--model, --device, --dtype, --pools, --save and --record"
            raise EngineError(f"{wrong} belong to a new run, not to recordings")
        if all(name.endswith(".json") for name in names):
            _results(names, json)
            return
        open_in_browser(context, opening, own_engine=False)
        raise typer.Exit(_open(names[0], names[1], looks, text, json))
    else:
        raise EngineError(f"{len(names)} recordings were given: two can be compared at a time")


def _results(names: Sequence[str], json: bool) -> None:
    """Prints two results of `minitui bench --url --out` side by side."""
    from minitui.bench.load_figures import compare_results, read_result, side_by_side

    rows = side_by_side(*(read_result(Path(name)) for name in names))
    print(
        json_text({"runs": list(names), "differences": rows}, indent=2)
        if json
        else "\n".join(compare_results(names, rows))
    )


def _list() -> None:
    from minitui.teaching.contrasts import CONTRASTS

    for name, contrast in CONTRASTS.items():
        print(f"minitui compare {name}\n    {contrast.title}")
    print("minitui compare A.trace B.trace\n    two recordings, written with --record or --save, or bundled")


def _contrast(name: str, pools: str | None) -> Contrast:
    from minitui.teaching.contrasts import find_contrast, with_pools

    contrast = find_contrast(name)
    if pools is None:
        return contrast
    if name != "pool":
        raise EngineError(f"--pools belongs to `minitui compare pool`, not to {name!r}")
    sizes = re.fullmatch(r"([1-9]\d{0,7}), ?([1-9]\d{0,7})", pools, re.ASCII)
    if sizes is None:
        raise EngineError(f"--pools is {pools[:40]!r}: it must be two numbers of blocks, as in 24,64")
    return with_pools(contrast, (int(sizes[1]), int(sizes[2])))


# ---- a new run


def _run(
    contrast: Contrast, choice: Choice, options: dict[str, Any], save: Path | None, record: Path | None,
    looks: dict[str, Any], text: bool, json: bool,
) -> int:
    """Runs a contrast on a model of this machine; returns the exit code."""
    from minitui.teaching.compare import TracesOfRuns

    settings = settings_with(looks)
    traces = TracesOfRuns(record)
    try:
        source, restart = changing_source(
            choice, options | contrast.options, contrast.engine(contrast.first), traces.path
        )
        traces.source = source
        sampling = Sampling(temperature=0.0, max_tokens=contrast.max_tokens)
        saving = partial(traces.save, contrast)
        if text:
            comparison, outcome = asyncio.run(_play(contrast, source, choice.system, sampling, restart))
            title = f"{contrast.title} ({outcome.infos[1].model})"
            report(comparison, title, outcome.infos, [outcome.replies], json)
            if save is not None:
                _saved(saving(save))
            return 0
        from minitui.tui.apps.compare_app import CompareApp, compare_in_app

        status = run_app(
            CompareApp, source, settings, choice, sampling,
            script=lambda app: compare_in_app(contrast, app, restart, saving),
        )
        if save is not None and not status:
            _saved(saving(save))
        return status
    finally:
        traces.close()


async def _play(
    contrast: Contrast, source: Source, system: str, sampling: Sampling, restart: Restart
) -> tuple[Comparison, Outcome]:
    """Runs a contrast without the application, and prints on stderr what runs now."""
    from minitui.teaching.compare import run_contrast
    from minitui.teaching.stage import plain_stage
    from minitui.viewmodel.compare.comparison import Comparison, key_of

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    async with plain_stage(source, sampling, load_codec, system=system, say=say, restart=restart, beat=0.0) as stage:
        outcome = await run_contrast(contrast, stage)
        stage.view.texts.group_names = stage.chats.names
        return Comparison.of(stage.view, key_of(outcome.infos)), outcome


def _saved(files: list[Path]) -> None:
    print(f"saved: minitui compare {files[0]} {files[1]}", file=sys.stderr)


# ---- two recordings


def _open(first: str, second: str, looks: dict[str, Any], text: bool, json: bool) -> int:
    """Compares two recordings; returns the exit code."""
    from minitui.trace.bundled import find_trace
    from minitui.trace.reader import TraceReader

    readers = TraceReader(find_trace(first)), TraceReader(find_trace(second))
    names = run_names(*(reader.path.name.removesuffix(".trace") for reader in readers))
    return open_recordings(readers, names, f"{readers[0].path} and {readers[1].path}", looks, text, json)


def open_recordings(
    readers: tuple[TraceReader, TraceReader], names: tuple[str, str], title: str, looks: dict[str, Any], text: bool,
    json: bool, notes: Sequence[str] = (),
) -> int:
    """Compares two recordings; returns the exit code. `text`: print the figures; else open the application. `notes`:
    sentences about the runs, for the application."""
    if text:
        from minitui.viewmodel.compare.comparison import Comparison, key_of
        from minitui.viewmodel.compare.runs import recorded_view, scored

        infos = [reader.info for reader in readers]
        view = recorded_view(readers[1], names[1])
        view.earlier = recorded_view(readers[0], names[0])
        cut = [reader.cut_off for reader in readers if reader.cut_off]
        if figures := scored(readers, names):
            title = f"{title}. {figures}"
        report(Comparison.of(view, key_of(infos)), title, infos, cut, json)
        return 0
    from minitui.tui.apps.compare_app import RecordingsApp, TwoRecordings

    for reader in readers:
        reader.check()  # fails before the application opens
    return run_app(RecordingsApp, TwoRecordings(readers, names, notes), settings_with(looks))


def run_names(first: str, second: str) -> tuple[str, str]:
    """Returns the names of two runs, from the names of their files: "mine.cache-on" is "cache on" if the other file
    begins with "mine." too."""
    one, two = first.rpartition("."), second.rpartition(".")
    if first == second:
        return f"{first} (1)", f"{second} (2)"
    if one[0] and one[0] == two[0]:
        return one[2].replace("-", " "), two[2].replace("-", " ")
    return first, second


def report(
    comparison: Comparison, title: str, infos: list[EngineInfo], notes: list[str], json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Prints two runs side by side. `notes`: sentences about them; `more`: keys that the JSON has, too."""
    notes = [*notes, comparison.disturbed]
    from minitui.viewmodel.compare.comparison import as_data, settings_that_differ, told

    if json:
        print(json_text(as_data(comparison, title, infos, notes) | dict(more or {}), indent=2))
    else:
        print("\n".join(told(comparison, title, settings_that_differ(infos), notes)))
