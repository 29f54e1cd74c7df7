"""Loads the tokenizer of a client while the engine process loads the model: a large one takes half a second."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

_begun: dict[Path, Future[Tokenizer]] = {}  # at most one


def begin(directory: str) -> None:
    """Begin to load the tokenizer of a checkpoint, in a thread."""
    path = Path(directory)
    if path not in _begun:
        _begun.clear()
        executor = ThreadPoolExecutor(1, "tokenizer")
        _begun[path] = executor.submit(_load, path)
        executor.shutdown(wait=False)


def load(directory: str) -> Tokenizer:
    """Returns the tokenizer of a checkpoint. Raises CheckpointError."""
    path = Path(directory)
    begun = _begun.pop(path, None)
    return _load(path) if begun is None else begun.result()


def _load(path: Path) -> Tokenizer:
    from engine.text.tokenizer import Tokenizer  # in the thread

    return Tokenizer(path)
