"""Quantises the matrices of a tiny checkpoint, in the layouts of the formats that are published. Each function takes a
matrix [rows, columns] and returns (the tensors by suffix, the matrix that they stand for). They are written from the
formats' descriptions and share no code with engine/model/packed.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
E4M3 = torch.float8_e4m3fn


def words(numbers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Unsigned numbers [n, m] -> int32 [n, m · bits / 32]; number order[i] of a word is at bit i · bits."""
    per_word = 32 // bits
    found = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order or range(per_word)):
        found |= numbers[:, column::per_word].long() << (place * bits)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def fp8_block(matrix: torch.Tensor, block: tuple[int, int] = (16, 24)) -> Stored:
    rows, columns = matrix.shape
    exact = torch.empty_like(matrix)
    stored = torch.empty(rows, columns, dtype=E4M3)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i, j in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
        at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        scales[i, j] = matrix[at].abs().max() / 448
        stored[at] = (matrix[at] / scales[i, j]).to(E4M3)
        exact[at] = stored[at].float() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, exact


def per_row(matrix: torch.Tensor, kind: torch.dtype, whole: bool = False) -> Stored:
    largest = 448.0 if kind == E4M3 else 127.0
    scales = matrix.abs().amax(1, keepdim=True) / largest
    if whole:
        scales = scales.max().view(1)
    numbers = matrix / scales
    stored = numbers.to(E4M3) if kind == E4M3 else numbers.round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales, "input_scale": torch.ones(1)}, stored.float() * scales


def _grouped(matrix: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned numbers [rows, columns], scales and zeros [rows, groups]."""
    parts = matrix.unflatten(1, (-1, group))
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, (1 << bits) - 2)
    numbers = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, (1 << bits) - 1)
    return numbers.flatten(1).int(), scales, zeros.int()


def _dense(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    parts = numbers.unflatten(1, (-1, group)) - zeros[..., None]
    return (parts * scales[..., None]).flatten(1)


def pack_quantized(
    matrix: torch.Tensor, symmetric: bool = True, bits: int = 4, group: int = 16, act_order: bool = False
) -> Stored:
    if act_order:  # groups are of inputs in this order
        order = torch.randperm(matrix.shape[1])
        tensors, dense = pack_quantized(matrix[:, order], symmetric, bits, group)
        back = order.argsort()
        unpacked = torch.stack([tensors["weight_packed"] >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], 2)
        packed = {"weight_packed": words(unpacked.flatten(1)[:, back], bits), "weight_g_idx": (back // group).int()}
        return tensors | packed, dense[:, back]
    numbers, scales, zeros = _grouped(matrix, group, bits)
    if symmetric:
        scales = matrix.unflatten(1, (-1, group)).abs().amax(-1) / ((1 << bits - 1) - 1)
        zeros = torch.full_like(zeros, 1 << bits - 1)
        numbers = (matrix.unflatten(1, (-1, group)) / scales[..., None]).round().flatten(1).int() + (1 << bits - 1)
    shape = torch.tensor(matrix.shape)
    tensors = {"weight_packed": words(numbers, bits), "weight_scale": scales, "weight_shape": shape}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    return tensors, _dense(numbers, scales, zeros, group)


def awq(matrix: torch.Tensor, group: int = 16) -> Stored:
    numbers, scales, zeros = _grouped(matrix, group, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of the output that is at bit 0, 4, 8 …
    tensors = {"qweight": words(numbers.t(), 4, order), "qzeros": words(zeros.t(), 4, order)}
    tensors["scales"] = scales.t().half()
    return {name: each.contiguous() for name, each in tensors.items()}, _dense(numbers, scales, zeros, group)


def gptq(matrix: torch.Tensor, bits: int = 4, group: int = 16, act_order: bool = True, newer: bool = False) -> Stored:
    columns = matrix.shape[1]
    order = torch.randperm(columns) if act_order else torch.arange(columns)  # groups are of inputs in this order
    numbers, scales, zeros = _grouped(matrix[:, order], group, bits)
    back = order.argsort()
    tensors = {
        "qweight": words(numbers[:, back], bits).t(), "qzeros": words((zeros - int(not newer)).t(), bits),
        "scales": scales.t().half(), "g_idx": (back // group).int(),
    }
    return {name: each.contiguous() for name, each in tensors.items()}, _dense(numbers, scales, zeros, group)[:, back]


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "symmetric": True, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def several(groups: list[tuple[dict[str, Any], list[str]]], ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of several schemes. `groups`: that of each scheme alone, and its targets."""
    merged = {
        f"group_{i}": {**config["config_groups"]["group_0"], "targets": targets, "format": config["format"]}
        for i, (config, targets) in enumerate(groups)
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return {**config, "config_groups": merged, "ignore": ignore}


def in_bytes(matrix: torch.Tensor, bits: int, group: int, symmetric: bool) -> Stored:
    """Integers of which each has a byte. `group`: 0: a scale for each row."""
    group = group or matrix.shape[1]
    numbers, scales, zeros = _grouped(matrix, group, bits)
    half = 1 << bits - 1
    if symmetric:
        zeros = torch.full_like(zeros, half)
        scales = matrix.unflatten(1, (-1, group)).abs().amax(-1) / (half - 1)
        numbers = (matrix.unflatten(1, (-1, group)) / scales[..., None]).round().flatten(1).int() + half
    tensors = {"weight": (numbers - half).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - half).to(torch.int8)
    return tensors, _dense(numbers, scales, zeros, group)


def fp4(matrix: torch.Tensor, group: int, nvidia: bool) -> Stored:
    """4-bit floats: sign, two bits of exponent, one of mantissa; two of them in a byte."""
    parts = matrix.unflatten(1, (-1, group))
    wanted = parts.abs().amax(-1) / 6
    tensors = {}
    if nvidia:
        divisor = 448 / wanted.max()
        tensors["weight_scale"], tensors["weight_global_scale"] = (wanted * divisor).to(E4M3), divisor.view(1)
        tensors["input_global_scale"] = torch.ones(1)
        scales = tensors["weight_scale"].float() / divisor
    else:
        exponents = wanted.log2().ceil()
        tensors["weight_scale"], scales = (exponents + 127).to(torch.uint8), 2.0**exponents
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    magnitudes = ((parts / scales[..., None]).abs()[..., None] - values).abs().argmin(-1)
    codes = (magnitudes + 8 * (parts < 0)).flatten(1)
    tensors["weight_packed"] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    signs = torch.where(parts < 0, -1.0, 1.0)
    return tensors, (values[magnitudes] * signs * scales[..., None]).flatten(1)


FP8_ROWS = compressed("float-quantized", type="float", strategy="channel")
INT8_ROWS = compressed("int-quantized", type="int", strategy="channel")
INT4_GROUPS = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=16)
Store = Callable[[torch.Tensor], Stored]

# The format's quantization_config, and what stores a matrix. With several schemes: by a part of the matrix's name; a
# matrix without any stays plain.
FORMATS: dict[str, tuple[dict[str, Any], Store | dict[str, Store]]] = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [16, 24]}, fp8_block),
    "fp8 blocks of 128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda m: fp8_block(m, (128, 128))),
    "fp8 whole": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda m: (lambda t, dense: ({"weight": t["weight"], "weight_scale_inv": t["weight_scale"][0]}, dense))(
            *per_row(m, E4M3, True)
        ),
    ),
    "fp8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {}},
        lambda m: (lambda t, dense: (t | {"weight_scale": t["weight_scale"][0]}, dense))(*per_row(m, E4M3, True)),
    ),
    "fp8 rows": (FP8_ROWS, lambda m: per_row(m, E4M3)),
    "fp8 tensor": (compressed("float-quantized", type="float", strategy="tensor"), lambda m: per_row(m, E4M3, True)),
    "int8 rows": (INT8_ROWS, lambda m: per_row(m, torch.int8)),
    "int8 tensor": (compressed("int-quantized", type="int", strategy="tensor"), lambda m: per_row(m, torch.int8, True)),
    "int4 groups": (INT4_GROUPS, pack_quantized),
    "int4 groups with zeros": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=16, symmetric=False),
        lambda m: pack_quantized(m, False),
    ),
    "int4 groups in another order": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=16, actorder="group"),
        lambda m: pack_quantized(m, act_order=True),
    ),
    "int8 groups": (
        compressed("pack-quantized", type="int", strategy="group", group_size=32),
        lambda m: pack_quantized(m, True, 8, 32),
    ),
    "int8 groups with zeros": (
        compressed("pack-quantized", type="int", strategy="group", group_size=32, symmetric=False),
        lambda m: pack_quantized(m, False, 8, 32),
    ),
    "int8 rows with zeros": (
        compressed("int-quantized", type="int", strategy="channel", symmetric=False),
        lambda m: in_bytes(m, 8, 0, False),
    ),
    "int4 groups in bytes": (
        compressed("int-quantized", type="int", num_bits=4, strategy="group", group_size=32),
        lambda m: in_bytes(m, 4, 32, True),
    ),
    "int4 groups with zeros in bytes": (
        compressed("int-quantized", type="int", num_bits=4, strategy="group", group_size=16, symmetric=False),
        lambda m: in_bytes(m, 4, 16, False),
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        lambda m: fp4(m, 16, True),
    ),
    "mxfp4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        lambda m: fp4(m, 32, False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "GEMM"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}, gptq),
    "gptq in order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda m: gptq(m, 4, 32, False),
    ),
    "gptq 2 with 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "checkpoint_format": "gptq_v2"},
        lambda m: gptq(m, 8, 16, True, True),
    ),
    "fp8 attention and int4 MLPs": (
        several([(FP8_ROWS, ["re:.*self_attn.*"]), (INT4_GROUPS, ["re:.*mlp.*_proj$"])], ["lm_head"]),
        {"self_attn": lambda m: per_row(m, E4M3), "mlp": pack_quantized},
    ),
}


def quantise(model: Any, source: Path, directory: Path, name: str) -> None:
    """Copy a checkpoint with quantised projections; give `model` (transformers) the matrices that these stand for."""
    config, stores = FORMATS[name]
    stores = stores if isinstance(stores, dict) else {"": stores}
    directory.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    tensors = load_file(source / "model.safetensors")
    state = model.state_dict()
    for key in [key for key in tensors if re.search(r"_proj(_\w+)?\.weight", key)]:
        store = next((store for part, store in stores.items() if part in key), None)
        if store is None:
            continue
        stored, dense = store(tensors.pop(key).float())
        _own(state, key).copy_(dense)
        tensors |= {key.removesuffix("weight") + suffix: each.contiguous() for suffix, each in stored.items()}
    model.load_state_dict(state)
    save_file(tensors, directory / "model.safetensors")


def _own(state: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """The matrix of transformers that the checkpoint's tensor `key` stands for: an expert's is a part of a tensor."""
    if key in state:
        return state[key]
    prefix, _, rest = key.partition("experts.")
    expert, leaf, _ = rest.split(".")
    if leaf == "down_proj":
        return state[f"{prefix}experts.down_proj"][int(expert)]
    return state[f"{prefix}experts.gate_up_proj"][int(expert)].chunk(2)[leaf == "up_proj"]


def mxfp4(source: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Copy a gpt-oss checkpoint with random mxfp4 experts; return the experts [E, in, out] by name."""
    directory.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    tensors, dense = load_file(source / "model.safetensors"), {}
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32))
        exponents = torch.randint(120, 126, (experts, outputs, inputs // 32))
        tensors[f"{key}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{key}_scales"] = exponents.to(torch.uint8)
        exact = torch.tensor([*values, *(-value for value in values)])[codes] * 2.0 ** (exponents[..., None] - 127)
        dense[key] = exact.flatten(2).transpose(1, 2)
    save_file(tensors, directory / "model.safetensors")
    return dense
