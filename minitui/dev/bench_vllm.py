"""Runs `vllm serve` with the recorder: checks the recording against vLLM's own numbers, and measures its cost.

    python -m minitui.dev.bench_vllm truth|cost --out DIR [--configs DIR] [--seconds 120] …

Needs vLLM and a GPU, and no network: the models have random weights in the shape of real ones.

truth  Servers run a load that shares prefixes, cancels requests and does not fit the pool: the 8B shape under 64
       streams, and a small shape for many steps (`--servers tiny,tiny,tiny,tiny --steps 100000`: each has a client
       process; the run ends when all together have compared so many steps). vLLM sends its own count of free blocks and
       its block tables with each step, and the watcher compares them. Writes DIR/truth-*.json, the traces, and each
       server's /metrics. `--ranks 2`: each server has two data parallel ranks, which need a GPU each.
cost   A server without and one with the recorder, on one GPU, take turns: without, recorded, recorded with a reader.
       The 8B shape at 64 rows, the 0.6B shape at 256. Writes DIR/cost.json.
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

from minitui.dev.vllm_load import closed_loop, load, read_records
from minitui.dev.vllm_servers import ROOT, Server, sizes, start, stop, wait_ready
from minitui.sources.vllm import find_async

# ---- truth


async def truth(out: Path, configs: Path, seconds: float, shapes: list[str], steps: int, ranks: int) -> None:
    """Runs the loads, and prints what the comparisons found."""
    servers = []
    for i, shape in enumerate(shapes):
        options = sizes("8B", 64, 2048, 8192, 1200) if shape == "8B" else sizes("tiny", 24, 512, 4096, 300)
        servers.append(Server(f"truth-{shape.lower()}-{i}", shape, 8000 + 10 * i, options, True, True, ranks))
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
    """Measures pairs until the time is used; prints the throughput and what it loses."""
    servers: list[Server] = []
    for i, (shape, rows, _) in enumerate(shapes):
        options = sizes(shape, rows, 8192, 4096, rows * 28)
        servers += [
            Server(f"{shape}-plain", shape, 8100 + 10 * i, options),
            Server(f"{shape}-recorded", shape, 8200 + 10 * i, options, recorded=True),
        ]
    results: dict[str, Any] = {}
    try:
        for server in servers:
            start(server, configs, out)
            time.sleep(4)  # their first allocations do not overlap
        wait_ready(servers, configs, out)
        for i, (shape, rows, tokens) in enumerate(shapes):
            plain, recorded = servers[2 * i], servers[2 * i + 1]
            until = time.monotonic() + seconds / len(shapes)
            for server in (plain, recorded):
                await closed_loop(server, rows, 32, 0)
            rates: dict[str, list[float]] = {"plain": [], "recorded": [], "watched": []}
            took, turn = 0.0, 0
            while turn < 2 or time.monotonic() + took < until:
                began, turn = time.monotonic(), turn + 1
                for kind in ("plain", "recorded", "watched") if turn % 2 else ("watched", "recorded", "plain"):
                    reader = None
                    if kind == "watched":
                        command = [sys.executable, "-m", "minitui.dev.bench_vllm", "read", "--url", recorded.telemetry]
                        reader = subprocess.Popen(command, cwd=ROOT)
                        await asyncio.sleep(0.7)
                    server = plain if kind == "plain" else recorded
                    rates[kind].append(round(await closed_loop(server, rows, tokens, turn), 1))
                    if reader is not None:
                        reader.kill()
                        reader.wait()
                took = time.monotonic() - began
            info = json.load(urllib.request.urlopen(f"{recorded.telemetry}/minitui/info"))
            losses = {kind: _loss(rates["plain"], rates[kind]) for kind in ("recorded", "watched")}
            summary = {"tokens_per_s": rates, "recording_us": info["recording_us"], **losses}
            results[f"{shape} at {rows} rows"] = summary
            print(shape, json.dumps(summary), flush=True)
            (out / "cost.json").write_text(json.dumps(results, indent=1))
    finally:
        stop(servers, out)


def _loss(plain: list[float], other: list[float]) -> dict[str, float]:
    """Returns the mean loss of throughput in percent, over the pairs, and its standard error."""
    losses = [100 * (1 - b / a) for a, b in zip(plain, other, strict=True)]
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    return {"loss_percent": round(statistics.mean(losses), 2), "standard_error": round(error, 2)}


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
