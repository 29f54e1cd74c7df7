"""Runs the measurements for developers that `minitui bench` does not have."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from engine.config import EngineConfig
from engine.hub.resolve import resolve_model
from engine.model.hf_config import read_model_config
from minitui.bench import main as bench
from minitui.bench.options import run
from minitui.visible import json_text

HELP = """Run measurements for developers of minitui.

\b
  python -m minitui.dev.bench --host       the host's part of a step; the radix tree with 1,000 to 100,000 blocks
  python -m minitui.dev.bench --app        the application: folding records, Inspect, Chat, memory over hours
  python -m minitui.dev.bench --attached   how much the application slows an engine down
"""


@dataclass(kw_only=True)
class Options(bench.Options):
    """The options of `minitui bench`, and the options for the measurements in HELP."""

    host: Annotated[bool, typer.Option("--host", help="The host's part of a step; loads no model.")] = False
    app: Annotated[bool, typer.Option("--app", help="The application over simulated records.")] = False
    attached: Annotated[bool, typer.Option("--attached", help="An engine with and without the application.")] = False
    seconds: Annotated[float, typer.Option(help="With --app: how long to measure each screen.")] = 15.0
    hours: Annotated[float, typer.Option(help="With --app: simulated hours.")] = 2.0


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits."""
    run(Options, measure, arguments, "python -m minitui.dev.bench", HELP)


def measure(options: Options) -> None:
    """Runs the chosen measurement and prints its report."""
    if options.host + options.app + options.attached != 1:
        raise typer.BadParameter("give one of --host, --app and --attached")
    report = _report(options, bench.say_nothing if options.json else print)
    if options.json:
        print(json_text(report, indent=2))


def _report(options: Options, say: Any) -> Any:
    if options.host:
        from minitui.dev.bench_host import measure_host

        return measure_host(say)
    if options.app:
        from minitui.dev.bench_app import measure_app

        return measure_app(say, options.seconds, options.hours)
    return _attached(options, say)


def _attached(options: Options, say: Any) -> dict[str, Any]:
    import torch

    from minitui.dev.bench_attached import attached

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="minitui-bench-") as folder:
        for label, model, dummy in bench.models(options, Path(folder), on_gpu):
            directory = resolve_model(model, weights=not dummy, tokenizer=False)
            chosen = bench.engine_options(options, dummy, on_gpu, read_model_config(directory).max_context)
            chosen["load_tokenizer"] = (directory / "tokenizer.json").exists()
            config = EngineConfig(str(directory), **chosen)
            report[label], line = attached(config, 64 if on_gpu else 4, turns=options.pairs)
            say(f"{label}: {line}")
    return report


if __name__ == "__main__":
    main()
