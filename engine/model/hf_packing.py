"""Reads the quantization_config of a config.json."""

from __future__ import annotations

from engine.fields import Fields, shown
from engine.model.config import ModelConfig, Packing
from engine.model.hf_schemes import WHERE, format_error, group_size, read_block, read_compressed

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
}  # fmt: skip

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
