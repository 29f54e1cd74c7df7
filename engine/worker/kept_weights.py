"""Keeps weights that were rounded for a CPU in a file. The next start reads this file instead of rounding again.

A file holds the parameters of a decoder as they are in memory. Its name contains a hash of what they depend on: the
files of the checkpoint (path, size, time of change), the model, the kind of weights, the processor's vectors. A decoder
makes its parameters in the same order at each start, so the file needs no names:

    a line of JSON (key, bytes, sum), zeros up to HEADER bytes, then the parameters, each at a multiple of ALIGNED bytes
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.files import checkpoint_files
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.progress import Progress
from engine.worker.kept_files import LIMIT, SUFFIX, UNFINISHED, directory, limit_bytes, make_room
from engine.worker.parameters import ALIGNED, Parameters, aligned, in_large_pages, large_pages

KINDS = ("int8", "int4")  # of engine/worker/quantised.py; other weights are read as quickly from the checkpoint
REVISION = 1  # increases when the parameters of a decoder, their order or their contents change
HEADER = 4096  # bytes
LEAST = 1 << 26  # bytes; fewer are rounded in a moment


def file_of(name: str, checkpoint: Path, model: ModelConfig, kind: str) -> Path:
    """Returns the file for a checkpoint's weights of this kind. `name`: of the model, to be read by people."""
    resolved = [path.resolve() for path in checkpoint_files(checkpoint)]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in resolved]
    vectors = (platform.machine(), torch.backends.cpu.get_cpu_capability())
    key = hashlib.sha256(repr((REVISION, files, model, kind, vectors)).encode()).hexdigest()[:24]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name)[:64]
    return directory() / f"{label}-{kind}-{key}{SUFFIX}"


def load(
    path: Path, make: Callable[[], Decoder], fill: Callable[[Decoder], None], on_progress: Progress | None = None
) -> tuple[Decoder, tuple[str, ...]]:
    """Returns what `make` returns, with parameters from the file, and sentences for the user.

    If there is no file, or the file is damaged, `fill` must fill the parameters, and the file is written.
    """
    notes: list[str] = []
    limit = limit_bytes()
    if path.exists() and limit:
        try:
            memory = _read(path)
            with Parameters(memory) as taken:
                decoder = make()
            if taken.end != len(memory):
                raise ValueError(f"it has {len(memory):,} bytes, and the model needs {taken.end:,}")
            os.utime(path)
            return decoder, ()
        except (OSError, ValueError) as error:
            notes.append(f"{path} is damaged ({error}): the weights were rounded again")
    decoder, made = in_large_pages(make)
    fill(decoder)
    if limit and made.end >= LEAST:
        if on_progress is not None:
            text = "keeping the rounded weights for the next start"
            on_progress({"stage": "weights", "done": 1, "total": 1, "text": text})
        if why_not := _keep(path, made, limit):
            notes.append(f"the rounded weights are not kept for the next start: {why_not}")
    return decoder, tuple(notes)


def _read(path: Path) -> torch.Tensor:
    """Returns the parameters of a file as one tensor of bytes. Raises OSError or ValueError.

    They are copied, because the pages of a mapped file are small ones.
    """
    with path.open("rb") as file:
        head = file.read(HEADER)
        memory = large_pages(max(0, path.stat().st_size - HEADER))
        whole = file.readinto(memory.numpy().data) == len(memory)
    try:
        found = json.loads(head.partition(b"\n")[0])
        name, size, total = found["name"], found["bytes"], found["sum"]
    except (ValueError, TypeError, KeyError):
        raise ValueError("its first line is not that of such a file") from None
    if name != path.name:
        raise ValueError("it belongs to other weights")
    if size != path.stat().st_size - HEADER or size % ALIGNED:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, and its first line says {HEADER + size:,}")
    if not whole or _sum(memory) != total:
        raise ValueError("its contents have changed")
    return memory


def _mapped(path: Path) -> torch.Tensor:
    """Returns a file without its header as bytes. Changes of the tensor do not reach the file."""
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=HEADER))


def _sum(memory: torch.Tensor) -> int:
    """Returns the sum of all 8-byte numbers, modulo 2^64. This is as quick as memory can be read."""
    return int(memory.view(torch.int64).sum())


def _keep(path: Path, made: Parameters, limit: int) -> str:
    """Write the file, and remove the files that were not used for longest. Returns why not; empty if all went well."""
    folder, size = path.parent, made.end + HEADER
    unfinished = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if size > limit:
            return f"they take {size / 1e9:.1f} GB, and {LIMIT} allows {limit / 1e9:g}"
        make_room(folder, limit - size, path)
        free = shutil.disk_usage(folder).free
        if size > free / 2:
            return f"they take {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free: half of it stays free"
        with tempfile.NamedTemporaryFile(dir=folder, suffix=UNFINISHED, delete=False) as file:
            unfinished = Path(file.name)
            file.write(bytes(HEADER))
            for tensor in made.tensors:
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
                file.write(bytes(aligned(tensor.nbytes) - tensor.nbytes))
        head = {"name": path.name, "bytes": made.end, "sum": _sum(_mapped(unfinished))}
        with unfinished.open("r+b") as file:
            file.write(json.dumps(head).encode() + b"\n")
        unfinished.replace(path)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        return f"{folder} cannot be written ({error}): set XDG_CACHE_HOME to a writable folder"
    return ""
