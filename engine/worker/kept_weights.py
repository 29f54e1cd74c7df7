"""Keeps weights that were rounded for a CPU (engine/disk_cache.py). The next start reads them instead.

The file of an entry holds the parameters of a decoder as they are in memory. A decoder makes its parameters in the same
order at each start, so they need no names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from engine.disk_cache import ROUNDED, Damaged
from engine.model.decoder import Decoder
from engine.progress import Progress
from engine.worker.kept_files import WEIGHTS
from engine.worker.kept_reader import read
from engine.worker.parameters import Parameters, aligned, in_large_pages

LEAST = 1 << 26  # bytes; fewer are rounded in a moment


def load(
    name: str, make: Callable[[], Decoder], fill: Callable[[Decoder], None], on_progress: Progress | None = None
) -> tuple[Decoder, tuple[str, ...]]:
    """Returns what `make` returns, with parameters from the entry `name`, and sentences for the user.

    If there is no entry, or it is damaged, `fill` must fill the parameters, and they are kept.
    """
    notes: list[str] = []
    keep = ROUNDED.limit() > 0
    try:
        if keep and (memory := read(name)) is not None:
            with Parameters(torch.from_numpy(memory)) as taken:
                decoder = make()
            if taken.end != len(memory):
                raise ValueError(f"it has {len(memory):,} bytes, and the model needs {taken.end:,}")
            return decoder, ()
    except (Damaged, OSError) as error:
        notes.append(f"{error}: the weights were rounded again")
    except ValueError as error:
        notes.append(f"{ROUNDED.folder / name} is of another model ({error}): the weights were rounded again")
        with suppress(OSError):
            ROUNDED.remove(name)
    decoder, made = in_large_pages(make)
    fill(decoder)
    if keep and made.end >= LEAST:
        if on_progress is not None:
            text = "keeping the rounded weights for the next start"
            on_progress({"stage": "weights", "done": 1, "total": 1, "text": text})
        try:
            ROUNDED.keep(name, lambda place: _write(place / WEIGHTS, made), made.end)
        except OSError as error:
            notes.append(
                f"the rounded weights are not kept for the next start ({error}): delete files there, or set "
                "XDG_CACHE_HOME to a writable folder on a larger disk"
            )
    return decoder, tuple(notes)


def _write(path: Path, made: Parameters) -> None:
    with path.open("wb") as file:
        for tensor in made.tensors:
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            file.write(bytes(aligned(tensor.nbytes) - tensor.nbytes))
