"""Reads kept weights. Needs no torch, so a thread reads while the main thread imports torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.disk_cache import ROUNDED
from engine.model.config import ModelConfig
from engine.worker.kept_files import KINDS, WEIGHTS, entry_name
from engine.worker.pages import large_pages

_begun: dict[str, Future[np.ndarray | None]] = {}  # at most one entry


def begin(config: EngineConfig, checkpoint: Path, model: ModelConfig) -> None:
    """Begin to read the entry of the weights that an engine needs, if there is such an entry. Raises EngineError.

    Does nothing while the kind of weights is "auto", or if the entry is being read already.
    """
    kind = config.quantization
    if kind not in KINDS or not config.keep_weights or config.dummy_weights or not ROUNDED.limit():
        return
    name = entry_name(config.model or checkpoint.name, checkpoint, model, kind)
    if name not in _begun:
        _begun.clear()
        executor = ThreadPoolExecutor(1, "kept weights")
        _begun[name] = executor.submit(_read, name)
        executor.shutdown(wait=False)


def read(name: str) -> np.ndarray | None:
    """Returns the parameters of an entry as bytes in large pages; None if there is none. Raises Damaged, or OSError.

    They are copied, because the pages of a mapped file are small ones.
    """
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
