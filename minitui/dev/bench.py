"""Measurements for developers, beside those of `minitui bench`.

    python -m minitui.dev.bench --host        what the host does for a step, and the radix tree at 1,000 to 100,000
    blocks python -m minitui.dev.bench --app         what the application costs: folding, Inspect, Chat, memory over
    hours python -m minitui.dev.bench --attached    what the engine loses while the application watches it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.hub.resolve import resolve_model
from engine.model.hf_config import read_model_config
from minitui.bench import main as bench
from minitui.visible import json_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = bench.parser()
    parser.prog, parser.description, parser.epilog = "python -m minitui.dev.bench", __doc__, None
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--host", action="store_true", help="the host's part of a step; no model is loaded")
    what.add_argument("--app", action="store_true", help="the application over simulated records")
    what.add_argument("--attached", action="store_true", help="an engine with and without the application")
    parser.add_argument("--seconds", type=float, default=15.0, help="with --app: how long each screen is watched")
    parser.add_argument("--hours", type=float, default=2.0, help="with --app: hours that are fast-forwarded")
    options = parser.parse_args(arguments)
    report = measure(options, bench.say_nothing if options.json else print)
    if options.json:
        print(json_text(report, indent=2))
    return 0


def measure(options: argparse.Namespace, say: Any) -> Any:
    """The report of the measurement that was asked for; `say` prints its lines."""
    if options.host:
        from minitui.dev.bench_host import measure_host

        return measure_host(say)
    if options.app:
        from minitui.dev.bench_app import measure_app

        return measure_app(say, options.seconds, options.hours)
    return _attached(options, say)


def _attached(options: argparse.Namespace, say: Any) -> dict[str, Any]:
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
    sys.exit(main())
