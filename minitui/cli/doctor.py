"""`minitui doctor`: lists what this machine can run, and which optional parts are installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from engine.config import EngineConfig
from engine.errors import EngineError, how_to_install
from engine.fields import listed
from engine.process import early_process
from minitui.chat.model_choice import choose_model
from minitui.cli.early import log_path
from minitui.progress import Phases
from minitui.visible import json_text

EXTRAS = {  # module -> (extra, purpose)
    "flash_attn": ("flash", "FlashAttention-4 for prefill on NVIDIA Hopper and Blackwell; used if installed"),
    "llvmlite": ("cpu", "compiled kernels for few tokens on a CPU; used if installed"),
    "fastapi": ("serve", "minitui serve, and minitui chat --connect"),
    "textual_serve": ("web", "minitui chat --web: chat in a browser"),
    "llguidance": ("structured", "answers that follow a JSON schema, a regular expression or a list of choices"),
    "transformers": ("verify", "minitui verify: comparison with transformers, token for token"),
    "triton": ("", "kernels for NVIDIA GPUs, Ampere or newer; part of torch's CUDA builds"),
}
SIZES = {  # model -> its weights, and how many of them are in the embedding and the output matrix
    "Qwen3-0.6B": (0.6e9, 0.16e9), "Qwen3-1.7B": (1.7e9, 0.31e9), "Qwen3-4B": (4.0e9, 0.39e9),
    "Qwen3-8B": (8.2e9, 1.24e9), "Qwen3-32B": (32.8e9, 1.56e9),
}


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
    profile_start: Annotated[
        bool, typer.Option("--profile-start", help="Start a model, and print how long each phase took.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Of --profile-start: as in minitui chat. Default: the bundled model.")
    ] = None,
) -> None:
    """List what this machine can run, and which optional parts are installed; or examine the prefixes of a session.

    \b
      minitui doctor
      minitui doctor --prefix run.jsonl --fail-below 0.8
      minitui doctor --prefix run.trace --markdown
      minitui doctor --prefix http://localhost:8000 --seconds 60
      minitui doctor --profile-start --model Qwen/Qwen3-8B

    With --json, "fits" has the kinds of weights that fit into the memory, each with the least time of a token in ms;
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
    found = examine()
    print(json_text(found, indent=2) if json else "\n".join(report(found)))


async def start_phases(model: str | None) -> list[str]:
    """Starts the model as `minitui chat` does, up to the first token of a first prompt. Returns the phases as lines."""
    log_file = log_path()
    early_process.begin(log_file)
    phases = Phases("Python, imports of the command line")
    phases.begin("engine process: Python and imports")
    from engine.params import SamplingParams
    from engine.process.client import EngineClient

    client = await EngineClient.start(EngineConfig(choose_model(model).name), log_file, phases)
    try:
        phases.begin("a first prompt of 16 tokens, to its first token")
        await anext(aiter(client.submit(list(range(16)), SamplingParams(max_tokens=1))))
        return phases.report()
    finally:
        await client.close()


def examine() -> dict[str, Any]:
    """Returns the findings as plain data. Imports torch, which takes a second or two."""
    import torch

    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name, capability = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
            compute = f"{capability[0]}.{capability[1]}"
            gpus.append({"name": name, "memory_gib": total / 2**30, "free_gib": free / 2**30, "compute": compute})
    memory = _memory_gib()
    largest = max((g["free_gib"] for g in gpus), default=memory)
    models, incomplete = _cached_models()
    modules = {m: _version(m) for m in EXTRAS}
    kinds = _gpu_kinds() if gpus else _cpu_kinds()
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
        # Model -> the kinds of weights that fit, with the milliseconds in which the weights are read (None: unknown).
        "fits": {
            name: {
                kind: None if speed is None else bytes_ / speed * 1e3
                for kind, (inner, outer) in kinds.items()
                if (bytes_ := (numbers - vocabulary) * inner + vocabulary * outer) / 2**30 * 1.15 < largest
            }
            for name, (numbers, vocabulary) in SIZES.items()
        },
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
        some = "" if found["weights"] == "none" else f"; weights of bfloat16 checkpoints are in {found['weights']}"
        lines.append(f"no NVIDIA GPU that torch can use: models run on the CPU, in float32{some}")
    lines += ["", "What runs here:", "  the bundled model: yes  (minitui chat)"]
    for name, fits in found["fits"].items():
        text = ", ".join(kind if ms is None else f"{kind} {ms:.0f} ms" for kind, ms in fits.items())
        lines.append(f"  {name:<12} {text or 'no: the weights do not fit into memory'}")
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
    if newest < 9:
        return "4-bit integers in groups are computed as stored; others are expanded: they need compute capability 9"
    numbers = "8-bit numbers and 4-bit integers in groups are computed as stored"
    return f"{numbers}; others are expanded to bfloat16, or to fp8 if that does not fit"


def largest_memory() -> tuple[float, bool]:
    """Returns the free bytes of the largest GPU and True; without a GPU, the bytes of this machine and False."""
    import torch

    if torch.cuda.is_available():
        return float(max(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))), True
    return _memory_gib() * 2**30, False


def eight_bits() -> bool:
    """Returns True if a GPU of this machine has our kernels for 8-bit weights."""
    return capability() >= (9, 0) and importlib.util.find_spec("triton") is not None


def capability() -> tuple[int, int]:
    """Returns the highest compute capability of this machine's GPUs."""
    import torch

    return max(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))


def _gpu_kinds() -> dict[str, tuple[float, float]]:
    """Like _cpu_kinds, for the GPUs."""
    import torch

    from engine.model.four_bits import Int4Tiles
    from engine.worker.weights.quantised import itemsizes

    kinds = {"bfloat16": "none"} | ({"fp8": "fp8"} if eight_bits() else {})
    if capability() >= (8, 0) and not Int4Tiles.why_not():
        kinds["int4"] = "int4"
    return {name: itemsizes(kind, torch.bfloat16) for name, kind in kinds.items()}


def _bundled_weights() -> str:
    """Returns the kind of weights that the bundled model, a bfloat16 checkpoint, has on this CPU; "none": float32."""
    import torch

    from engine.config import EngineConfig
    from engine.model.hf.config import read_model_config
    from engine.worker.weights.quantised import choose
    from minitui import tutor

    config = read_model_config(tutor.model_dir())
    return choose(EngineConfig(), config, torch.device("cpu"), "float32")[0]


def _cpu_kinds() -> dict[str, tuple[float, float]]:
    """Returns the kinds of weights that this CPU supports, with the bytes of a number in the layers and outside."""
    import torch

    from engine.model.four_bits import Int4Weight
    from engine.worker.weights.quantised import itemsizes

    compiled = importlib.util.find_spec("llvmlite") is not None
    kinds = {"float32": "none", "bf16": "bf16" if compiled else "", "int8": "int8"}
    kinds["int4"] = "" if Int4Weight.why_not() else "int4"
    return {name: itemsizes(kind, torch.float32) for name, kind in kinds.items() if kind}


def cpu_read_speed() -> float:
    """Returns the bytes of memory that the engine's threads read per second."""
    import torch

    from engine.worker.cpu.cores import default_threads
    from minitui.bench import limits

    torch.set_num_threads(default_threads())
    return limits.cpu_read_speed()


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


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


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
    from minitui.settings import config_path, data_dir

    return {"Settings": str(config_path()), "Chats and logs": str(data_dir())}
