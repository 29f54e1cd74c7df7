"""Fills the model's fused parameters, tensor by tensor from safetensors files, or with random weights.

The names, shapes and types of all tensors are checked before the first byte is copied. At any time, at most two files
are mapped into memory and one matrix is held, so the host needs little memory besides the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.fields import listed
from engine.files import again, checkpoint_files
from engine.model.config import Packing
from engine.model.four_bits import Int4Weight
from engine.model.linear import ByteWeight, Matrix
from engine.model.packed import Packed, Source, fault, packed
from engine.model.slots import Shapes, Slot, in_checkpoint
from engine.progress import Progress

OF_QUANTISED = ("weight_scale", "_scale_inv", "weight_packed", "qweight", "_blocks", ".SCB", ".absmax")
FIRST = "embed_tokens.weight"
OPENED = 2  # files that stay open: opening one parses a header, which has 4 MB if a model has many experts
NAMED = 3  # tensors that an error lists by name
FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
PACKED_BYTES = FLOAT_BYTES | {"I32": 4, "I64": 8}


def load_weights(
    slots: Iterable[Slot], directory: Path, tied: bool, on_progress: Progress | None = None,
    packing: Packing | None = None,
) -> None:
    """Fill the slots from the safetensors files in `directory`. Raises CheckpointError if the files do not fit. `tied`:
    the embedding is also the output matrix. If the checkpoint has an output matrix too, both must be equal. `packing`:
    how a quantised checkpoint stores its matrices."""
    files = checkpoint_files(directory)
    where, shapes = _where(files)
    wanted = _wanted(slots, shapes, packing)
    total = _check(wanted, files, directory, tied, packing)
    done = 0

    def report(path: Path) -> None:
        if on_progress is not None:
            text = f"{path.name}: {done / 1e9:.2f} of {total / 1e9:.2f} GB"
            on_progress({"stage": "weights", "done": done, "total": total, "text": text})

    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                for slot in wanted.get(plain_name(name), ()):
                    if slot.packed is not None:
                        continue
                    tensor = _read(slot, file, path, name)
                    slot.fill(tensor)
                    done += tensor.nbytes
                    report(path)
    opened = lru_cache(maxsize=OPENED)(_opened)
    for name, several in wanted.items():
        if several[0].packed is not None:
            tensors = _read_packed(several[0], where, opened)
            _fill(several, several[0].packed, tensors)
            done += sum(tensor.nbytes for tensor in tensors.values())
            report(where[next(iter(several[0].packed.names(name)))][0])
    if tied:
        _check_tied(wanted["model.embed_tokens.weight"][0], files)


def expanded_tensors(slots: Iterable[Slot], directory: Path, packing: Packing) -> dict[str, torch.Tensor]:
    """Returns the tensors of a quantised checkpoint by their names, with the matrices expanded, for comparisons."""
    where, shapes = _where(checkpoint_files(directory))
    found: dict[str, torch.Tensor] = {}
    opened = lru_cache(maxsize=OPENED)(_opened)
    for name, (slot, *_) in _wanted(slots, shapes, packing).items():
        if slot.packed is not None:
            found[name] = slot.packed.expand(_read_packed(slot, where, opened))
            for part in slot.packed.names(name):
                where.pop(part, None)
    for name, (path, stored) in where.items():
        if not is_unused(name):
            with _opened(path) as file:
                found[name] = file.get_tensor(stored)
    return found


def dummy_weights(slots: Iterable[Slot], seed: int) -> None:
    """Fill the slots for measurements: norms with 1, all others with normal numbers of standard deviation 0.02. With
    zeros a GPU would need less power and run faster than with a real model."""
    generator: torch.Generator | None = None
    for slot in slots:
        if generator is None:
            generator = torch.Generator(slot.view.device).manual_seed(seed)
        if "norm" in slot.name or "scal" in slot.name:  # weights of norms, and factors
            slot.view.fill_(not slot.name.endswith("bias"))
        elif slot.cut is None:
            slot.view.normal_(0, 0.02, generator=generator)
        else:  # draw the whole tensor, so that the numbers do not depend on the number of ranks
            dtype = torch.float32 if isinstance(slot.view, ByteWeight) else slot.view.dtype
            whole = torch.empty(slot.shape, dtype=dtype, device=slot.view.device)
            slot.view.copy_(slot.take(whole.normal_(0, 0.02, generator=generator)))


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Returns the shapes of all tensors of a checkpoint, by their names."""
    return _where(checkpoint_files(directory))[1]


def next_layers(directory: Path) -> int:
    """Returns the number of layers in a checkpoint's head that predicts the token after the next ("mtp")."""
    return len({name.split(".")[2] for name in tensor_shapes(directory) if name.startswith("mtp.layers.")})


def _where(files: list[Path]) -> tuple[dict[str, tuple[Path, str]], dict[str, list[int]]]:
    """Returns the file of each tensor with its name there, and the shape of each tensor."""
    found: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, list[int]] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                found[plain_name(name)] = path, name
                shapes[plain_name(name)] = file.get_slice(name).get_shape()
    return found, shapes


def _wanted(slots: Iterable[Slot], shapes: Shapes, packing: Packing | None) -> dict[str, list[Slot]]:
    """Returns the slots of each tensor. If the files lack the tensor of a slot, the slot's parts replace the slot."""
    wanted: dict[str, list[Slot]] = {}
    for slot in slots:
        for each in in_checkpoint(slot, shapes):
            stored = None if packing is None else packed(packing, each.name, each.shape, shapes)
            wanted.setdefault(each.name, []).append(replace(each, packed=stored))
    return wanted


def _check(
    wanted: dict[str, list[Slot]], files: list[Path], directory: Path, tied: bool, packing: Packing | None
) -> int:
    """Compare the headers of the files with the slots; return the number of bytes to read."""
    total = 0
    sources = {
        name: source
        for slot, *_ in wanted.values()
        if slot.packed is not None
        for name, source in slot.packed.names(slot.name).items()
    }
    whole = [name for name, (slot, *_) in wanted.items() if slot.packed is None]
    missing = dict.fromkeys((*whole, *(name for name, source in sources.items() if source.required)))
    unexpected: list[str] = []
    misshapen: list[str] = []
    for path in files:
        with _opened(path) as file:
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                name = plain_name(stored)
                source = sources.get(name)
                if source is None and (name not in wanted or wanted[name][0].packed is not None):
                    unused = is_unused(name) or (tied and name == "lm_head.weight")
                    if not unused and not _is_no_bias(file, path, stored, sources):
                        unexpected.append(name)
                    continue
                part = file.get_slice(stored)
                shape, dtype = part.get_shape(), part.get_dtype()
                expected = wanted[name][0].shape if source is None else list(source.shape)
                types = tuple(FLOAT_BYTES) if source is None else source.types
                missing.pop(name, None)
                if shape != expected and not (source is not None and expected == [1] and shape == []):
                    misshapen.append(f"{name} is {shape} and should be {expected}")
                elif dtype not in types:
                    misshapen.append(f"{name} is of type {dtype} and should be one of {', '.join(types)}")
                elif source is None:
                    total += FLOAT_BYTES[dtype] * sum(slot.scalars for slot in wanted[name])
                else:
                    total += PACKED_BYTES.get(dtype, 1) * math.prod(shape)
    faults = []
    if missing:
        faults.append(f"lacks {listed(list(missing), NAMED)}")
    if unexpected:
        faults.append(f"has {listed(unexpected, NAMED)}, unknown to this architecture")
    if misshapen:
        faults.append(f"does not fit config.json ({listed(misshapen, NAMED)})")
    if faults:
        where = files[0] if len(files) == 1 else directory
        way_out = advice(list(missing), unexpected, packing)
        raise CheckpointError(f"the checkpoint {where} {'; it '.join(faults)}: {way_out}")
    return total


def _is_no_bias(file: Any, path: Path, stored: str, sources: Mapping[str, Source]) -> bool:
    """Returns True for a bias of zeros: older versions of AutoGPTQ write one for every quantised matrix."""
    stem, _, leaf = stored.rpartition(".")
    if leaf != "bias" or f"{plain_name(stem)}.qweight" not in sources:
        return False
    with _reading(path, stored):
        return not bool(file.get_tensor(stored).any())


def _check_tied(embedding: Slot, files: list[Path]) -> None:
    for path in files:
        with _opened(path) as file:
            name = next((each for each in file.keys() if plain_name(each) == "lm_head.weight"), None)  # noqa: SIM118
            if name is None:
                continue
            fits = file.get_slice(name).get_shape() == embedding.shape
            head = _read(embedding, file, path, name) if fits else None
            if head is not None and embedding.fold is not None:
                head = embedding.fold(head)
            if head is None or not _equal(head, embedding.view):
                raise CheckpointError(
                    f"{path} has an lm_head.weight that differs from the embedding, but config.json ties them: "
                    "set tie_word_embeddings to false"
                )


def _equal(tensor: torch.Tensor, parameter: Matrix) -> bool:
    """Returns True if loading the tensor would not change the parameter."""
    if isinstance(parameter, ByteWeight):
        values = parameter.rounded(tensor.to(parameter.device))[0]
        return torch.equal(values.view(torch.uint8), parameter.values.view(torch.uint8))
    return torch.equal(tensor.to(parameter.device, parameter.dtype), parameter)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({error}): {again(path)}") from error


def _read(slot: Slot, file: Any, path: Path, name: str) -> torch.Tensor:
    """Returns the part of the tensor `name` of the file that fills the slot's view, before the slot's fold."""
    with _reading(path, name):
        return file.get_tensor(name) if slot.cut is None else slot.take(file.get_slice(name))


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Raises CheckpointError if the tensor `name` of a file cannot be read."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read at {name} ({error}): download it again") from error


def _read_packed(
    slot: Slot, where: dict[str, tuple[Path, str]], opened: Callable[[Path], Any]
) -> dict[str, torch.Tensor]:
    """Returns the tensors in which the slot's matrix is stored, by their suffixes. `opened`: opens a file."""
    assert slot.packed is not None
    tensors = {}
    for name, source in slot.packed.names(slot.name).items():
        if name in where:
            path, stored = where[name]
            with _reading(path, name):
                tensors[source.suffix] = opened(path).get_tensor(stored)
    if (wrong := fault(tensors)) is not None:
        suffix, what = wrong
        name = next(each for each, source in slot.packed.names(slot.name).items() if source.suffix == suffix)
        raise CheckpointError(f"{where[name][0]} has {what} in {name}: download it again")
    return tensors


def _fill(slots: list[Slot], packed: Packed, tensors: dict[str, torch.Tensor]) -> None:
    """Fill the slots of one quantised matrix: as it is stored if the views can hold it, else expanded."""
    groups = whole = None
    if packed.groups is not None and isinstance(slots[0].view, Int4Weight):
        groups = packed.groups({suffix: tensor.to(slots[0].view.device) for suffix, tensor in tensors.items()})
    for slot in slots:
        if groups is not None and slot.at_multiples(groups.size):
            part = groups.part(slot.take).by(slot.in_order)
            part = part if slot.fold is None else replace(part, scales=slot.fold(part.scales))
            if slot.view.take(part):
                continue
        if not slot.fill_stored(tensors):
            whole = packed.expand(tensors) if whole is None else whole
            slot.fill(slot.take(whole))


def plain_name(name: str) -> str:
    """Returns the name that a tensor has in a checkpoint without images: the text model is there the whole model."""
    for prefix, plain in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head") else name


def is_unused(name: str) -> bool:
    """Returns True for tensors without an effect: rotary frequencies, and the parts of a model that read images. Older
    Llama checkpoints have rotary frequencies, but the configuration determines them. `mtp`: the layers of
    decoder.NextToken, which several ranks do not load."""
    parts = (
        "vision_tower.", "multi_modal_projector.", "visual.", "mtp.", "embed_vision.", "embed_audio.", "audio_tower.",
        "vision_embedder.",
    )
    # This engine computes the scales of activations, keys and values itself, if it rounds them at all.
    unused = (
        ".rotary_emb.inv_freq", ".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale",
        ".k_scale", ".v_scale", ".q_scale", ".prob_scale", "k_proj.output_scale", "v_proj.output_scale",
        "q_proj.output_scale",
    )
    return name.endswith(unused) or name.removeprefix("model.").startswith(parts)


def advice(missing: list[str], unexpected: list[str], packing: Packing | None) -> str:
    """Returns what to do about a checkpoint that lacks tensors and has tensors that are not expected."""
    if missing == ["lm_head.weight"] and not unexpected:
        return "download it again, or set tie_word_embeddings to true in config.json if the embedding is this matrix"
    if FIRST in unexpected and f"model.{FIRST}" in missing:
        return (
            "names without 'model.' are those of an embedding model, which does not generate text; use the chat model "
            "of this family"
        )
    if packing is None and any(name.endswith(OF_QUANTISED) for name in unexpected):
        return (
            "these are tensors of a quantised checkpoint, but config.json has no quantization_config: use the "
            "config.json that belongs to them, or another quantisation"
        )
    return "use config.json and weights of the same model"
