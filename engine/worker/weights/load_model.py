"""Makes the decoder of a rank and fills it: from a checkpoint, from rounded weights kept on disk, or at random."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.config import EngineConfig
from engine.disk_cache import ROUNDED, Damaged
from engine.errors import EngineError
from engine.model.checkpoint import checkpoint_slots
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.experts import Ops
from engine.model.group import Group
from engine.model.weights import dummy_weights, load_weights, next_layers
from engine.progress import Progress
from engine.worker.limits import Limits
from engine.worker.weights.kept_files import ALIGNED, KINDS, WEIGHTS, entry_name, large_pages, read
from engine.worker.weights.quantised import KEPT, describe_kept, kept_matrices, matrices

LEAST = 1 << 26  # bytes; fewer are rounded in a moment


def load_model(
    model_config: ModelConfig, limits: Limits, config: EngineConfig, group: Group, ops: Ops, directory: Path | None,
    on_progress: Progress | None,
) -> tuple[Decoder, tuple[str, ...]]:
    """Returns the decoder of this rank with its weights, and sentences for the user. Raises EngineError. `limits`: with
    the device of this rank. The weights are random if config.dummy_weights."""
    kind, shard = limits.quantization, group.shard(model_config)
    files = None if config.dummy_weights else directory
    if files is not None and model_config.delta is not None and group.size == 1:
        shard = replace(shard, next_layers=next_layers(files))
    kept = kept_matrices(shard, model_config, ops, group, files) if kind == KEPT else None
    how = matrices(kind, model_config, limits.dtype), group, kept

    def make() -> Decoder:
        return Decoder(shard, limits.dtype, limits.device, limits.max_model_len, ops, *how)

    def fill(model: Decoder) -> None:
        slots = group.shard_slots(model.slots(), model_config)
        if config.dummy_weights:
            dummy_weights(slots, config.seed)
        elif files is None:
            raise EngineError("there is neither a model directory nor dummy_weights: give one of these two options")
        else:
            slots = checkpoint_slots(slots, model_config, limits.dtype)
            load_weights(slots, files, model_config.tie_word_embeddings, on_progress, model_config.packing)

    if kind in KINDS and limits.device.type == "cpu" and config.keep_weights and files is not None:
        name = entry_name(config.model or files.name, files, model_config, kind)
        return load_kept(name, make, fill, on_progress)
    model = in_large_pages(make)[0] if limits.device.type == "cpu" else make()
    fill(model)
    notes = [] if kept is None else [describe_kept(model, kept, limits.dtype)]
    if model.next_token is not None:
        size = f"{model.next_token.nbytes / 1e9:,.2f} GB"
        notes.append(f"{size} of the weights are layers that predict the token after the next (mtp), not used yet")
    return model, tuple(notes)


def load_kept(
    name: str, make: Callable[[], Decoder], fill: Callable[[Decoder], None], on_progress: Progress | None = None
) -> tuple[Decoder, tuple[str, ...]]:
    """Returns what `make` returns, with parameters from the entry `name`, and sentences for the user. If there is no
    entry, or it is damaged, `fill` must fill the parameters, and they are kept: the file of an entry holds them as they
    are in memory. A decoder makes them in the same order at each start, so they need no names."""
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


class Parameters(TorchFunctionMode):
    """Within this context, empty tensors take their memory from `memory`; if that is None, they are only collected."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.tensors: list[torch.Tensor] = []
        self.end = 0  # bytes from the first parameter to the end of the last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.empty_like):
            return func(*args, **kwargs)
        tensor = func(*args, **(kwargs if self._memory is None else {**kwargs, "device": "meta"}))
        begin, self.end = self.end, aligned(self.end + tensor.nbytes)
        if self._memory is not None:
            if self.end > len(self._memory):
                raise ValueError(f"it has {len(self._memory):,} bytes, and the model needs more")
            tensor = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.tensors.append(tensor)
        return tensor


def aligned(end: int) -> int:
    return -(-end // ALIGNED) * ALIGNED


def in_large_pages(make: Callable[[], Decoder]) -> tuple[Decoder, Parameters]:
    """Returns what `make` returns, with uninitialised parameters in large pages, and the parameters."""
    with Parameters() as counted:
        make()  # takes addresses only: memory that is never written has no pages
    with Parameters(torch.from_numpy(large_pages(counted.end))) as made:
        return make(), made
