"""The cache of weights that were rounded for a CPU (kept_weights.py). Needs no torch."""

from __future__ import annotations

from pathlib import Path

from engine.disk_cache import ROUNDED
from engine.files import checkpoint_files
from engine.model.config import ModelConfig

KINDS = ("int8", "int4")  # of engine/worker/quantised.py; other weights are read as quickly from the checkpoint
REVISION = 3  # increases when the parameters of a decoder, their order or their contents change
WEIGHTS = "weights"  # the file of an entry: the parameters, each at a multiple of ALIGNED bytes
ALIGNED = 64


def entry_name(name: str, checkpoint: Path, model: ModelConfig, kind: str) -> str:
    """Returns the name of the entry of a checkpoint's weights of this kind. `name`: of the model."""
    resolved = [path.resolve() for path in checkpoint_files(checkpoint)]
    files = [(str(path), path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in resolved]
    return ROUNDED.entry_name(f"{Path(name).name}-{kind}", REVISION, files, model, kind)
