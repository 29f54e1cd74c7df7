"""`minitui models`: lists the models in the local Hugging Face cache, and says which of them run here."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import EngineError
from engine.fields import listed
from engine.files import checkpoint_files
from engine.hub.cache import Snapshot, cache_directory, cached_snapshots
from engine.worker.kept_files import directory, forget, kept_files
from minitui.visible import json_text, visible_line

MARGIN = 1.15  # memory that a model takes, as a multiple of its weights
FOUR_BITS = 0.65  # bytes of a weight in int4, with scales; the embedding and the output matrix are int8
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


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
    forget_kept: Annotated[
        bool, typer.Option("--forget-kept", help="Remove the rounded weights that are kept for later starts.")
    ] = False,
) -> None:
    """List the models in the local Hugging Face cache, and which of them run here.

    A model of this list starts without the network. Other models are downloaded when they are first named:

    \b
      minitui chat --model Qwen/Qwen3-0.6B
      minitui chat --model Qwen/Qwen3-0.6B@main     a branch, a tag or a commit follows the @

    Weights that were rounded for a CPU are kept, so that later starts are quicker: at most 20 GB, those used longest
    ago are removed first. MINITUI_KEPT_WEIGHTS_GB changes this limit; 0 keeps none.
    """
    if forget_kept:
        count = forget()
        print(f"removed {count} file{'' if count == 1 else 's'} from {directory()}")
        return
    snapshots = cached_snapshots()
    memory = Memory.here() if snapshots else Memory(0.0, False)
    found = sorted((examine(snapshot, memory) for snapshot in snapshots), key=lambda model: model.name.lower())
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
    if not json and (kept := kept_files()):
        print(f"\nrounded weights, kept in {directory()} (minitui models --forget-kept removes them):")
        for path in reversed(kept):
            print(visible_line(f"  {size(path.stat().st_size):>8}  {path.name}"))


@dataclass(frozen=True)
class Memory:
    """The free bytes of the largest GPU, or of this machine if there is no GPU."""

    free: float
    on_gpu: bool

    @staticmethod
    def here() -> Memory:
        from minitui.cli.doctor import largest_memory

        return Memory(*largest_memory())


def examine(snapshot: Snapshot, memory: Memory) -> Model:
    """Returns what is known of a model in the cache."""
    from engine.model.hf_config import read_model_config

    revision = snapshot.refs[0] if snapshot.refs else snapshot.commit[:7]
    bytes_ = None if snapshot.missing else weights_size(snapshot.path)
    try:
        config = read_model_config(snapshot.path)
    except EngineError as error:
        return Model(snapshot.repository, revision, bytes_, "–", f"no: {error}")
    family = config.architecture.removesuffix("ForCausalLM")
    if bytes_ is None:
        why = f"no: {listed(list(snapshot.missing))} missing; the next start with it downloads the rest"
        return Model(snapshot.repository, revision, None, family, why)
    return Model(snapshot.repository, revision, bytes_, family, fit(bytes_, ITEMSIZE[config.dtype], memory))


def fit(weights: int, itemsize: int, memory: Memory) -> str:
    """Returns "yes" if weights of this size fit into memory, in which type if not in the usual one, else what to do."""
    parameters = weights / itemsize
    bf16 = itemsize == 2 and importlib.util.find_spec("llvmlite") is not None
    if parameters * (2 if memory.on_gpu else 4) * MARGIN <= memory.free:
        return "yes"
    if not memory.on_gpu and bf16 and parameters * 2 * MARGIN <= memory.free:
        return "yes, in bf16"
    if parameters * MARGIN <= memory.free:
        return "with --quantization fp8" if memory.on_gpu else "yes, in int8"
    from engine.model.four_bits import Int4Weight  # needs torch

    four_bits = not (memory.on_gpu or Int4Weight.why_not())
    smallest = parameters * MARGIN * (FOUR_BITS if four_bits else 1)
    if smallest <= memory.free:
        return "yes, in int4"
    bits = 4 if four_bits else 8
    return f"no: even {bits}-bit weights take {size(round(smallest))}, and {size(round(memory.free))} are free"


def weights_size(directory: Path) -> int:
    """Returns the bytes of a checkpoint's weights."""
    return sum(path.stat().st_size for path in checkpoint_files(directory))


def size(bytes_: int | None) -> str:
    """Returns a size for people, as in "1.5 GB"."""
    return "–" if bytes_ is None else f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.1f} MB"


def complete_model(incomplete: str) -> list[str]:
    """Returns the names that a shell offers for --model: models in the cache, and directories that hold a model."""
    cached = {snapshot.repository for snapshot in cached_snapshots() if not snapshot.missing}
    folder = Path(incomplete).expanduser() if incomplete.endswith("/") else Path(incomplete).expanduser().parent
    try:
        local = {str(path.parent) for path in folder.glob("*/config.json")}
    except OSError:
        local = set()
    return sorted(name for name in cached | local if name.startswith(incomplete))
