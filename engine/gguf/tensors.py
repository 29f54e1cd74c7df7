"""Writes the tensors of a GGUF file as safetensors, with the names and the layout of the family's checkpoint.

A tensor is read, changed and written in pieces, so little memory is needed. Matrices of Q4_0 stay 4-bit numbers, in the
layout of compressed-tensors, except in models with experts. Other quantised numbers become float16, whose rounding is
far finer than the quantisation; those of MXFP4 become bfloat16, which has them exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.errors import CheckpointError, not_installed
from engine.fields import shown
from engine.gguf.config import MOST_LAYERS, OF_ROPE
from engine.gguf.families import NAMES, Family
from engine.gguf.header import Header, Tensor
from engine.model.families import ARCHITECTURES
from engine.progress import Progress

Make = Callable[..., np.ndarray]
# Type in GGUF -> type in safetensors and in numpy; of all others, HALF.
STORED: dict[str, tuple[str, Any]] = {
    "F32": ("F32", np.float32), "F16": ("F16", np.float16), "BF16": ("BF16", np.uint16), "MXFP4": ("BF16", np.uint16),
}
HALF: tuple[str, Any] = ("F16", np.float16)
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I32": 4}
ROWS_OF_A_PIECE = 1_024
BARE = ("sinks", "layer_scalar")  # parameters whose names have no leaf
BLOCK_OF_MXFP4 = 17  # bytes: the exponent, and 32 numbers of 4 bits
BLOCK_OF_Q4_0 = 18  # bytes: the scale in float16, and 32 numbers of 4 bits


@dataclass(frozen=True)
class Output:
    """Tensors of the checkpoint, one after the other. Each piece is made of the same rows of all sources, or of all
    rows of all sources."""

    names: tuple[str, ...]
    kind: str  # the type in safetensors
    shape: tuple[int, ...]  # of each tensor
    sources: tuple[Tensor, ...]
    rows: int = ROWS_OF_A_PIECE
    make: Make = lambda piece: piece
    raw: bool = False  # `make` gets the sources' bytes

    @property
    def nbytes(self) -> int:
        return len(self.names) * math.prod(self.shape) * BYTES[self.kind]


def outputs(header: Header, family: Family, config: dict[str, Any]) -> list[Output]:
    """Returns the tensors of the checkpoint. Raises CheckpointError for a tensor that is unknown to the family."""
    found: list[Output] = []
    experts: dict[tuple[str, str, str], Tensor] = {}
    halves: dict[str, dict[str, Tensor]] = {}  # of the projections of Qwen3-Next's delta rules
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    drafts = header.get(f"{header.get('general.architecture', str)}.nextn_predict_layers", int, 0)
    behind = tuple(f"blk.{config['num_hidden_layers'] + i}." for i in range(min(drafts, MOST_LAYERS)))
    for tensor in header.tensors.values():
        if tensor.name in OF_ROPE or tensor.name.startswith(behind):
            continue
        module, leaf = _decoder_name(header, family, tensor)
        owner = module.rpartition(".")[2]
        module = ".".join(family.arch.names.get(part, part) for part in module.split("."))
        name = (module if owner in BARE or leaf == "scale" else f"{module}.{leaf}",)
        kind, _ = STORED.get(tensor.type, HALF)
        rows, *inner = tensor.shape
        if ".experts." in module:
            if not inner or rows != (config.get("num_experts") or config.get("num_local_experts")):
                raise header.error(f"has {rows} experts in {shown(tensor.name)}, not expert_count: download it again")
            if family.arch.uneven or owner == "gate_up_proj":  # one tensor in the checkpoint, too
                found.append(Output((module,), kind, tensor.shape, (tensor,), 1))
                continue
            if family.arch.clamped:
                experts[module.rpartition(".")[0], owner, leaf] = tensor
                continue
            before, _, after = name[0].partition(".experts.")
            names = tuple(f"{before}.experts.{expert}.{after}" for expert in range(rows))
            found.append(Output(names, kind, tuple(inner), (tensor,), 1))
        elif family.pairs and owner in heads:
            if rows % (2 * heads[owner]):
                raise header.error(f"has {rows} rows in {shown(tensor.name)}, not a multiple of its heads")
            found.append(Output(name, kind, tensor.shape, (tensor,), rows // heads[owner], _halves))
        elif family.arch.fused_delta and owner in ("in_proj_qkv", "in_proj_z"):
            halves.setdefault(module.rpartition(".")[0], {})[owner] = tensor
        elif ".linear_attn." in module or owner == "shared_expert_gate":
            found.append(_of_delta(header, config, Output(name, kind, tensor.shape, (tensor,))))
        elif family.arch.offset_norms and "norm" in owner:
            found.append(Output(name, "F32", tensor.shape, (tensor,), rows, _less_one))
        else:
            found.append(Output(name, kind, tensor.shape, (tensor,)))
    found += [_qkvz(header, config, module, parts) for module, parts in halves.items()]
    found += _clamped(header, experts)
    # A checkpoint whose matrices are 4-bit numbers has none of another kind; experts are stored in any type.
    mixture = any(".experts." in name for output in found for name in output.names)
    return found if mixture else [part for output in found for part in _four_bits(output)]


def _of_delta(header: Header, config: dict[str, Any], output: Output) -> Output:
    """Returns a tensor of a gated delta rule, or the gate of a shared expert, as the checkpoint has it. The converter
    stores -exp(A_log), drops dimensions of 1, and puts the value heads of all key heads in turns: the first of each key
    head, then the second of each. In a checkpoint, those of a key head follow each other."""
    tensor, module = output.sources[0], output.names[0].rpartition(".")[0]
    owner = module.rpartition(".")[2]
    if owner == "shared_expert_gate":
        return replace(output, shape=(1, math.prod(tensor.shape)), rows=tensor.shape[0])
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * keys * config["linear_key_head_dim"] if owner in ("in_proj_qkv", "conv1d") else 0
    rows, each = tensor.shape[0], max(1, values // max(1, keys))

    def in_groups(heads: np.ndarray) -> np.ndarray:
        return heads if fused else heads.reshape(each, keys, -1).swapaxes(0, 1).reshape(heads.shape)

    fused = ARCHITECTURES[config["architectures"][0]].fused_delta
    if owner in ("norm", "in_proj_ba") or (fused and owner == "out_proj"):
        return output
    along = tensor.shape[-1] if owner == "out_proj" else rows - first
    if along <= 0 or values < 1 or along % values or values % keys:
        what = f"{shown(tensor.name)} of {list(tensor.shape)} numbers, for {values} heads"
        raise header.error(f"has a tensor {what}: download it again")
    if owner == "out_proj":
        if tensor.type == "Q4_0" and along // values % 32:
            raise header.error(f"has heads of {along // values} in Q4_0: use its checkpoint in safetensors")
        turns = np.arange(values).reshape(each, keys).T.flatten()
        return replace(output, make=lambda piece: piece.reshape(len(piece), values, -1)[:, turns].reshape(piece.shape))
    log = owner == "A_log"
    name, shape = output.names[0], tensor.shape
    if log or owner == "dt_bias":
        name = module
    if owner == "conv1d":
        shape = (rows, 1, *tensor.shape[1:])

    def make(piece: np.ndarray) -> np.ndarray:
        piece = np.log(-_wide(piece)) if log else piece
        return np.concatenate((piece[:first], in_groups(piece[first:])))

    return replace(output, names=(name,), kind="F32" if log else output.kind, shape=shape, rows=rows, make=make)


def _qkvz(header: Header, config: dict[str, Any], module: str, parts: dict[str, Tensor]) -> Output:
    """Returns the projection of a delta rule of Qwen3-Next: its rows are those of one key head after the other, and the
    converter split them into q, k and v of all heads, and z of all heads."""
    keys, each = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    sizes = [*[config["linear_key_head_dim"]] * 2, *[each * config["linear_value_head_dim"]] * 2]
    sources = tuple(parts[name] for name in ("in_proj_qkv", "in_proj_z") if name in parts)
    if [source.shape[0] for source in sources] != [keys * sum(sizes[:3]), keys * sizes[3]]:
        shapes = [list(source.shape) for source in sources]
        raise header.error(f"has projections of {shapes} for {keys} key heads in {shown(module)}: download it again")
    rows = [np.arange(keys * size).reshape(keys, size) + keys * sum(sizes[:i]) for i, size in enumerate(sizes)]
    order = np.concatenate(rows, 1).flatten()

    def make(*halves: np.ndarray) -> np.ndarray:
        return np.concatenate([half if same else _wide(half) for half in halves])[order]

    same = len({STORED.get(source.type, HALF) for source in sources}) == 1
    kind = STORED.get(sources[0].type, HALF)[0] if same else "F32"
    name = f"{module}.in_proj_qkvz.weight"
    return Output((name,), kind, (len(order), *sources[0].shape[1:]), sources, max(len(order), 1), make)


def four_bits(found: list[Output]) -> dict[str, Any] | None:
    """Returns the quantization_config of the checkpoint's 4-bit matrices; None if there are none."""
    if not any(output.kind == "I32" for output in found):
        return None
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def _four_bits(output: Output) -> list[Output]:
    """Returns the outputs for a matrix of Q4_0: its numbers and its scales. Returns other outputs as they are."""
    tensor, name = output.sources[0], output.names[0]
    module = name.removesuffix("weight")
    outside = module.endswith(("embed_tokens.", "embed_tokens_per_layer.", "lm_head.")) or len(output.sources) > 1
    if tensor.type != "Q4_0" or len(tensor.shape) != 2 or module == name or outside:
        return [output]
    rows, columns = tensor.shape
    parts = (("weight_packed", "I32", 8, _numbers), ("weight_scale", "F16", 32, _scales))
    return [
        replace(
            output, names=(module + leaf,), kind=kind, shape=(rows, columns // each), raw=True,
            make=lambda piece, change=change: output.make(change(piece)),
        )
        for leaf, kind, each, change in parts
    ]


def write(header: Header, found: list[Output], path: Path, on_progress: Progress | None) -> None:
    """Write a safetensors file: the length of the header, the header, and the tensors one after the other."""
    listed: dict[str, Any] = {}
    at = 0
    for output in found:
        for name in output.names:
            if name in listed:
                raise header.error(f"has the tensor {shown(name)} twice: download it again")
            end = at + output.nbytes // len(output.names)
            listed[name] = {"dtype": output.kind, "shape": list(output.shape), "data_offsets": [at, end]}
            at = end
    head = json.dumps(listed).encode()
    head += b" " * (-len(head) % 8)
    done = 0
    with ExitStack() as stack:
        out = stack.enter_context(path.open("wb"))
        sources = {source.path for output in found for source in output.sources}
        files = {each: stack.enter_context(each.open("rb")) for each in sources}
        out.write(len(head).to_bytes(8, "little") + head)
        for output in found:
            whole = output.sources[0].shape[0]
            for first in range(0, whole, output.rows):
                rows = min(output.rows, whole - first)
                counts = [source.shape[0] if rows == whole else rows for source in output.sources]
                read = zip(output.sources, counts, strict=True)
                parts = [_read(files[each.path], each, first, count, output.raw) for each, count in read]
                made = output.make(*parts)
                if made.dtype == np.float16 and output.raw and not np.isfinite(made).all():
                    raise CheckpointError(
                        f"{output.sources[0].path} has scales in {shown(output.names[0])} that are not finite: "
                        "download it again"
                    )
                out.write(np.ascontiguousarray(made).tobytes())
            done += output.nbytes
            if on_progress is not None:
                text = f"unpacking {header.path.name}: {done / 1e9:.2f} of {at / 1e9:.2f} GB"
                on_progress({"stage": "weights", "done": done, "total": at, "text": text})


def _decoder_name(header: Header, family: Family, tensor: Tensor) -> tuple[str, str]:
    """Returns the module that the decoder has for a tensor, and "weight", "bias" or "scale"."""
    module, _, leaf = tensor.name.rpartition(".")
    layer = ""
    if module.startswith("blk.") and module.count(".") == 2:
        _, number, module = module.split(".")
        layer = f"model.layers.{number}."
    if leaf == "ssm_a":
        module, leaf, layer = leaf, "weight", f"model.layers.{module.removeprefix('blk.')}."
    named = module if leaf in ("weight", "bias") else f"{module}.{leaf}"
    found = family.names.get(named) or NAMES.get(named)
    if found is None:
        raise header.error(
            f"has a tensor {shown(tensor.name)}, unknown to this architecture: use its checkpoint in safetensors"
        )
    return layer + found, leaf


def _clamped(header: Header, experts: dict[tuple[str, str, str], Tensor]) -> list[Output]:
    """Returns the experts of gpt-oss as its checkpoint has them: [E, in, out], where gates and ups alternate. Blocks of
    MXFP4 stay blocks: [E, out, in / 32, 16 bytes], with the exponents in a tensor of their own."""
    found = []
    for (module, owner, leaf), tensor in experts.items():
        sources: tuple[Tensor, ...] = (tensor,)
        name = f"{module}.{owner}{'' if leaf == 'weight' else '_bias'}"
        if owner == "up_proj":
            continue
        if owner == "gate_proj":
            up = experts.get((module, "up_proj", leaf))
            if up is None or (up.shape, up.type) != (tensor.shape, tensor.type):
                raise header.error(f"has no tensor that belongs to {shown(tensor.name)}: download it again")
            sources, name = (tensor, up), name.replace("gate_proj", "gate_up_proj")
        kind, _ = STORED.get(tensor.type, HALF)
        count, out, *inner = tensor.shape
        out *= len(sources)
        if tensor.type == "MXFP4" and inner:
            shape = (count, out, inner[0] // 32)
            found.append(Output((f"{name}_blocks",), "U8", (*shape, 16), sources, 1, _blocks, raw=True))
            found.append(Output((f"{name}_scales",), "U8", shape, sources, 1, _exponents, raw=True))
        else:
            found.append(Output((name,), kind, (count, *inner, out), sources, 1, _transposed))
    return found


def _numbers(rows: np.ndarray) -> np.ndarray:
    """Returns 32-bit words of 8 numbers: GGUF has i and i + 16 of a block in a byte, the checkpoint 2i and 2i + 1."""
    blocks = rows.reshape(len(rows), -1, BLOCK_OF_Q4_0)[..., 2:]
    numbers = np.concatenate((blocks & 15, blocks >> 4), -1)
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).reshape(len(rows), -1).view(np.int32)


def _scales(rows: np.ndarray) -> np.ndarray:
    blocks = rows.reshape(len(rows), -1, BLOCK_OF_Q4_0)[..., :2]
    return blocks.reshape(len(rows), -1).view(np.float16)


def _halves(head: np.ndarray) -> np.ndarray:
    """Returns the rows of a head in the order that rotates the first half with the second half."""
    return head.reshape(len(head) // 2, 2, -1).swapaxes(0, 1)


def _less_one(norm: np.ndarray) -> np.ndarray:
    """Returns the weights of Gemma's norms as its checkpoints have them: the converter adds 1."""
    return _wide(norm) - np.float32(1)


def _wide(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers in float32; those of uint16 are bfloat16."""
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _alternating(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Joins n arrays [1, out, …] to one [1, n · out, …] whose rows alternate."""
    joined = np.stack(parts, 2)
    return joined.reshape(1, -1, *joined.shape[3:])


def _transposed(*parts: np.ndarray) -> np.ndarray:
    """Returns an expert's matrices [1, out, in] as [1, in, out]; biases stay [1, out]."""
    return _alternating(parts).swapaxes(1, -1)


def _blocks(*parts: np.ndarray) -> np.ndarray:
    """Returns the numbers of blocks: GGUF has i and i + 16 in a byte, the checkpoint 2i and 2i + 1."""
    blocks = _alternating(parts).reshape(-1, BLOCK_OF_MXFP4)[:, 1:]
    numbers = np.concatenate((blocks & 15, blocks >> 4), 1)
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _exponents(*parts: np.ndarray) -> np.ndarray:
    return _alternating(parts).reshape(-1, BLOCK_OF_MXFP4)[:, 0]


def _read(file: BinaryIO, tensor: Tensor, first: int, rows: int, raw: bool) -> np.ndarray:
    """Returns rows of a tensor in the type in which they are written, or their bytes."""
    size = tensor.nbytes // tensor.shape[0]
    file.seek(tensor.offset + first * size)
    data = np.frombuffer(file.read(rows * size), np.uint8)
    if len(data) != rows * size:
        raise CheckpointError(f"{tensor.path} ended while {shown(tensor.name)} was read: download it again")
    inner = (rows, *tensor.shape[1:])
    _, stored = STORED.get(tensor.type, HALF)
    if raw:
        return data.reshape(*inner[:-1], -1)
    if tensor.type in ("F32", "F16", "BF16"):
        return data.view(stored).reshape(inner)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = _dequantize()(data.reshape(*inner[:-1], -1), tensor.type)
        numbers = numbers if tensor.type == "MXFP4" else numbers.astype(stored)
    if not np.isfinite(numbers).all():
        raise CheckpointError(
            f"{tensor.path} has numbers in {shown(tensor.name)} that are not finite in 16 bits: download it again"
        )
    if tensor.type == "MXFP4":
        return (np.ascontiguousarray(numbers, np.float32).view(np.uint32) >> 16).astype(stored)
    return numbers


def _dequantize() -> Callable[[np.ndarray, str], np.ndarray]:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise CheckpointError(not_installed("reading quantised GGUF files", error, "gguf")) from error
    return lambda data, kind: quants.dequantize(data, GGMLQuantizationType[kind])
