"""Reads the quantization_config of a config.json. compressed-tensors has one scheme for all matrices, or several."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from engine.errors import CheckpointError
from engine.fields import Fields, shown
from engine.model.config import LINEAR, ModelConfig, Packing, first_match
from engine.model.families import ARCHITECTURES

WHERE = " in its quantization_config"
BYTES = ("tensor", "channel", "block", "group")  # the strategies of numbers that have a byte each
FP4 = ("nvfp4-pack-quantized", "tensor_group"), ("mxfp4-pack-quantized", "group")
MOST_REPETITIONS = 6  # of a target: a hostile one with many takes hours to match
METHODS = {  # quant_method: what is supported
    "fp8": "8-bit floats, with one scale for each block or matrix",
    "compressed-tensors": "8-bit floats, and integers of 4 or 8 bits, with one scale for each matrix, row, block or "
    "group; packed 4- or 8-bit integers, also with `actorder`; 4-bit floats (NVFP4, MXFP4); several of these in one "
    "checkpoint",
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
    "fp_quant": "compressed-tensors", "nvfp4": "compressed-tensors",
}

OWN = {"bitsandbytes": {"load_in_4bit"}, "mlx": {"group_size", "bits"}}  # fields that these write without quant_method


def read_packing(fields: Fields, model: ModelConfig) -> Packing | None:
    """Returns how the matrices of `model` are stored; None if they are plain. Raises CheckpointError."""
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
        return Packing("fp8", floats=True, strategy="block", block=read_block(inner, raw.get("weight_block_size")))
    if method == "awq":
        version = str(raw.get("version") or "gemm").lower()
        if inner.count("bits") != 4 or version != "gemm" or not inner.flag("zero_point", True):
            what = f"version {shown(raw.get('version'))} of awq with {raw['bits']} bits"
            raise format_error(fields, what, "version 'gemm' with 4 bits and zero points")
        return Packing("awq", 4, group_size(inner, raw))
    if method == "gptq":
        if inner.count("bits") not in (4, 8):
            raise inner.refuse("bits", "4 or 8")
        if raw.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            raise inner.refuse("checkpoint_format", "'gptq' or 'gptq_v2'")
        newer = raw.get("checkpoint_format") == "gptq_v2"
        return Packing("gptq", raw["bits"], group_size(inner, raw), version_2=newer, in_order=not raw.get("desc_act"))
    if method == "compressed-tensors":
        return read_compressed(fields, raw, model)
    if method == "modelopt":
        raise format_error(fields, f"quant_algo {shown(raw.get('quant_algo'))} of modelopt", "'FP8'")
    what = f"quant_method {shown(method)}"
    if method is None and (guess := next((name for name, own in OWN.items() if own <= raw.keys()), None)):
        method, what = guess, f"the fields of {guess}"
    nearest = NEAREST.get(method.lower()) if isinstance(method, str) else None
    like = f", and {nearest} is the nearest to it" if nearest else ""
    raise format_error(fields, what, ", ".join(METHODS) + like)


def read_compressed(fields: Fields, raw: dict[str, Any], model: ModelConfig) -> Packing:
    """Returns how the matrices of `model` are stored. Raises CheckpointError. `raw`: the quantization_config."""
    groups = raw.get("config_groups")
    found = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    if not any(each.get("weights") for each in found):
        raise format_error(fields, f"config_groups {shown(groups)}", "groups with weights")
    for key in "sparsity_config", "transform_config":
        other = raw.get(key)
        if other and not (isinstance(other, dict) and other.get("format") == "dense"):
            raise format_error(fields, f"{key} {shown(other)}", "dense matrices without rotations")
    first = found[0]
    if all(each.get(key) == first.get(key) for each in found for key in ("weights", "format")):
        return _scheme(fields, raw, first)
    return Packing("compressed-tensors", schemes=_schemes(fields, raw, found, model))


def _schemes(
    fields: Fields, raw: dict[str, Any], groups: list[dict[str, Any]], model: ModelConfig
) -> tuple[tuple[str, Packing | None], ...]:
    """Returns the scheme of each target in the order of compressed-tensors: names, regular expressions, classes. A
    scheme that is not supported is refused only if `model` has a matrix with it."""
    owners = {target: i for i, group in enumerate(groups) for target in _targets(fields, group, "targets")}
    ordered = sorted(owners, key=lambda target: (target == LINEAR, target.startswith("re:"), target))
    ignored = [(target, -1) for target in _targets(fields, raw, "ignore")]
    indices = [*ignored, *((target, owners[target]) for target in ordered)]
    read: dict[int, Packing | None] = {i: None for i, group in enumerate(groups) if group.get("weights") is None}
    read[-1] = None
    for name in _matrices(model):
        i = first_match(indices, name)
        if i is not None and i not in read:
            read[i] = _scheme(fields, raw, groups[i], f" for {name}")
    for i, group in enumerate(groups):  # of images, or of experts other than the first
        if i not in read:
            with suppress(CheckpointError):
                read[i] = _scheme(fields, raw, group)
    return tuple((target, read.get(i)) for target, i in indices)


def _targets(fields: Fields, raw: dict[str, Any], key: str) -> list[str]:
    targets = raw.get(key) or []
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise Fields(fields.path, raw, WHERE).refuse(key, "a list of names, regular expressions and classes")
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target[3:])
            except (re.error, RecursionError, OverflowError) as error:
                what = f"the target {shown(target)} ({error})"
                raise format_error(fields, what, "regular expressions after 're:'") from None
            if re.search(r"\)[*+{]", target) or len(re.findall("[*+{]", target)) > MOST_REPETITIONS:
                some = f"regular expressions with at most {MOST_REPETITIONS} repetitions and no repeated group"
                raise format_error(fields, f"the target {shown(target)}", some)
    return targets


def _matrices(model: ModelConfig) -> Iterator[str]:
    """Yields the names of the matrices that may be quantised; of a mixture, those of the first expert."""
    arch = ARCHITECTURES[model.architecture]
    qkv = ("qkv_proj",) if arch.fused_qkv else ("q_proj", "k_proj", "v_proj")
    split = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    delta = ("in_proj_qkvz", "in_proj_ba") if arch.fused_delta else split
    inputs = ("gate_up_proj",) if arch.fused_gate_up else ("gate_proj", "up_proj")[not model.gated :]
    for layer in range(model.num_layers):
        experts = model.experts if model.experts is not None and model.experts.layers[layer] else None
        shared = ("mlp.shared_expert",) if experts is not None and experts.shared_size else ()
        mlp = ("mlp" if experts is None else "mlp.experts.0", *shared)
        first = "self_attn", (*qkv, "o_proj")
        if layer in model.state_layers:
            first = "linear_attn", (*delta, "out_proj")
        for owner, leaves in (first, *((each, (*inputs, "down_proj")) for each in mlp)):
            for leaf in leaves:
                parts = f"model.layers.{layer}.{owner}.{leaf}".split(".")
                yield ".".join(arch.names.get(part, part) for part in parts)
    yield "lm_head"


def _scheme(fields: Fields, raw: dict[str, Any], group: dict[str, Any], of: str = "") -> Packing:
    """Returns the scheme of a group with weights. `of`: what has this scheme, for errors."""
    how, form = group.get("weights"), group.get("format") or raw.get("format")
    if not isinstance(how, dict):
        raise Fields(fields.path, group, f"{of}{WHERE}").refuse("weights", "an object")
    inner, strategy, kind = Fields(fields.path, how, f"{of}{WHERE}"), how.get("strategy"), how.get("type")
    bits = inner.count("num_bits")
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        order = how.get("actorder") or ""
        if str(order).lower() not in ("", "weight", "static", "group", "dynamic"):
            what = f"actorder {shown(order)}{of}"
            raise format_error(fields, what, "null, 'static', 'weight', 'group' and 'dynamic'")
        size, in_order = group_size(inner, how) if strategy == "group" else 0, order not in ("group", "dynamic")
        return Packing("compressed-tensors", bits, size, symmetric=inner.flag("symmetric", True), in_order=in_order)
    symmetric, floats = inner.flag("symmetric", True), kind == "float"
    if form in ("float-quantized", "int-quantized", "naive-quantized") and strategy in BYTES and (
        (floats and bits == 8 and symmetric) or (kind == "int" and bits in (4, 8))
    ):
        block = read_block(inner, how.get("block_structure")) if strategy == "block" else None
        size = group_size(inner, how) if strategy == "group" else 0
        return Packing("compressed-tensors", bits, size, floats, strategy, block, symmetric)
    if floats and bits == 4 and symmetric and (form, strategy) in FP4:
        return Packing("compressed-tensors", bits, group_size(inner, how), floats, str(strategy))
    raise format_error(
        fields, f"format {shown(form)} with {bits} bits, strategy {shown(strategy)}{of}",
        "8-bit floats and integers of 4 or 8 bits per tensor, channel, block or group, and 4-bit floats (NVFP4, MXFP4)",
    )


def read_block(inner: Fields, block: Any) -> tuple[int, int]:
    """Returns the rows and columns of a block with one scale."""
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise inner.refuse("weight_block_size", "two sizes above 0, such as [128, 128]")
    return block[0], block[1]


def group_size(inner: Fields, raw: dict[str, Any]) -> int:
    """Returns the inputs of a group; 0: all inputs of a row."""
    return 0 if raw.get("group_size") in (None, -1) else inner.count("group_size")


def format_error(fields: Fields, what: str, supported: str) -> CheckpointError:
    """Returns the error for a format that is not supported; it names the ways out."""
    return CheckpointError(
        f"{fields.path} has {what} in its quantization_config: supported are {supported}; use a checkpoint in one of "
        "these, a GGUF file of the model, or its original checkpoint with --quantization int4, or fp8 on a GPU"
    )
