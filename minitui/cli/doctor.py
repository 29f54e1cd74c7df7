"""`minitui doctor`: lists what this machine can run, and which optional parts are installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
import textwrap
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.config import EngineConfig
from engine.errors import EngineError, how_to_install
from engine.fields import listed
from minitui.chat.model_choice import choose_model
from minitui.cli.early import log_path
from minitui.cli.models import MARGIN, Machine, cpu_read_speed, kinds_on_gpu, least_seconds, memory_gib
from minitui.progress import Phases
from minitui.visible import json_text

if TYPE_CHECKING:
    from engine.model.config import ModelConfig

EXTRAS = {  # module -> (extra, purpose)
    "flash_attn": ("flash", "FlashAttention-4 for prefill on NVIDIA Hopper and Blackwell; used if installed"),
    "llvmlite": ("cpu", "compiled kernels for few tokens on a CPU; used if installed"),
    "fastapi": ("serve", "minitui serve, and minitui chat --connect"),
    "textual_serve": ("web", "minitui chat --web: chat in a browser"),
    "llguidance": ("structured", "answers that follow a JSON schema, a regular expression or a list of choices"),
    "transformers": ("verify", "minitui verify: comparison with transformers, token for token"),
    "triton": ("", "kernels for NVIDIA GPUs, Ampere or newer; part of torch's CUDA builds"),
}
CARDS = {  # name -> GiB of memory, compute capability
    "RTX 3060": (12, "8.6"), "RTX 3090": (24, "8.6"), "RTX 4060": (8, "8.9"), "RTX 4070": (12, "8.9"),
    "RTX 4090": (24, "8.9"), "RTX 5070": (12, "12.0"), "RTX 5090": (32, "12.0"), "L4": (23, "8.9"), "A100": (79, "8.0"),
    "H100": (79, "9.0"), "H200": (140, "9.0"), "B200": (178, "10.0"),
}
DRIVER_GIB = 1.0  # of a card that is not there: memory that CUDA and loaded kernels take
FEW = 16  # requests at a time, for which the cache is estimated: with more, sampling takes more memory


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Say why requests did not find their beginning in the cache: a log of `minitui proxy`, a recording, "
            "or the URL of a server (minitui serve, or vLLM with minitui's recorder).",
            metavar="FILE|URL",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Of --prefix URL: watch the server for so long. Default: until Ctrl+C.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Of --prefix: print Markdown.")] = False,
    fail_below: Annotated[
        float | None,
        typer.Option(
            min=0, max=1,
            help="Of --prefix: exit with 1 if less than this share of what could have been cached was cached.",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"Say what would run on a card: {', '.join(CARDS)}.", metavar="NAME")
    ] = None,
    profile_start: Annotated[
        bool, typer.Option("--profile-start", help="Start a model, and print how long each phase took.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Of --profile-start: as in minitui chat. Default: the bundled model.")
    ] = None,
) -> None:
    """List what this machine can run, or examine a session's prefixes. The list also has the optional parts.

    \b
      minitui doctor
      minitui doctor --prefix run.jsonl --fail-below 0.8
      minitui doctor --prefix run.trace --markdown
      minitui doctor --prefix http://localhost:8000 --seconds 60
      minitui doctor --profile-start --model Qwen/Qwen3-8B
      minitui doctor --gpu "RTX 4060"

    With --json, "fits" has the kinds of weights that fit into the memory, each with the least time of a token in ms (on
    a CPU), or the tokens of KV cache in 16 and in 8 bits (on a GPU);
    "weights" is the kind that a bfloat16 checkpoint gets by itself ("none": "dtype");
    "modules" has versions. null means not known, or not installed.
    """
    if prefix is not None:
        from minitui.cli.prefix import run_doctor

        raise typer.Exit(run_doctor(prefix, seconds, json, markdown, fail_below))
    if markdown or fail_below is not None or seconds is not None:
        raise EngineError("--markdown, --fail-below and --seconds belong to --prefix")
    if profile_start:
        print("\n".join(asyncio.run(start_phases(model))))
        return
    if gpu is not None and gpu not in CARDS:
        raise EngineError(f"--gpu is {gpu!r}: it must be one of {', '.join(CARDS)}")
    found = examine(gpu)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = (textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False) for line in report(found))
    print(json_text(found, indent=2) if json else "\n".join(lines))


async def start_phases(model: str | None) -> list[str]:
    """Starts the model as `minitui chat` does, up to the first token of a first prompt. Returns the phases as lines."""
    phases = Phases("Python, imports of the command line")
    phases.begin("engine process: Python and imports")
    from engine.params import SamplingParams
    from engine.process.client import EngineClient

    client = await EngineClient.start(EngineConfig(choose_model(model).name), log_path(), phases)
    try:
        phases.begin("a first prompt of 16 tokens, to its first token")
        await anext(aiter(client.submit(list(range(16)), SamplingParams(max_tokens=1))))
        return phases.report()
    finally:
        await client.close()


def examine(card: str | None = None) -> dict[str, Any]:
    """Returns the findings as plain data. `card`: a name in CARDS, as if this machine had this card and no other.
    Imports torch, which takes a second or two."""
    import torch

    gpus: list[dict[str, Any]] = []
    if card is not None:
        size, capability = CARDS[card]
        gpus.append({"name": card, "memory_gib": size, "free_gib": size - DRIVER_GIB, "compute": capability})
    elif torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name, (major, minor) = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
            sizes = {"memory_gib": total / 2**30, "free_gib": free / 2**30}
            gpus.append({"name": name, **sizes, "compute": f"{major}.{minor}"})
    memory = memory_gib()
    models, incomplete = _cached_models()
    modules = {m: _version(m) for m in EXTRAS}
    speed = None if gpus else cpu_read_speed()
    return {
        "minitui": version("minitui") if _installed("minitui") else "not installed",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory,
        "gpus": gpus,
        "ranks": _backends(),
        "device": "cuda" if gpus else "cpu",
        "dtype": "bfloat16" if gpus else "float32",
        "weights": "none" if gpus else _bundled_weights(),
        "modules": modules,
        "read_gb_per_s": None if speed is None else speed / 1e9,
        "fits": _fits_cpu(memory, speed) if speed is not None else _fits_gpu(max(gpus, key=lambda g: g["free_gib"])),
        "terminal": _terminal(),
        "models": models,
        "incomplete_models": incomplete,
        "files": _files(),
    }


def report(found: dict[str, Any]) -> list[str]:
    """Returns the data from `examine` as lines of text."""
    lines = [
        f"minitui {found['minitui']} · Python {found['python']} · torch {found['torch']} · {found['platform']}",
        f"{found['cpu_cores']} CPU cores, {found['memory_gib']:.0f} GiB of memory",
    ]
    for g in found["gpus"]:
        lines.append(
            f"GPU {g['name']}: {g['free_gib']:.0f} of {g['memory_gib']:.0f} GiB free, "
            f"compute capability {g['compute']}"
        )
    if len(found["gpus"]) > 1 and "nccl" in found["ranks"]:
        lines.append(f"--tensor-parallel-size 2 to {len(found['gpus'])} splits a model over several GPUs (NCCL)")
    if not found["gpus"]:
        line = "no NVIDIA GPU that torch can use: models run on the CPU, in float32"
        if found["weights"] != "none":
            line += f"; weights of bfloat16 checkpoints are in {found['weights']} where compiled kernels compute them"
        lines.append(line)
    lines += ["", "What runs here:", "  the bundled model: yes  (minitui chat)"]
    if found["gpus"]:
        what = f"with --max-num-seqs {FEW}, tokens in the KV cache / with --kv-cache-dtype fp8 (estimates)"
        lines.append(f"  others: {what}:")
    room = max((g["free_gib"] for g in found["gpus"]), default=found["memory_gib"])
    for name, fits in found["fits"].items():
        if found["gpus"]:
            text = ", ".join(f"{kind} {wide:,} / {small:,}" for kind, (wide, small) in fits.items())
        else:
            text = ", ".join(f"{kind} {ms:.0f} ms" for kind, ms in fits.items())
        lines.append(f"  {name:<14} {text or f'no: it takes more than {room:.0f} GiB in all kinds of weights'}")
    lines.append("  Quantised checkpoints: " + _quantised(found))
    if (speed := found["read_gb_per_s"]) is not None:
        lines.append(f"  A token of one reply takes at least this time: memory is read at {speed:.0f} GB/s.")
    if found["models"]:
        lines += ["", "Models in the local Hugging Face cache (see minitui models): " + ", ".join(found["models"])]
    if found["incomplete_models"]:
        lines += ["", "Incomplete checkpoints in this cache (--model NAME downloads the missing files):"]
        lines += [f"  {name}: missing {listed(missing)}" for name, missing in found["incomplete_models"].items()]
    lines += ["", "Optional parts:"]
    for module, (extra, purpose) in EXTRAS.items():
        have = found["modules"][module]
        state = have or (f"not installed: {how_to_install(extra)}" if extra else "not installed")
        lines.append(f"  {module:<13} {state}  ({purpose})")
    t = found["terminal"]
    size = f"{t['columns']}×{t['rows']}" + ("" if t["columns"] >= 80 and t["rows"] >= 24 else ": make it 80×24 or more")
    lines += ["", f"Terminal: {size}, {t['colours']} colours, {'UTF-8' if t['utf8'] else 'no UTF-8: use --ascii'}"]
    lines += [f"{name}: {path}" for name, path in found["files"].items()]
    return lines


def _quantised(found: dict[str, Any]) -> str:
    """Returns how this machine computes the weights of quantised checkpoints."""
    if not found["gpus"]:
        stored = "" if found["modules"]["llvmlite"] is None else "4-bit integers in groups are computed as stored; "
        return f"{stored}others are expanded to float32, or rounded if that does not fit"
    newest = max(float(g["compute"]) for g in found["gpus"])
    if found["modules"]["triton"] is None or newest < 8:
        return "their weights are expanded to bfloat16: our products need compute capability 8.0 and triton"
    if newest < 8.9:
        numbers = "integers of 8 bits, and of 4 bits in groups, are computed as stored"
        return f"{numbers}; others are expanded: 8-bit floats need compute capability 8.9"
    numbers = "8-bit numbers and 4-bit integers in groups are computed as stored"
    return f"{numbers}; others are expanded to bfloat16, or to fp8 if that does not fit"


def _shapes() -> dict[str, ModelConfig]:
    """Returns the configurations of models that many people run, by name."""
    from engine.model.hf.config import read_model_config
    from minitui.bench.limits import SIZES, write_config

    with TemporaryDirectory() as folder:
        return {f"Qwen3-{size}": read_model_config(write_config(size, Path(folder))) for size in SIZES}


def _fits_gpu(gpu: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns, for each model and each kind of weights that fits, the tokens of a KV cache in 16 and in 8 bits."""
    from engine.worker.loaded import expected_tokens

    total, free = (round(gpu[name] * 2**30) for name in ("memory_gib", "free_gib"))
    major, minor = map(int, gpu["compute"].split("."))
    machine, few, found = Machine(free, 0.0, (major, minor)), EngineConfig("", max_num_seqs=FEW), {}
    for name, config in _shapes().items():
        tokens = {
            "bfloat16" if kind == "none" else kind: [
                expected_tokens(config, replace(few, quantization=kind, kv_cache_dtype=kv), total, total - free)
                for kv in ("auto", "fp8")
            ]
            for kind in kinds_on_gpu(config, machine)
        }
        found[name] = {kind: (wide, small) for kind, (wide, small) in tokens.items() if small}
    return found


def _bundled_weights() -> str:
    """Returns the kind of weights that the bundled model, a bfloat16 checkpoint, has on this CPU; "none": float32."""
    import torch

    from engine.model.hf.config import read_model_config
    from engine.worker.weights.quantised import choose
    from minitui import tutor

    config = read_model_config(tutor.model_dir())
    return choose(EngineConfig(), config, torch.device("cpu"), "float32")[0]


def _fits_cpu(memory: float, speed: float) -> dict[str, dict[str, float]]:
    """Returns, for each model and each kind of weights that fits, the milliseconds in which a token's weights are read.
    `memory`: GiB. `speed`: bytes of memory that the engine's threads read per second."""
    import torch

    from engine.worker.weights.quantised import refusal, weight_bytes

    def runs(kind: str, config: ModelConfig) -> bool:
        if kind == "bf16" and importlib.util.find_spec("llvmlite") is None:
            return False
        if kind != "none" and refusal(EngineConfig("", quantization=kind), config, torch.device("cpu"), "float32"):
            return False
        return weight_bytes(kind, config, torch.float32) * MARGIN < memory * 2**30

    kinds = {"float32": "none", "bf16": "bf16", "int8": "int8", "int4": "int4"}
    return {
        model: {
            name: least_seconds(config, kind, speed) * 1e3 for name, kind in kinds.items() if runs(kind, config)
        }
        for model, config in _shapes().items()
    }


def _backends() -> list[str]:
    """Returns the torch.distributed backends that ranks can use."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, usable in available.items() if usable]


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _version(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    names = {"flash_attn": ("flash-attn-4", "flash-attn"), "textual_serve": ("textual-serve",)}.get(module, (module,))
    return next((version(name) for name in names if _installed(name)), "unknown version")


def _terminal() -> dict[str, Any]:
    size = shutil.get_terminal_size()
    term, depth = os.environ.get("TERM", ""), os.environ.get("COLORTERM", "")
    colours = "16.7 million" if depth in ("truecolor", "24bit") else "256" if "256" in term else "16"
    if os.environ.get("NO_COLOR"):
        colours = "no"
    return {
        "columns": size.columns, "rows": size.lines, "colours": colours,
        "utf8": "utf" in (sys.stdout.encoding or "").lower(),
    }


def _cached_models() -> tuple[list[str], dict[str, list[str]]]:
    """Returns the complete models in the local cache, and the missing weight files of each incomplete model."""
    from engine.hub.cache import cached_snapshots
    from engine.hub.gguf_files import cached

    snapshots = cached_snapshots()
    whole = {snapshot.repository for snapshot in snapshots if snapshot.complete()}
    partial = {snapshot.repository: list(snapshot.missing) for snapshot in reversed(snapshots)}
    return sorted(whole | cached().keys()), {name: partial[name] for name in sorted(partial.keys() - whole)}


def _files() -> dict[str, str]:
    from minitui.settings import SettingsError, config_path, data_dir, load

    files = {"Settings": str(config_path()), "Chats and logs": str(data_dir())}
    try:
        load()
    except SettingsError as error:
        files["The settings cannot be used"] = str(error)
    return files
