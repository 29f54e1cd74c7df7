"""Keeps weights that were rounded for a CPU in a file. The next start reads this file instead of rounding again.

A file holds the parameters of a decoder as they are in memory (engine/worker/kept_reader.py). A decoder makes its
parameters in the same order at each start, so the file needs no names.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.model.decoder import Decoder
from engine.progress import Progress
from engine.worker.kept_files import LIMIT, UNFINISHED, limit_bytes, make_room
from engine.worker.kept_reader import HEADER, read, sum_of
from engine.worker.parameters import Parameters, aligned, in_large_pages

LEAST = 1 << 26  # bytes; fewer are rounded in a moment


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
            memory = torch.from_numpy(read(path))
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
        written = np.memmap(unfinished, dtype=np.uint8, mode="r", offset=HEADER)
        head = {"name": path.name, "bytes": made.end, "sum": sum_of(written)}
        with unfinished.open("r+b") as file:
            file.write(json.dumps(head).encode() + b"\n")
        unfinished.replace(path)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        return f"{folder} cannot be written ({error}): set XDG_CACHE_HOME to a writable folder"
    return ""
