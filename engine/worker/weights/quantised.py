"""The kinds of weights (engine/model/linear.py), the choice among them, and the check that a model supports a kind."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model import ops as torch_ops
from engine.model.checkpoint import checkpoint_slots
from engine.model.config import ModelConfig, Packing
from engine.model.decoder import Decoder
from engine.model.experts import Ops
from engine.model.four_bits import GROUP, ROWS, TILE, Int4Tiles, Int4Weight
from engine.model.group import ALONE, Group
from engine.model.linear import BLOCK, PAIRED_ROWS, Bf16Pairs, Bf16Weight, ByteWeight, Fp8Weight, Int8Weight
from engine.model.matrices import Kept
from engine.model.slots import Shapes, kept
from engine.model.weights import tensor_shapes
from engine.worker.cpu.compiled_decoder import CompiledDecoder

KEPT = "checkpoint"  # each matrix as the checkpoint has it: 8-bit numbers with their scales, or a tensor
KINDS: dict[str, type[ByteWeight] | None] = {
    "none": None, "bf16": Bf16Weight, "int8": Int8Weight, "int4": Int4Weight, "fp8": Fp8Weight, KEPT: None,
}
ON_CPU = ("bf16", "int8")
SMALL = {"int8": 8, "int4": 4}  # what "auto" takes if other weights do not fit, the largest first -> bits
KV_WIDTH = "key/value heads times head_dim"
BESIDE_WEIGHTS = 2 << 30  # bytes of memory that `choose` leaves to the KV cache, activations and the application


def weight_class(kind: str, dtype: torch.dtype) -> type[ByteWeight] | None:
    """Returns the class of the layers' matrices for activations of `dtype`; None: tensors. Only GPUs have bfloat16."""
    return Int4Tiles if kind == "int4" and dtype == torch.bfloat16 else KINDS[kind]


def matrices(kind: str, model: ModelConfig, dtype: torch.dtype) -> type[ByteWeight] | None:
    """Like weight_class; the class for int4 takes a checkpoint's 4-bit matrices if they fit."""
    lengths = _row_lengths(model).values()
    in_pairs = kind == "bf16" and not Bf16Pairs.why_not()
    if in_pairs and not any(size % PAIRED_ROWS for size in (*lengths, *_part_widths(model))):
        return Bf16Pairs
    found = weight_class(kind, dtype)
    if model.packing is None or found is None or not issubclass(found, Int4Weight):
        return found
    stored = found.of(model.packing)
    if stored is None or any(size % stored.group for size in lengths):
        return found
    return stored


def itemsizes(kind: str, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the bytes of a number in the matrices of the layers, and in the embedding and the output matrix."""
    if kind == KEPT:
        return Fp8Weight.itemsize, dtype.itemsize
    weights = weight_class(kind, dtype)
    if weights is None:
        return dtype.itemsize, dtype.itemsize
    return weights.itemsize, weights.vocabulary().itemsize


def weight_bytes(
    kind: str, model: ModelConfig, dtype: torch.dtype, group: Group = ALONE, directory: Path | None = None
) -> int:
    """Returns the bytes of the weights that a rank of `group` loads.

    They are counted as the loader makes them: on a decoder without memory, with one layer for each kind of layer. In
    the checkpoint `directory`, some matrices may not be quantised: then all layers are counted, as for models whose
    layers differ in their sizes. None: all of them are.
    """
    if (kind == KEPT and directory is not None) or model.layer_scalars or model.delta is not None:
        return _without_memory(kind, model, dtype, group, directory).nbytes
    sparse = model.experts.layers if model.experts is not None else (False,) * model.num_layers
    total = 0
    for has_experts, count in Counter(sparse).items():
        experts = replace(model.experts, layers=(True,)) if model.experts is not None and has_experts else None
        one = replace(model, num_layers=1, layer_ropes=(), windows=(), experts=experts)
        decoder = _without_memory(kind, one, dtype, group, None)
        layer = sum(slot.view.nbytes for slot in decoder.layers[0].slots(""))
        total += count * layer + (decoder.nbytes - layer if not total else 0)  # the rest is outside the layers
    return total


def _without_memory(kind: str, model: ModelConfig, dtype: torch.dtype, group: Group, directory: Path | None) -> Decoder:
    """Returns the decoder that the loader makes, without memory for its weights."""
    shard = group.shard(model)
    kept = kept_matrices(shard, model, torch_ops, group, directory) if kind == KEPT else None
    return Decoder(shard, dtype, torch.device("meta"), 1, torch_ops, matrices(kind, model, dtype), group, kept)


def choose(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: str) -> tuple[str, str]:
    """Returns (kind of weights, a sentence for the user or ""). Raises EngineError if the kind in `config` cannot run.

    For "auto" on a CPU: int4 or int8 if the checkpoint has such matrices; bf16 if the checkpoint has this type, because
    the weights are exact then and take half the memory and time of float32; int8 if the others do not fit into the free
    memory, and int4 if int8 does not fit either.
    """
    if config.quantization != "auto":
        if config.quantization != "none":
            check(config, model, device, dtype)
        return config.quantization, ""
    if device.type != "cpu":
        return ("none", "") if model.packing is None else _choose_on_gpu(config, model, device, dtype)
    if config.dtype != "auto":
        return "none", ""
    if model.packing is not None and (stored := _as_stored(model, model.packing)):
        with suppress(EngineError):
            check(replace(config, quantization=stored), model, device, dtype)
            return stored, _said_as_stored(stored, model.packing)
    kind = "none"
    exact = model.dtype == "bfloat16" and model.packing is None
    if exact and config.tensor_parallel_size == 1 and config.kv_cache_dtype == "auto":
        compiled = not CompiledDecoder.why_not(model, "bf16", config.block_size)
        paired = model.experts is None and matrices("bf16", model, torch.float32) is Bf16Pairs
        kind = "bf16" if compiled or paired else "none"
    free, wanted = free_memory() - BESIDE_WEIGHTS, weight_bytes(kind, model, torch.float32)
    if wanted <= free:
        return kind, ""
    chosen = kind
    for small in SMALL:
        if chosen == kind or weight_bytes(chosen, model, torch.float32) > free:
            with suppress(EngineError):
                check(replace(config, quantization=small), model, device, dtype)
                chosen = small
    if chosen == kind:
        return kind, ""
    sizes = f"{wanted / 1e9:.1f} GB, and {(free + BESIDE_WEIGHTS) / 1e9:.1f} GB are free"
    return chosen, f"the weights are rounded to {SMALL[chosen]} bits ({chosen}): otherwise they would take {sizes}"


def _as_stored(model: ModelConfig, packing: Packing) -> str:
    """Returns the kind of weights of a CPU that takes the checkpoint's matrices as they are; "" if there is none."""
    if matrices("int4", model, torch.float32) is not Int4Weight:
        return "int4"
    eight = (
        each.strategy in ("tensor", "channel") and each.bits == 8 and each.symmetric and not each.floats
        for each in packing.each
    )
    return "int8" if all(eight) else ""


def _said_as_stored(kind: str, packing: Packing) -> str:
    return (
        f"the checkpoint's {packing.method} weights are computed in {SMALL[kind]} bits ({kind}), as they are stored; "
        "the embedding and the output matrix are rounded to 8 bits"
    )


def _choose_on_gpu(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: str) -> tuple[str, str]:
    """Like `choose`, for a quantised checkpoint: its own numbers; else the 16-bit type, or fp8 if that fits."""
    assert model.packing is not None
    stored = KEPT if matrices("int4", model, torch.bfloat16) is Int4Tiles else "int4"
    why = refusal(replace(config, quantization=stored), model, device, dtype)
    if not why:
        return stored, "" if stored == KEPT else _said_as_stored(stored, model.packing)
    expanded = f"the checkpoint's {model.packing.method} weights are expanded"
    bytes_ = weight_bytes("none", model, torch.bfloat16) // config.tensor_parallel_size
    room = int(torch.cuda.mem_get_info(device)[0] * config.gpu_memory_utilization)
    if bytes_ + BESIDE_WEIGHTS <= room or refusal(replace(config, quantization="fp8"), model, device, dtype):
        return "none", f"{expanded} to {dtype}: {why}"
    sizes = f"they would take {bytes_ / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free"
    return "fp8", f"{expanded}, then rounded to e4m3 with one scale per row: in {dtype} {sizes}"


def refusal(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: str) -> str:
    """Returns the message of the error that `check` raises; "" if it raises none."""
    try:
        check(config, model, device, dtype)
    except EngineError as error:
        return str(error)
    return ""


def free_memory() -> int:
    """Returns the bytes of memory that this process can take without swapping; where unknown, all memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: str) -> None:
    """Raise EngineError if the model cannot use the 8-bit weights of `config` with this device and dtype."""
    kind, cpu, ranks = config.quantization, device.type == "cpu", config.tensor_parallel_size
    if kind in ON_CPU and not cpu:
        raise EngineError(
            f"{kind} weights run on a CPU only, but the device is {device}: use --quantization fp8 or int4, or add "
            "--device cpu"
        )
    if kind == "fp8" and cpu:
        raise EngineError("fp8 weights run on a GPU only, but the device is cpu: use --quantization int8")
    if kind == KEPT:
        check_kept(model, device)
    wanted = "float32" if cpu else "bfloat16"
    if dtype != wanted:
        raise EngineError(f"{kind} weights need {wanted} activations, but the dtype is {dtype}: use {wanted}")
    if ranks > 1 and kind != KEPT and (cpu or kind != "int4"):
        raise EngineError(f"{kind} weights support only one rank, but tensor_parallel_size is {ranks}: use 1")
    if model.experts is not None and kind not in (KEPT, "fp8") and (cpu or kind != "int4"):
        raise EngineError(
            f"{kind} weights support only dense models, but {model.architecture} has experts: use --quantization none"
        )
    if kind == "int4":
        if cpu and (why_not := Int4Weight.why_not()):
            raise EngineError(f"int4 weights need compiled kernels, but {why_not}: use --quantization int8")
        check_four_bits(model, Int4Weight if cpu else Int4Tiles, ranks)
    if cpu:
        return
    found, least = torch.cuda.get_device_capability(device), least_capability(kind, model)
    if found < least:
        raise EngineError(
            f"{kind} weights need a GPU of compute capability {least[0]}.{least[1]} or more, but "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: use --quantization none"
        )
    if importlib.util.find_spec("triton") is None:
        raise EngineError(
            f"{kind} weights need triton, which is not installed: pip install triton, or use --quantization none"
        )
    if kind == "fp8":  # of a checkpoint's own matrices, those whose shapes the kernels lack are expanded, one by one
        check_fp8_sizes(model)


def least_capability(kind: str, model: ModelConfig) -> tuple[int, int]:
    """Returns the lowest compute capability whose tensor cores multiply weights of this kind."""
    floats = kind == "fp8" or (kind == KEPT and model.packing is not None and any(p.floats for p in model.packing.each))
    return (8, 9) if floats else (8, 0)


def check_fp8_sizes(model: ModelConfig) -> None:
    """Raise EngineError if the kernels for fp8 weights do not support the model's shape."""
    check_no_biases("fp8", model)
    wanted = [(name, size, BLOCK) for name, size in _row_lengths(model).items()]
    for name, size, multiple in (*wanted, ("vocab_size", model.vocab_size, 16)):
        if size % multiple:
            raise EngineError(
                f"fp8 weights need {name} to be a multiple of {multiple}, but it is {size:,}: use --quantization none"
            )


def check_no_biases(kind: str, model: ModelConfig) -> None:
    """Raise EngineError if the model's experts have biases: only our kernels for 16 bits have them."""
    if model.experts is not None and model.experts.biases:
        raise EngineError(
            f"{kind} weights do not support experts with biases, which {model.architecture} has: use --quantization "
            "none"
        )


def check_four_bits(model: ModelConfig, kind: type[Int4Weight], ranks: int = 1) -> None:
    """Raise EngineError if the kernels for 4-bit weights of this class do not support the model's shape."""
    other = "none" if kind is Int4Tiles else "int8"
    check_no_biases("int4", model)
    sizes = _row_lengths(model) | {KV_WIDTH: model.num_kv_heads * model.head_dim}
    if kind is Int4Tiles and (delta := model.delta) is not None:
        sizes["the width of a delta rule's keys"] = delta.key_heads * delta.key_dim
        sizes["the width of its values"] = delta.value_heads * delta.value_dim
    for name, size in sizes.items():
        multiple = ROWS if name == KV_WIDTH else GROUP
        if kind is Int4Tiles:
            multiple = TILE if name == "hidden_size" else TILE * ranks
        if size % multiple:
            on = f" on {ranks} GPUs" if ranks > 1 else ""
            raise EngineError(
                f"int4 weights{on} need {name} to be a multiple of {multiple}, but it is {size}: use --quantization "
                f"{other}"
            )


def _row_lengths(model: ModelConfig) -> dict[str, int]:
    """Returns the lengths of the rows of a layer's matrices, by their names in errors."""
    experts, heads = model.experts, model.num_heads * model.head_dim
    sizes = {"hidden_size": model.hidden_size, "heads times head_dim": heads}
    if experts is None or not all(experts.layers):
        sizes["intermediate_size"] = model.intermediate_size
    if experts is not None:
        sizes["the inner size of an expert"] = experts.inner_size
    return sizes


def _part_widths(model: ModelConfig) -> Iterator[int]:
    """Yields the rows of each matrix among those that are computed together: q, k and v."""
    for kv_heads, dim in {model.heads_of(layer) for layer in range(model.num_layers)}:
        yield from (model.num_heads * dim, kv_heads * dim)
    if (delta := model.delta) is not None:
        yield from (delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim)


def check_kept(model: ModelConfig, device: torch.device) -> None:
    """Raise EngineError if a scheme of the checkpoint is none of those that are computed as they are stored."""
    if model.packing is None:
        raise EngineError("the checkpoint is not quantised: leave --quantization at auto")
    for packing in model.packing.each:
        if not packing.floats and packing.strategy not in ("tensor", "channel"):
            raise EngineError(
                "our kernels for integers support 8 bits with one scale for each matrix or row, not packed integers"
            )
        if packing.strategy in ("group", "tensor_group") or packing.bits == 4 or not packing.symmetric:
            raise EngineError("our kernels support 8 bits with a scale per matrix, row or block, and no zero points")
        if not packing.floats and model.experts is not None:
            raise EngineError("our kernels for experts support 8-bit floats, not 8-bit integers")
        if packing.block not in (None, (BLOCK, BLOCK)):
            rows, columns = packing.block or (0, 0)
            raise EngineError(f"our kernels support a scale per {BLOCK} x {BLOCK} block, not per {rows} x {columns}")
    if device.type == "cpu":
        raise EngineError("these products of 8-bit numbers run on a GPU only")


def kept_matrices(shard: ModelConfig, model: ModelConfig, ops: Ops, group: Group, directory: Path | None) -> Kept:
    """Returns the class that holds each quantised matrix unchanged, by name in the decoder; None: it is expanded.
    `shard`: this rank's part of the model. `directory`: the checkpoint; None: one in which all matrices of the layers
    are quantised."""
    assert model.packing is not None
    plain = Decoder(shard, torch.bfloat16, torch.device("meta"), 1, ops, None, group)  # its slots have the shapes
    ours = list(plain.slots())
    slots = list(checkpoint_slots(group.shard_slots(ours, model), model, torch.bfloat16))
    stems = [each.name.removesuffix("weight") for slot in slots for each in (slot, *slot.parts)]
    shapes: Shapes = {f"{stem}weight_scale": [] for stem in stems if stem.endswith("_proj.")}
    return kept(zip(ours, slots, strict=True), model.packing, tensor_shapes(directory) if directory else shapes)


def describe_kept(model: Decoder, found: Kept, dtype: torch.dtype) -> str:
    """Returns a sentence about the quantised matrices of a decoder. `found`: what kept_matrices returned."""
    held = sum(len(slot.parts) or 1 for slot in model.slots() if isinstance(slot.view, ByteWeight))
    text = f"{held:,} matrices are computed in 8 bits, as the checkpoint stores them"
    if held == len(found):
        return text
    name = str(dtype).removeprefix("torch.")
    why = f"the kernels need multiples of {BLOCK} columns (for a scale per block, of rows too)"
    if len(set(found.values())) > 1:
        why += ", and the same kind of scales for q, k and v, for gate and up, and for the experts of a layer"
    return f"{text}; {len(found) - held:,} are expanded to {name}: {why}"
