"""Measures how much the application slows the engine down.

The engine runs in its own process, the application in a terminal. The time of a step is compared with runs without
records, and with runs whose records are dropped.

    python -m minitui.dev.bench --attached [--shape 0.6B] [--model DIR] [--pairs 8] [--json]

All runs use one engine. There are three kinds of run: `off` writes no records; `records` sends records to a client that
drops them; `attached` folds them and draws them in Inspect, in a terminal of 160 × 48. The engine measures the time of
a step, between the first and the last token of each reply. The client's other work, asking and reading answers, is the
same in all three kinds.

On one H200 with 16 cores (64 rows of the 0.6B shape, 1.23 ms a step), neither the records nor the application slow a
step measurably: `attached` changes its time by -0.05 % (95 % interval -0.19 % to +0.09 %). On a machine with two cores
the engine and the application compete for the cores; the report then says that there are too few cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequest
from engine.worker.cores import default_threads
from minitui.bench.rows import greedy, random_prompts
from minitui.bench.watching import interval_text, mean_interval
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import Choice, load_codec
from minitui.chat.prompt import Codec
from minitui.chat.sessions import Chats
from minitui.cli.launch import run_app
from minitui.dev.pseudo_terminal import run_in_terminal
from minitui.settings import Settings
from minitui.sources.base import Source
from minitui.sources.local import LocalSource
from minitui.tui.app import MinituiApp

SIZE = (160, 48)
PROMPT = 32
TASK, FIGURES = "task.json", "figures.json"
SETTLE_S = 0.2  # before a run, to fold and draw the snapshot
ARMS = ("off", "records", "attached")  # the kinds of run
ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2))  # no arm is always first


class Numbers:
    """Replaces a missing tokenizer: the text of a token is its number."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(f" {token}" for token in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> NoReturn:
        raise InvalidRequest("a model shape without a checkpoint has no chat template")


def codec_of(info: dict[str, Any]) -> Codec:
    """Returns the checkpoint's tokenizer, or Numbers if the checkpoint has none."""
    return load_codec(info) if (Path(info["model_dir"]) / "tokenizer.json").exists() else Numbers()


class MeasuredApp(MinituiApp):
    """The application. While `drawing` is False it drops all records and draws nothing."""

    drawing = True
    failure = ""

    def _frame(self) -> None:
        if self.drawing:
            super()._frame()
        else:
            self.source.drain_records()

    async def start_drawing(self) -> None:
        """Starts to fold records and draw the screen."""
        self.feed.replaced()
        await self.feed.sync()
        self.drawing = True

    def _show_engine_down(self, title: str, error: str, hang: bool = False) -> None:
        self.failure = f"{title}: {error}"
        self.exit()


async def take_turns(app: MeasuredApp, rows: int, tokens: int, turns: int) -> dict[str, Any]:
    """Runs each of ARMS `turns` times; returns milliseconds per step and this process's share of a core."""
    app.switch_mode("inspect")
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    vocab, seed = int(app.source.info["vocab_size"]), 30_000
    for turn in range(-1, turns):  # the first turn is a warm-up
        for arm in (ARMS[i] for i in ORDERS[turn % len(ORDERS)]):
            seed += 1
            run = await _run(app, arm, random_prompts([PROMPT] * rows, vocab, seed), tokens)
            if turn >= 0:
                found[arm].append(run)
    return {
        "step_ms": {arm: [run["step_ms"] for run in runs] for arm, runs in found.items()},
        "core": {arm: statistics.mean(run["core"] for run in runs) for arm, runs in found.items()},
        "shown": statistics.mean(run["shown"] for run in found["attached"]),  # share of a run's steps folded by its end
    }


async def _run(app: MeasuredApp, arm: str, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    source = app.source
    app.drawing = False
    await source.control("clear_cache")  # the same start for every run
    await source.control("records", enabled=arm != "off")
    if arm == "attached":
        await app.start_drawing()
    await source.control("pause")  # so that all requests start in the same step
    streams = [source.submit(ids, greedy(tokens), group=f"chat {i + 1}") for i, ids in enumerate(prompts)]
    replies = asyncio.gather(*map(_step_ms, streams))
    for stream in streams:
        await stream.started()
    await asyncio.sleep(SETTLE_S)
    began, spent, step = time.monotonic(), time.process_time(), app.view.live.state.step
    await source.control("resume")
    step_ms = statistics.mean(await replies)
    seconds, shown = time.monotonic() - began, app.view.live.state.step - step
    return {"step_ms": step_ms, "core": (time.process_time() - spent) / seconds, "shown": shown / tokens}


async def _step_ms(stream: Any) -> float:
    """Reads the reply; returns its milliseconds per token, measured by the engine."""
    metrics: dict[str, Any] = {}
    async for delta in stream:
        metrics = delta.metrics or metrics
    return 1e3 / metrics["decode_tok_s"]


def attached(config: EngineConfig, rows: int, tokens: int = 256, turns: int = 8) -> tuple[dict[str, Any], str]:
    """Runs the application in a terminal; returns the measurement as data and as a line. Raises EngineError."""
    with tempfile.TemporaryDirectory(prefix="minitui-attached-") as folder:
        task = {"config": asdict(config), "rows": rows, "tokens": tokens, "turns": turns}
        Path(folder, TASK).write_text(json.dumps(task), encoding="utf-8")
        environment = {"MINITUI_DATA": folder, "MINITUI_CONFIG": os.path.join(folder, "settings.toml")}
        arrived = run_in_terminal(["minitui.dev.bench_attached", folder], SIZE, environment)
        try:
            figures: dict[str, Any] = json.loads(Path(folder, FIGURES).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise EngineError("the measured application ended without a result") from None
    if "failure" in figures:
        raise EngineError(f"the measured application failed: {figures['failure']}")
    figures["written_kb"] = round(sum(size for _, size in arrived) / 1e3)
    cores = os.cpu_count() or 1
    threads = (config.cpu_threads or default_threads()) if figures["device"].startswith("CPU") else 1
    report = {"rows": rows, "turns": turns, "cores": cores, "engine_threads": threads, **compare(figures)}
    return report, line_of(report)


def compare(figures: dict[str, Any]) -> dict[str, Any]:
    """Adds `slowdown` and `interval` to the figures: for `records` and `attached`, the mean slowdown of a step relative
    to `off`, and half the width of its 95 % interval."""
    off = figures["step_ms"]["off"]
    slowdown, interval = {}, {}
    for arm in ARMS[1:]:
        ratios = [step / alone - 1.0 for step, alone in zip(figures["step_ms"][arm], off, strict=True)]
        slowdown[arm], interval[arm] = mean_interval(ratios)
    return {**figures, "slowdown": slowdown, "interval": interval}


def line_of(report: dict[str, Any]) -> str:
    """Returns the report as one line, with a warning if the machine has too few cores for this measurement."""
    cores, threads = report["cores"], report["engine_threads"]
    warning = "" if cores - threads > 1 else f": too few for this measurement, because the engine uses {threads}"
    step_ms = statistics.mean(report["step_ms"]["off"])
    slowdown = {arm: interval_text(report["slowdown"][arm], report["interval"][arm]) for arm in ARMS[1:]}
    return (
        f"slowdown compared with no records ({report['turns']} runs each with {report['rows']} rows, "
        f"{step_ms:.2f} ms a step): application attached {slowdown['attached']}; records alone {slowdown['records']}; "
        f"the application used {report['core']['attached']:.2f} of a core ({cores} cores{warning})"
    )


def main(folder: Path) -> None:
    """Runs the measured application: reads the task in `folder` and writes the figures to `folder`."""
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    source = LocalSource(EngineConfig(**task["config"]), folder / "engine.log")
    figures: dict[str, Any] = {}
    made: list[MeasuredApp] = []

    def make(source: Source, chats: Chats, settings: Settings, **options: Any) -> MeasuredApp:
        made.append(MeasuredApp(source, chats, settings, **{**options, "load_codec": codec_of}))
        return made[-1]

    async def script(app: Any) -> None:
        try:
            figures.update(await take_turns(app, task["rows"], task["tokens"], task["turns"]))
            figures["device"] = source.info["device"]
        except Exception as error:  # no user sees this screen, so the figures report the failure
            app.failure = app.failure or f"{type(error).__name__}: {error}"
        app.exit()

    run_app(source, Choice("", "", "", "model"), Settings(), Sampling(), script=script, make=make)
    if made[0].failure:
        figures = {"failure": made[0].failure}
    (folder / FIGURES).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
