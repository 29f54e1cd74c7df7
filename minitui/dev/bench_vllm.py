"""Runs `vllm serve` with the recorder: checks the recording against vLLM's own numbers, and measures its cost.

    python -m minitui.dev.bench_vllm truth|cost --out DIR [--configs DIR] [--seconds 120] …

Needs vLLM and a GPU, and no network: the models have random weights in the shape of real ones.

truth  Servers run a load that shares prefixes, cancels requests and does not fit the pool: the 8B shape under 64
       streams, and a small shape for many steps (`--servers tiny,tiny,tiny,tiny --steps 100000`: each has a client
       process; the run ends when all together have compared so many steps). vLLM sends its own count of free blocks and
       its block tables with each step, and the watcher compares them. Writes DIR/truth-*.json, the traces, and each
       server's /metrics.
cost   A server without and one with the recorder, on one GPU, take turns: without, recorded, recorded with a reader.
       The 8B shape at 64 rows, the 0.6B shape at 256. Writes DIR/cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = (
    "You are the support assistant of a small bicycle shop in Utrecht. Answer briefly, in plain words, and never "
    "promise a delivery date. ",
    "You review Python code. Point out defects first, style last; quote the line you mean, and suggest the smallest "
    "change that mends it. ",
    "You are a patient teacher of linear algebra. Use small matrices as examples, and end every answer with a question "
    "to the student. ",
)
QUESTIONS = (
    "What does it cost to mend a flat tyre?", "My chain skips under load; what should I check first?",
    "Why is this function slow?", "Explain eigenvalues.", "What is a basis?", "Is `except:` bad?",
    "Which lock do you advise?", "What is the rank of a matrix?", "Do you sell children's bikes?",
    "How do I profile this?",
)  # fmt: skip
TINY = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_window_layers": 2}  # fmt: skip
START_S = 280.0
PIECE_S = 0.005  # of an answer without a stream: a client goes away after so many seconds for each piece
KV_BYTES = {"8B": 147_456, "0.6B": 114_688, "tiny": 4_096}  # of one token


@dataclass
class Server:
    """One `vllm serve`."""

    name: str
    shape: str
    port: int
    options: list[str]
    recorded: bool = False
    check: bool = False
    process: subprocess.Popen[bytes] | None = None
    rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def telemetry(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"


def sizes(shape: str, rows: int, budget: int, length: int, blocks: int) -> list[str]:
    """Returns the options for a server with this many blocks. Several servers share one GPU, so none measures it."""
    return [
        "--max-num-seqs", str(rows), "--max-num-batched-tokens", str(budget), "--max-model-len", str(length),
        "--kv-cache-memory-bytes", str(blocks * 16 * KV_BYTES[shape]), "--gpu-memory-utilization", "0.02",
    ]  # fmt: skip


def model_folder(shape: str, configs: Path, work: Path) -> Path:
    """Makes a folder with the shape's config and the tokenizer, and returns it."""
    folder = work / shape
    folder.mkdir(parents=True, exist_ok=True)
    source = "Qwen3-0.6B" if shape == "tiny" else f"Qwen3-{shape}"
    config = json.loads((configs / "configs" / f"{source}.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (TINY if shape == "tiny" else {})))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((configs / name).read_bytes())
    return folder


def start(server: Server, configs: Path, out: Path, fast: bool = True) -> None:
    """Starts a server; its log is DIR/NAME.log."""
    folder = model_folder(server.shape, configs, Path("/tmp/minitui-vllm"))
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder),
        "--served-model-name", f"Qwen3-{server.shape}",
        "--load-format", "dummy", "--port", str(server.port), "--host", "127.0.0.1", "--seed", "1", *server.options,
    ]  # fmt: skip
    if fast:  # without torch.compile a server starts in half the time; decodes still run as CUDA graphs
        command += ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})]
    environment = {
        **os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    if server.recorded:
        command += ["--scheduler-cls", "minitui.vllm.RecordingScheduler"]
        environment["MINITUI_TELEMETRY_PORT"] = str(server.port + 1)
    if server.check:
        environment["MINITUI_VLLM_CHECK"] = str(out / f"{server.name}.json")
        if server.shape == "8B":
            environment["MINITUI_RECORD"] = str(out / f"{server.name}.trace")
    log = (out / f"{server.name}.log").open("wb")
    server.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def wait_ready(servers: list[Server], configs: Path, out: Path) -> None:
    """Waits until all servers answer. A server that ends while it starts is started again with vLLM's own settings."""
    waiting, again = list(servers), set()
    deadline = time.monotonic() + START_S
    while waiting:
        if time.monotonic() > deadline:
            raise SystemExit(f"{waiting[0].name} does not answer after {START_S:.0f} s: see {waiting[0].name}.log")
        for server in list(waiting):
            assert server.process is not None
            if server.process.poll() is not None:
                tail = (out / f"{server.name}.log").read_text(errors="replace")[-3000:]
                print(f"{server.name} ended: {tail}", flush=True)
                if server.name in again:
                    raise SystemExit(f"{server.name} cannot be started")
                again.add(server.name)
                (out / f"{server.name}.log").rename(out / f"{server.name}.first.log")
                start(server, configs, out, fast=False)
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{server.url}/health", timeout=1).close()
                print(f"{server.name} is ready", flush=True)
                waiting.remove(server)
        time.sleep(0.5)


def stop(servers: list[Server], out: Path) -> None:
    """Stops the servers as Ctrl+C does, and waits for the reports."""
    for server in servers:
        if server.process is not None and server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGINT)
    for server in servers:
        if server.process is None:
            continue
        try:
            server.process.wait(25)
        except subprocess.TimeoutExpired:
            os.killpg(server.process.pid, signal.SIGKILL)
        report = out / f"{server.name}.json"
        for _ in range(100):
            if not server.check or report.exists():
                break
            time.sleep(0.1)


# ---- truth


class Streams:
    """Clients of one server."""

    def __init__(self, server: Server, http: aiohttp.ClientSession, seed: int) -> None:
        self.server, self.http, self.random = server, http, random.Random(seed)
        self.done = self.cancelled = self.refused = 0

    async def chat(self, system: int, turns: int, tokens: int, cancel_after: int = 0, **extra: Any) -> None:
        """Runs a conversation. `cancel_after`: goes away after this many pieces."""
        messages = [{"role": "system", "content": SYSTEMS[system] * 6}]
        for _ in range(turns):
            messages.append({"role": "user", "content": self.random.choice(QUESTIONS)})
            messages.append({"role": "assistant", "content": await self.ask(messages, tokens, cancel_after, **extra)})
            await asyncio.sleep(self.random.random() * 0.2)

    async def ask(self, messages: list[dict[str, str]], tokens: int, cancel_after: int = 0, **extra: Any) -> str:
        body = {
            "model": f"Qwen3-{self.server.shape}", "messages": messages, "max_tokens": tokens,
            "stream": self.server.shape != "tiny", "temperature": 0.8,
            "chat_template_kwargs": {"enable_thinking": False}, **extra,
        }  # fmt: skip
        text, pieces = "", 0
        try:
            async with (
                asyncio.timeout(None if body["stream"] or not cancel_after else cancel_after * PIECE_S),
                self.http.post(f"{self.server.url}/v1/chat/completions", json=body) as response,
            ):
                if response.status != 200:
                    self.refused += 1
                    return ""
                if not body["stream"]:
                    text = (await response.json())["choices"][0]["message"]["content"] or ""
                else:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            choices = json.loads(line[6:]).get("choices")
                            text += (choices[0]["delta"].get("content") or "") if choices else ""
                            pieces += 1
                            if cancel_after and pieces >= cancel_after:
                                self.cancelled += 1
                                return text  # leaving the block closes the connection
        except TimeoutError:
            self.cancelled += 1
            return text
        self.done += 1
        return text

    async def drive(self) -> None:
        """Three long system prompts shared by 24 chats of two turns, a client that vanishes, 40 chats more than fit."""

        async def later(delay: float, *arguments: int) -> None:
            await asyncio.sleep(delay)
            await self.chat(*arguments)

        await self.chat(0, 1, 40)
        await asyncio.gather(
            *(later(i * 0.05, i % 3, 2, 60 + 10 * (i % 7)) for i in range(24)), self.chat(1, 1, 400, 20)
        )
        await asyncio.gather(*(later(self.random.random(), i % 3, 1, 300) for i in range(40)))

    async def wild(self, until: float, workers: int) -> None:
        """`workers` streams: long prompts, schemas, several samples, clients that vanish."""

        async def work() -> None:
            rnd = self.random
            while time.monotonic() < until:
                kind, cancel = rnd.random(), rnd.randrange(1, 60) if rnd.random() < 0.15 else 0
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                    if kind < 0.5:
                        await self.chat(rnd.randrange(3), 2, rnd.choice([8, 60, 200]), cancel)
                    elif kind < 0.7:
                        words = " ".join(rnd.choice(QUESTIONS) for _ in range(rnd.randrange(50, 250)))
                        await self.ask([{"role": "user", "content": words}], rnd.choice([1, 40, 150]), cancel)
                    elif kind < 0.78:
                        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
                        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
                        await self.chat(rnd.randrange(3), 1, 40, cancel, response_format=form)
                    elif kind < 0.84:
                        await self.chat(rnd.randrange(3), 1, 60, cancel, n=2)
                    else:
                        await self.ask(
                            [{"role": "user", "content": rnd.choice(QUESTIONS)}], 300, cancel, ignore_eos=True
                        )

        await asyncio.gather(*(work() for _ in range(workers)))


async def truth(out: Path, configs: Path, seconds: float, shapes: list[str], steps: int) -> None:
    """Runs the loads, and prints what the comparisons found."""
    servers = []
    for i, shape in enumerate(shapes):
        options = sizes("8B", 64, 2048, 8192, 1200) if shape == "8B" else sizes("tiny", 24, 512, 4096, 300)
        servers.append(Server(f"truth-{shape.lower()}-{i}", shape, 8000 + 10 * i, options, recorded=True, check=True))
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
            page = urllib.request.urlopen(f"{server.url}/metrics", timeout=5).read()
            (out / f"{server.name}.prom").write_bytes(page)
    finally:
        for client in clients:
            client.kill()
        stop(servers, out)
    for server in servers:
        report = json.loads((out / f"{server.name}.json").read_text())
        print(server.name, json.dumps(report), flush=True)
        for line in compare_metrics(report["totals"], (out / f"{server.name}.prom").read_text()):
            print(f"  {line}", flush=True)
    print(f"{sum(compared(out, servers)):,} steps compared", flush=True)


def compared(out: Path, servers: list[Server]) -> list[int]:
    """Returns, for each server, the steps after which the watcher has compared vLLM's numbers."""
    numbers = []
    for server in servers:
        with contextlib.suppress(OSError, ValueError):
            numbers.append(json.loads((out / f"{server.name}.json").read_text())["comparisons"] // 2)
    return numbers


async def load(server: Server, seconds: float, seed: int) -> None:
    """Runs the clients of one server until the time is over, or until Ctrl+C."""
    until = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        streams = Streams(server, http, seed)
        try:
            if server.shape == "8B":
                await streams.drive()
            await streams.wild(until, 64 if server.shape == "8B" else 30)
        finally:
            print(f"{server.url}: {streams.done} answers, {streams.cancelled} cancelled, {streams.refused} refused")


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


async def closed_loop(server: Server, rows: int, tokens: int, seed: int) -> float:
    """Returns the output tokens per second of `rows` requests that run at once and have random prompts."""
    rnd = random.Random(seed)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one() -> None:
            body = {
                "model": f"Qwen3-{server.shape}", "prompt": [rnd.randrange(1000, 50_000) for _ in range(128)],
                "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            }  # fmt: skip
            async with http.post(f"{server.url}/v1/completions", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    raise SystemExit(f"{server.name} refuses a request: {str(answer)[:400]}")

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(rows)))
        return rows * tokens / (time.perf_counter() - began)


def read_records(url: str) -> None:
    """Reads a snapshot and then the record stream, as the application does, until killed."""
    json.load(urllib.request.urlopen(f"{url}/minitui/snapshot"))
    for line in urllib.request.urlopen(f"{url}/minitui/records"):
        if line.startswith(b"data: "):
            json.loads(line[6:])


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
        asyncio.run(truth(given.out, given.configs, given.seconds, given.servers.split(","), given.steps))
    else:
        shapes = [
            (shape, int(rows), int(tokens)) for shape, rows, tokens in (s.split(":") for s in given.shapes.split(","))
        ]
        asyncio.run(cost(given.out, given.configs, given.seconds, shapes))


if __name__ == "__main__":
    main()
