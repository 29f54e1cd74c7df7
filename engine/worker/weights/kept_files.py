"""Finds and reads kept weights: those that were rounded for a CPU (load_model.py keeps them on disk).

This module needs no torch, so a thread reads while the main thread imports torch.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.disk_cache import ROUNDED
from engine.files import checkpoint_files
from engine.model.config import ModelConfig

KINDS = ("int8", "int4")  # of engine/worker/weights/quantised.py; other weights are read as quickly from the checkpoint
REVISION = 3  # increases when the parameters of a decoder, their order or their contents change
WEIGHTS = "weights"  # the file of an entry: the parameters, each at a multiple of ALIGNED bytes
ALIGNED = 64
_begun: dict[str, Future[np.ndarray | None]] = {}  # at most one entry


def entry_name(name: str, checkpoint: Path, model: ModelConfig, kind: str) -> str:
    """Returns the name of the entry of a checkpoint's weights of this kind. `name`: of the model."""
    resolved = [path.resolve() for path in checkpoint_files(checkpoint)]
    files = [(str(path), path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in resolved]
    return ROUNDED.entry_name(f"{Path(name).name}-{kind}", REVISION, files, model, kind)


def begin(config: EngineConfig, checkpoint: Path, model: ModelConfig) -> None:
    """Begin to read the entry of the weights that an engine needs, if there is such an entry. Raises EngineError. Does
    nothing while the kind of weights is "auto", or if the entry is being read already."""
    kind = config.quantization
    if kind not in KINDS or not config.keep_weights or config.dummy_weights or not ROUNDED.limit():
        return
    name = entry_name(config.model or checkpoint.name, checkpoint, model, kind)
    if name not in _begun:
        _begun.clear()
        executor = ThreadPoolExecutor(1, "kept weights")
        _begun[name] = executor.submit(_read, name)
        executor.shutdown(wait=False)


def forget() -> None:
    """Let go of an entry that is not needed: the weights are for a GPU."""
    _begun.clear()


def read(name: str) -> np.ndarray | None:
    """Returns the parameters of an entry as bytes in large pages; None if there is none. Raises Damaged, or OSError.
    They are copied, because the pages of a mapped file are small ones."""
    begun = _begun.pop(name, None)
    return _read(name) if begun is None else begun.result()


def _read(name: str) -> np.ndarray | None:
    entry = ROUNDED.find(name)
    if entry is None:
        return None
    path = entry / WEIGHTS
    memory = large_pages(path.stat().st_size)
    with path.open("rb") as file:
        if file.readinto(memory.data) != len(memory):
            raise OSError(f"{path} became shorter while it was read")
    return memory


def large_pages(size: int) -> np.ndarray:
    """Returns `size` bytes, in large pages where the system has them. A decode step reads all weights, so the processor
    needs the address of every page. Pages of 2 MiB instead of 4 KiB make one row faster
    (engine/kernels/MEASURED.md)."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return np.empty(size, dtype=np.uint8)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel was built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=size)
