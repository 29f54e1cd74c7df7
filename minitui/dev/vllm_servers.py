"""Starts and stops the `vllm serve` processes of bench_vllm.py. Their models have random weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from minitui.vllm.watcher import path_of

ROOT = Path(__file__).resolve().parents[2]
TINY = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_window_layers": 2}  # fmt: skip
START_S = 280.0
KV_BYTES = {"8B": 147_456, "0.6B": 114_688, "tiny": 4_096}  # of one token


@dataclass
class Server:
    """One `vllm serve`."""

    name: str
    shape: str
    port: int
    options: list[str]
    check: bool = False  # the watcher compares its state with vLLM's own numbers
    switched: bool = False  # the recorder goes on and off
    ranks: int = 1  # data parallel
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def telemetry(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    def periods(self, out: Path) -> Path:
        """Returns the file in which vllm_switched.py writes what it measured."""
        return out / f"{self.name}.periods"

    def reports(self, out: Path) -> list[Path]:
        """Returns the files in which the watchers write what they compared."""
        return [path_of(str(out / f"{self.name}.json"), rank) for rank in range(self.ranks)]


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
    if server.ranks > 1:
        command += ["--data-parallel-size", str(server.ranks)]
    if fast:  # without torch.compile a server starts in half the time; decodes still run as CUDA graphs
        command += ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})]
    environment = {
        **os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    if server.check or server.switched:
        kind = "dev.vllm_switched.SwitchedScheduler" if server.switched else "vllm.RecordingScheduler"
        command += ["--scheduler-cls", f"minitui.{kind}"]
        environment["MINITUI_TELEMETRY_PORT"] = str(server.port + 1)
        environment["MINITUI_SWITCHED"] = str(server.periods(out))
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
        for _ in range(100):
            if not server.check or all(report.exists() for report in server.reports(out)):
                break
            time.sleep(0.1)
