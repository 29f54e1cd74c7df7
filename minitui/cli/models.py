"""`minitui models`: lists the models in the local Hugging Face cache, and says which of them run here."""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.disk_cache import ROUNDED, UNPACKED, size_of
from engine.errors import EngineError
from engine.fields import listed
from engine.files import checkpoint_files
from engine.hub.cache import Snapshot, cache_directory, cached_snapshots
from engine.hub.gguf_files import cached
from minitui.visible import json_text, visible_line

if TYPE_CHECKING:
    from engine.model.config import ModelConfig

KEPT = {"rounded weights": ROUNDED, "unpacked GGUF files": UNPACKED}
NO_TOKENIZER = "no: it has no tokenizer.json; save one there with save_pretrained(…) of transformers"
MARGIN = 1.15  # memory that a model takes, as a multiple of its weights


@dataclass(frozen=True)
class Model:
    """A model in the cache. `runs`: "yes", or why not."""

    name: str
    revision: str
    size: int | None  # bytes of the weights; None: not complete
    architecture: str
    runs: str


def models(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    forget_kept: Annotated[bool, typer.Option("--forget-kept", help="Remove what is kept for later starts.")] = False,
) -> None:
    """List the models in the hub's local cache, and which run here.

    A model of this list starts without the network. Other models are downloaded when they are first named:

    \b
      minitui chat --model Qwen/Qwen3-0.6B
      minitui chat --model Qwen/Qwen3-0.6B@main     a branch, a tag or a commit follows the @
      minitui chat --model Org/Name-GGUF/name-Q8_0.gguf     a GGUF file of this list

    Weights that were rounded for a CPU are kept, so that later starts are quicker: at most 20 GB, those used longest
    ago are removed first. MINITUI_KEPT_WEIGHTS_GB changes this limit; 0 keeps none. Of unpacked GGUF files 100 GB are
    kept (MINITUI_UNPACKED_GGUF_GB).
    """
    if forget_kept:
        for cache in KEPT.values():
            if count := cache.remove_all():
                print(f"removed {count} entr{'y' if count == 1 else 'ies'} from {cache.folder}")
        return
    snapshots, files = cached_snapshots(), list(cached().items())
    machine = Machine.here() if snapshots or files else Machine(0.0, 0.0)
    found = [examine(snapshot, machine) for snapshot in snapshots] + [examine_gguf(*pair, machine) for pair in files]
    found.sort(key=lambda model: model.name.lower())
    if json:
        print(json_text([asdict(model) for model in found], indent=2))
    elif not found:
        print(f"no models in {cache_directory()}: minitui chat --model Qwen/Qwen3-0.6B downloads one")
    else:
        rows = [(m.name, m.revision, size(m.size), m.architecture, m.runs) for m in found]
        rows = [("model", "revision", "size", "architecture", "runs here"), *rows]
        name, revision, _, family = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:4])
        for row in rows:
            print(visible_line(f"{row[0]:{name}}  {row[1]:{revision}}  {row[2]:>8}  {row[3]:{family}}  {row[4]}"))
        print(f"{size(sum(m.size or 0 for m in found))} in {cache_directory()}")
    for what, cache in KEPT.items():
        if not json and (kept := cache.entries()):
            print(f"\n{what}, kept in {cache.folder} (minitui models --forget-kept removes them):")
            for entry in reversed(kept):
                print(visible_line(f"  {size(size_of(entry)):>8}  {entry.name}"))


@dataclass(frozen=True)
class Machine:
    """What decides which weights fit here, and how quickly a CPU reads them."""

    gpu_free: float | None  # free bytes of the largest GPU; None: there is no GPU
    read: float  # bytes of memory that the CPU reads per second; not measured if there is a GPU
    capability: tuple[int, int] = (9, 0)  # of this GPU

    @staticmethod
    def here() -> Machine:
        import torch

        if not torch.cuda.is_available():
            return Machine(None, cpu_read_speed())
        free = max(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
        return Machine(free, 0.0, capability())


def examine(snapshot: Snapshot, machine: Machine) -> Model:
    """Returns what is known of a model in the cache."""
    from engine.model.hf.config import read_model_config

    revision = snapshot.refs[0] if snapshot.refs else snapshot.commit[:7]
    bytes_ = None if snapshot.missing else sum(path.stat().st_size for path in checkpoint_files(snapshot.path))
    try:
        config = read_model_config(snapshot.path)
    except EngineError as error:
        return Model(snapshot.repository, revision, bytes_, "–", f"no: {error}")
    family = config.architecture.removesuffix("ForCausalLM")
    if bytes_ is None:
        why = f"no: {listed(list(snapshot.missing))} missing; the next start with it downloads the rest"
        return Model(snapshot.repository, revision, None, family, why)
    try:
        runs = fit(config, machine, snapshot.path) if (snapshot.path / "tokenizer.json").is_file() else NO_TOKENIZER
    except EngineError as error:
        runs = f"no: {error}"
    return Model(snapshot.repository, revision, bytes_, family, runs)


def examine_gguf(name: str, file: Path, machine: Machine) -> Model:
    """Returns what is known of a GGUF file in the cache."""
    from engine.gguf.checkpoint import read_config
    from engine.gguf.header import parts_of

    bytes_, family = file.stat().st_size, "–"
    try:
        bytes_ = sum(part.stat().st_size for part in parts_of(file))
        config = read_config(file)
        family, runs = config.architecture.removesuffix("ForCausalLM"), fit(config, machine)
    except EngineError as error:
        runs = f"no: {error}"
    return Model(name, "GGUF", bytes_, family, runs)


def fit(config: ModelConfig, machine: Machine, checkpoint: Path | None = None) -> str:
    """Returns "yes" with the kind of weights that the engine chooses, or what does not fit into memory. On a CPU, also
    the least time of a token: that in which the weights are read. `checkpoint`: its directory; None: one in which all
    matrices of the layers are quantised, if any is."""
    import torch

    from engine.config import EngineConfig
    from engine.worker.weights.quantised import BESIDE_WEIGHTS, choose, free_memory, weight_bytes

    if machine.gpu_free is not None:
        kinds = kinds_on_gpu(config, machine)
        needed = {kind: weight_bytes(kind, config, torch.bfloat16, directory=checkpoint) * MARGIN for kind in kinds}
        least = min(needed.values())
        fits = (kind for kind, bytes_ in needed.items() if bytes_ <= machine.gpu_free)
        no = f"no: its weights take at least {size(round(least))}, and {size(round(machine.gpu_free))} are free"
        return next((kinds[kind] for kind in fits), no)
    kind, _ = choose(EngineConfig(), config, torch.device("cpu"), "float32")
    name, free = "float32" if kind == "none" else kind, free_memory()
    if (needs := weight_bytes(kind, config, torch.float32) + BESIDE_WEIGHTS) > free:
        return f"no: in {name} it takes {size(needs)}, and {size(free)} are free"
    seconds = least_seconds(config, kind, machine.read)
    return f"yes, in {name}: at least {seconds * 1e3:.{1 if seconds < 0.01 else 0}f} ms a token"


def least_seconds(config: ModelConfig, kind: str, read: float) -> float:
    """Returns the seconds of a token of one reply on a CPU that reads so many bytes per second."""
    import torch

    from engine.worker.weights.quantised import itemsizes
    from minitui.bench.limits import Limits, Work

    work = Work.of(config, torch.float32.itemsize, itemsizes(kind, torch.float32))
    return work.decode(Limits(copy=read, read=read, matmul=math.inf, dtype=""), [1])


def kinds_on_gpu(config: ModelConfig, machine: Machine) -> dict[str, str]:
    """Returns the kinds of weights that the GPU can compute, the preferred kind first, and what `fit` says of each."""
    import torch

    from engine.model.four_bits import Int4Tiles
    from engine.worker.weights import quantised
    from engine.worker.weights.quantised import KEPT, least_capability

    packed = config.packing is not None
    kinds = {"none": "yes, expanded to bfloat16" if packed else "yes"}
    if machine.capability >= least_capability("fp8", config):
        with suppress(EngineError):
            quantised.check_fp8_sizes(config)
            kinds["fp8"] = "yes, rounded to 8 bits" if packed else "with --quantization fp8"
    if packed and machine.capability >= least_capability(KEPT, config):
        with suppress(EngineError):
            quantised.check_kept(config, torch.device("cuda"))
            kinds = {KEPT: "yes, in 8 bits as stored"}
    if machine.capability >= least_capability("int4", config):
        with suppress(EngineError):
            quantised.check_four_bits(config, Int4Tiles)
            if quantised.matrices("int4", config, torch.bfloat16) is not Int4Tiles:
                return {"int4": "yes, in 4 bits as stored"}
            kinds["int4"] = "with --quantization int4"
    return kinds


def capability() -> tuple[int, int]:
    """Returns the highest compute capability of this machine's GPUs; without triton (0, 0), as our kernels need it."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return 0, 0
    return max(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))


def cpu_read_speed() -> float:
    """Returns the bytes of memory that the engine's threads read per second."""
    import torch

    from engine.worker.cpu.cores import default_threads
    from minitui.bench import limits

    torch.set_num_threads(default_threads())
    return limits.cpu_read_speed()


def memory_gib() -> float:
    """Returns this machine's memory; 0: unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


def size(bytes_: int | None) -> str:
    """Returns a size for people, as in "1.5 GB"."""
    return "–" if bytes_ is None else f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.1f} MB"


def complete_model(incomplete: str) -> list[str]:
    """Returns the names that a shell offers for --model: models in the cache, GGUF files, directories with a model."""
    names = {snapshot.repository for snapshot in cached_snapshots() if not snapshot.missing} | cached().keys()
    expanded = Path(incomplete).expanduser()
    folder = expanded if incomplete.endswith("/") else expanded.parent
    with suppress(OSError):
        names |= {str(path.parent) for path in folder.glob("*/config.json")}
        names |= {str(path) for path in folder.glob("*.gguf")}
    home = str(Path.home())
    if incomplete.startswith("~/"):
        names = {name.replace(home, "~", 1) if name.startswith(home) else name for name in names}
    return sorted(name for name in names if name.startswith(incomplete))
