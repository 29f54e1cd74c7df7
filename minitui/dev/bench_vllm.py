"""Runs `vllm serve` with the recorder: checks the recording against vLLM's own numbers, and measures its cost.

    python -m minitui.dev.bench_vllm truth|cost --out DIR [--configs DIR] [--seconds 120] …

Needs vLLM and a GPU, and no network: the models have random weights in the shape of real ones.

truth  Servers run a load that shares prefixes, cancels requests and does not fit the pool: the 8B shape under 64
       streams, and a small shape for many steps (`--servers tiny,tiny,tiny,tiny --steps 100000`: each has a client
       process; the run ends when all together have compared so many steps). vLLM sends its own count of free blocks and
       its block tables with each step, and the watcher compares them. Writes DIR/truth-*.json, the traces, and each
       server's /metrics. `--ranks 2`: each server has two data parallel ranks, which need a GPU each.
cost   One server whose recorder goes on and off every second (vllm_switched.py), first alone, then with a reader of its
       telemetry. The 8B shape at 64 rows, the 0.6B shape at 256. Writes DIR/cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from minitui.dev.vllm_load import load, read_records, steady
from minitui.dev.vllm_servers import ROOT, Server, sizes, start, stop, wait_ready
from minitui.sources.vllm import find_async

WARM_S = 5.0

# ---- truth


async def truth(out: Path, configs: Path, seconds: float, shapes: list[str], steps: int, ranks: int) -> None:
    """Runs the loads, and prints what the comparisons found."""
    servers = []
    for i, shape in enumerate(shapes):
        options = sizes("8B", 64, 2048, 8192, 1200) if shape == "8B" else sizes("tiny", 24, 512, 4096, 300)
        servers.append(Server(f"truth-{shape.lower()}-{i}", shape, 8000 + 10 * i, options, True, ranks=ranks))
    clients: list[subprocess.Popen[bytes]] = []
    try:
        for server in servers:
            start(server, configs, out)
            time.sleep(2)  # their first allocations do not overlap
        wait_ready(servers, configs, out)
        for i, server in enumerate(servers):
            clients.append(subprocess.Popen([
                sys.executable, "-m", "minitui.dev.bench_vllm", "load", "--url", server.url, "--servers", server.shape,
                "--seconds", str(seconds), "--seed", str(i + 1),
            ], cwd=ROOT))  # fmt: skip
        until = time.monotonic() + seconds
        while time.monotonic() < until and (not steps or (n := sum(compared(out, servers))) < steps):
            await asyncio.sleep(1.0)
            if steps and int(until - time.monotonic()) % 10 == 0:
                print(f"{n:,} of {steps:,} steps compared, {until - time.monotonic():.0f} s are left", flush=True)
        for client in clients:
            client.send_signal(signal.SIGINT)
            client.wait(20)
        await asyncio.sleep(2.5)  # cancelled requests end, and the reports are written
        for server in servers:
            for engine in await find_async(server.url):
                print(f"{server.name}: {engine.name} is at {engine.telemetry}", flush=True)
            page = urllib.request.urlopen(f"{server.url}/metrics", timeout=5).read()
            (out / f"{server.name}.prom").write_bytes(page)
    finally:
        for client in clients:
            client.kill()
        stop(servers, out)
    for server in servers:
        totals: Counter[str] = Counter()
        for rank, path in enumerate(server.reports(out)):
            report = json.loads(path.read_text())
            totals += Counter(report["totals"])
            print(server.name, f"rank {rank}", json.dumps(report), flush=True)
        for line in compare_metrics(totals, (out / f"{server.name}.prom").read_text()):
            print(f"  {line}", flush=True)
    print(f"{sum(compared(out, servers)):,} steps compared", flush=True)


def compared(out: Path, servers: list[Server]) -> list[int]:
    """Returns, for each engine, the steps after which the watcher has compared vLLM's numbers."""
    numbers = []
    for server in servers:
        for path in server.reports(out):
            with contextlib.suppress(OSError, ValueError):
                numbers.append(json.loads(path.read_text())["comparisons"] // 2)
    return numbers


def compare_metrics(totals: dict[str, int], page: str) -> list[str]:
    """Returns a line for each value that the recording and vLLM's /metrics share."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            reason = name.partition('finished_reason="')[2].partition('"')[0]
            key = name.partition("{")[0] + (f" {reason}" if reason else "")
            sums[key] = sums.get(key, 0.0) + float(value)
    pairs = {
        "vllm:prefix_cache_queries_total": totals.get("queries", 0),
        "vllm:prefix_cache_hits_total": totals.get("hits", 0),
        "vllm:num_preemptions_total": totals.get("preemptions", 0),
        "vllm:request_success_total stop": totals.get("FINISHED_STOPPED", 0),
        "vllm:request_success_total length": totals.get("FINISHED_LENGTH_CAPPED", 0),
        "vllm:request_success_total abort": totals.get("FINISHED_ABORTED", 0),
        "vllm:generation_tokens_total": totals.get("tokens", 0),
    }  # fmt: skip
    return [
        f"{'equal' if sums.get(name, 0) == value else 'DIFFERENT'}: {name} {sums.get(name, 0):,.0f}, recorded {value:,}"
        for name, value in pairs.items()
    ]


# ---- cost


async def cost(out: Path, configs: Path, seconds: float, shapes: list[tuple[str, int, int]]) -> None:
    """Measures for so many seconds; prints the throughput, what recording takes of it, and the recorder's own time."""
    servers: list[Server] = []
    for i, (shape, rows, _) in enumerate(shapes):
        options = sizes(shape, rows, 8192, 4096, rows * 28)
        servers.append(Server(f"cost-{shape}", shape, 8100 + 10 * i, options, switched=True))
    results: dict[str, Any] = {}
    try:
        for server in servers:
            start(server, configs, out)
            time.sleep(4)  # their first allocations do not overlap
        wait_ready(servers, configs, out)
        for server, (shape, rows, tokens) in zip(servers, shapes, strict=True):
            length = seconds / len(shapes)
            clients = asyncio.create_task(steady(server, rows, tokens, time.monotonic() + length))
            await asyncio.sleep(WARM_S)
            ends = [time.time()]
            await asyncio.sleep((length - WARM_S) / 2)
            ends.append(time.time())
            reader = subprocess.Popen(
                [sys.executable, "-m", "minitui.dev.bench_vllm", "read", "--url", server.telemetry], cwd=ROOT
            )
            ends.append(time.time() + 1.0)
            await clients
            ends.append(time.time() - 1.0)
            reader.kill()
            reader.wait()
            periods = read_periods(server.periods(out).read_text())
            info = json.load(urllib.request.urlopen(f"{server.telemetry}/minitui/info"))
            results[f"{shape} at {rows} rows"] = summary = {
                "recording_us": info["recording_us"], "recorded": loss(periods, *ends[:2]),
                "watched": loss(periods, *ends[2:]),
            }  # fmt: skip
            print(shape, json.dumps(summary), flush=True)
            (out / "cost.json").write_text(json.dumps(results, indent=1))
    finally:
        stop(servers, out)


def read_periods(text: str) -> list[tuple[float, float, bool, float, float]]:
    """Returns each period's begin and end, whether the recorder was on, its tokens and its steps per second."""
    rows = [line.split() for line in text.splitlines()]
    return [
        (float(end) - float(s), float(end), on == "1", int(n) / float(s), int(steps) / float(s))
        for end, on, s, steps, n in rows
    ]


def loss(periods: list[tuple[float, float, bool, float, float]], begin: float, end: float) -> dict[str, float]:
    """Returns what recording takes of the tokens per second between two times, in percent, and its standard error.

    Two periods that follow one another are a pair: one is without and one with the recorder.
    """
    pairs = [
        (b, a) if a[2] else (a, b) for a, b in zip(periods[::2], periods[1::2], strict=False)
        if begin < a[0] and b[1] < end
    ]  # fmt: skip
    losses = [100 * (1 - on[3] / off[3]) for off, on in pairs]
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    return {
        "tokens_per_s": round(statistics.mean(off[3] for off, _ in pairs)),
        "step_ms": round(1e3 / statistics.mean(off[4] for off, _ in pairs), 3), "pairs": len(pairs),
        "loss_percent": round(statistics.mean(losses), 2), "standard_error": round(error, 2),
    }  # fmt: skip


def main() -> None:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("truth", "cost", "read", "load"))
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--configs", type=Path, default=ROOT.parent / "shared" / "qwen3")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load, without the start of the servers")
    parser.add_argument("--shapes", default="8B:64:256,0.6B:256:256", help="of cost: shape:rows:tokens, …")
    parser.add_argument("--servers", default="8B,tiny", help="of truth: shapes")
    parser.add_argument("--steps", type=int, default=0, help="of truth: end when so many are compared")
    parser.add_argument("--ranks", type=int, default=1, help="of truth: data parallel ranks of each server; GPUs")
    parser.add_argument("--url", default="")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.part == "read":
        read_records(given.url)
        return
    if given.part == "load":
        port = int(given.url.rpartition(":")[2])
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(load(Server("", given.servers, port, []), given.seconds, given.seed))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "truth":
        asyncio.run(truth(given.out, given.configs, given.seconds, given.servers.split(","), given.steps, given.ranks))
    else:
        shapes = [
            (shape, int(rows), int(tokens)) for shape, rows, tokens in (s.split(":") for s in given.shapes.split(","))
        ]
        asyncio.run(cost(given.out, given.configs, given.seconds, shapes))


if __name__ == "__main__":
    main()
