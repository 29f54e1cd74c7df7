"""Reads files of kept weights. Needs no torch, so a thread reads while the main thread imports torch.

    a line of JSON (name, bytes, sum), zeros up to HEADER bytes, the parameters, each at a multiple of ALIGNED bytes
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.worker.kept_files import KINDS, file_of, limit_bytes
from engine.worker.pages import large_pages

HEADER = 4096  # bytes
ALIGNED = 64  # bytes

_begun: dict[Path, Future[np.ndarray]] = {}  # at most one file


def begin(config: EngineConfig, checkpoint: Path, model: ModelConfig) -> None:
    """Begin to read the file of the weights that an engine needs, if there is such a file. Raises EngineError.

    Does nothing while the kind of weights is "auto", or if the file is being read already.
    """
    kind = config.quantization
    if kind not in KINDS or not config.keep_weights or config.dummy_weights or not limit_bytes():
        return
    path = file_of(config.model or checkpoint.name, checkpoint, model, kind)
    if path not in _begun and path.exists():
        _begun.clear()
        executor = ThreadPoolExecutor(1, "kept weights")
        _begun[path] = executor.submit(_read, path)
        executor.shutdown(wait=False)


def read(path: Path) -> np.ndarray:
    """Returns the parameters of a file as bytes in large pages. Raises OSError, or ValueError if the file is damaged.

    They are copied, because the pages of a mapped file are small ones.
    """
    begun = _begun.pop(path, None)
    return _read(path) if begun is None else begun.result()


def _read(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        head = file.read(HEADER)
        memory = large_pages(max(0, path.stat().st_size - HEADER))
        whole = file.readinto(memory.data) == len(memory)
    try:
        found = json.loads(head.partition(b"\n")[0])
        name, size, total = found["name"], found["bytes"], found["sum"]
    except (ValueError, TypeError, KeyError):
        raise ValueError("its first line is not that of such a file") from None
    if name != path.name:
        raise ValueError("it belongs to other weights")
    if size != path.stat().st_size - HEADER or size % ALIGNED:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, and its first line says {HEADER + size:,}")
    if not whole or sum_of(memory) != total:
        raise ValueError("its contents have changed")
    return memory


def sum_of(memory: np.ndarray) -> int:
    """Returns the sum of all 8-byte numbers, modulo 2^64. This is as quick as memory can be read."""
    return int(memory.view(np.int64).sum())
