"""Reads the quantization_config of a config.json."""

from __future__ import annotations

from typing import Any

from engine.errors import CheckpointError
from engine.fields import Fields, shown
from engine.model.config import Packing

WHERE = " in its quantization_config"
METHODS = {  # quant_method: what is supported
    "fp8": "8-bit floats, with one scale for each block or matrix",
    "compressed-tensors": "8-bit floats or integers, with one scale for each matrix, row or block; packed 4- or 8-bit "
    "integers, also with `actorder`",
    "awq": "4-bit integers, version `gemm`",
    "gptq": "4- or 8-bit integers, also with `desc_act`",
    "modelopt": "`FP8`: 8-bit floats, with one scale for each matrix",
    "mxfp4": "the experts of gpt-oss",
}
NEAREST = {  # quant_method that is not supported -> the method of METHODS whose checkpoints are the most alike
    "bitsandbytes": "awq", "hqq": "awq", "aqlm": "gptq", "vptq": "gptq", "quip": "gptq", "spqr": "gptq", "eetq": "fp8",
    "exl2": "gptq", "exl3": "gptq", "auto-round": "gptq", "intel/auto-round": "gptq", "marlin": "gptq",
    "bitnet": "compressed-tensors", "fbgemm_fp8": "compressed-tensors", "torchao": "compressed-tensors",
    "quanto": "compressed-tensors", "quark": "compressed-tensors", "higgs": "compressed-tensors", "mlx": "awq",
    "fp_quant": "mxfp4", "nvfp4": "mxfp4",
}  # fmt: skip

OWN = {"bitsandbytes": {"load_in_4bit"}, "mlx": {"group_size", "bits"}}  # fields that these write without quant_method


def read_packing(fields: Fields) -> Packing | None:
    """Returns how the checkpoint's matrices are stored; None if they are plain. Raises CheckpointError."""
    raw = fields.raw.get("quantization_config") or fields.raw.get("compression_config")  # of older compressed-tensors
    if not raw and isinstance(fields.raw.get("quantization"), dict):
        raw = fields.raw["quantization"]  # of MLX
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise fields.refuse("quantization_config", "an object")
    inner, method = Fields(fields.path, raw, WHERE), raw.get("quant_method")
    if method == "mxfp4":
        return Packing("mxfp4")
    if (method == "fp8" and raw.get("weight_block_size") is None) or (
        method == "modelopt" and raw.get("quant_algo") == "FP8"
    ):
        return Packing("fp8", floats=True, strategy="tensor")
    if method == "fp8":
        return Packing("fp8", floats=True, strategy="block", block=_block(inner, raw.get("weight_block_size")))
    if method == "awq":
        version = str(raw.get("version") or "gemm").lower()
        if inner.count("bits") != 4 or version != "gemm" or not inner.flag("zero_point", True):
            what = f"version {shown(raw.get('version'))} of awq with {raw['bits']} bits"
            raise _error(fields, what, "version 'gemm' with 4 bits and zero points")
        return Packing("awq", 4, _group(inner, raw))
    if method == "gptq":
        if inner.count("bits") not in (4, 8):
            raise inner.refuse("bits", "4 or 8")
        if raw.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            raise inner.refuse("checkpoint_format", "'gptq' or 'gptq_v2'")
        newer = raw.get("checkpoint_format") == "gptq_v2"
        return Packing("gptq", raw["bits"], _group(inner, raw), version_2=newer, in_order=not raw.get("desc_act"))
    if method == "compressed-tensors":
        return _compressed(fields, raw)
    if method == "modelopt":
        raise _error(fields, f"quant_algo {shown(raw.get('quant_algo'))} of modelopt", "'FP8'")
    what = f"quant_method {shown(method)}"
    if method is None and (guess := next((name for name, own in OWN.items() if own <= raw.keys()), None)):
        method, what = guess, f"the fields of {guess}"
    nearest = NEAREST.get(method.lower()) if isinstance(method, str) else None
    like = f", and {nearest} is the nearest to it" if nearest else ""
    raise _error(fields, what, ", ".join(METHODS) + like)


def _compressed(fields: Fields, raw: dict[str, Any]) -> Packing:
    groups = raw.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    weights = [each.get("weights") for each in found if isinstance(each, dict)]
    if not weights or not isinstance(weights[0], dict) or any(each != weights[0] for each in weights):
        raise _error(fields, f"config_groups {shown(groups)}", "groups with the same weights")
    for key in "sparsity_config", "transform_config":
        other = raw.get(key)
        if other and not (isinstance(other, dict) and other.get("format") == "dense"):
            raise _error(fields, f"{key} {shown(other)}", "dense matrices without rotations")
    how = weights[0]
    inner, strategy, kind = Fields(fields.path, how, WHERE), how.get("strategy"), how.get("type")
    bits = inner.count("num_bits")
    form = raw.get("format")
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        order = how.get("actorder") or ""
        if str(order).lower() not in ("", "weight", "static", "group", "dynamic"):
            raise _error(fields, f"actorder {shown(order)}", "null, 'static', 'weight', 'group' and 'dynamic'")
        size, in_order = _group(inner, how) if strategy == "group" else 0, order not in ("group", "dynamic")
        return Packing("compressed-tensors", bits, size, symmetric=inner.flag("symmetric", True), in_order=in_order)
    whole = form in ("float-quantized", "int-quantized", "naive-quantized") and kind in ("float", "int")
    if whole and bits == 8 and inner.flag("symmetric", True) and strategy in ("tensor", "channel", "block"):
        block = _block(inner, how.get("block_structure")) if strategy == "block" else None
        return Packing("compressed-tensors", floats=kind == "float", strategy=strategy, block=block)
    raise _error(
        fields, f"format {shown(form)} with {bits} bits, strategy {shown(strategy)}",
        "8 bits per tensor, channel or block, and packed integers of 4 or 8 bits",
    )  # fmt: skip


def _block(inner: Fields, block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise inner.refuse("weight_block_size", "two sizes above 0, such as [128, 128]")
    return block[0], block[1]


def _group(inner: Fields, raw: dict[str, Any]) -> int:
    """Returns the inputs of a group; 0: all inputs of a row."""
    return 0 if raw.get("group_size") in (None, -1) else inner.count("group_size")


def _error(fields: Fields, what: str, supported: str) -> CheckpointError:
    return CheckpointError(
        f"{fields.path} has {what} in its quantization_config: supported are {supported}; use a checkpoint in one of "
        "these, a GGUF file of the model, or its original checkpoint with --quantization int4 (CPU) or fp8 (GPU)"
    )
