"""Tiny random models for images and text, of each supported architecture, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.models import SMALL, SMALL_EXPERTS, rewrite

TEXT = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 5000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14, "embed_dim": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}
IMAGES: dict[str, tuple[str, bool, dict[str, Any]]] = {  # name: (model_type, tied embeddings, fields of text_config)
    "gemma3": ("gemma3", True, {"sliding_window": 9, "query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4", True, {"sliding_window": 9, "global_head_dim": 32, "num_kv_shared_layers": 0,
                                "hidden_size_per_layer_input": 8,
                                "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma4_unified": ("gemma4_unified", True, {"sliding_window": 9, "global_head_dim": 32,
                                                "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral3": ("mistral3", False, {"model_type": "mistral", "sliding_window": None}),
    "ministral3": ("mistral3", True, {"model_type": "ministral3", "rope_parameters": YARN}),
    "qwen2_vl": ("qwen2_vl", False, {"rope_parameters": MROPE}),
    "qwen2_5_vl": ("qwen2_5_vl", False, {"rope_parameters": MROPE}),
    "qwen3_5": ("qwen3_5", True, {"rope_parameters": {**MROPE}, **DELTA}),
    "qwen3_5_moe": ("qwen3_5_moe", False, {"rope_parameters": {**MROPE}, **DELTA, **SMALL_EXPERTS}),
    "qwen3_vl": ("qwen3_vl", True, {"rope_parameters": MROPE}),
    "qwen3_vl_moe": ("qwen3_vl_moe", False, {"rope_parameters": MROPE, **SMALL_EXPERTS}),
}


def with_images(name: str, **fields: Any) -> Any:
    """Returns the model of transformers in float64. `fields`: more fields of its text_config."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, tied, text = IMAGES[name]
    text = {**TEXT, **text, **fields}
    text |= {"vocab_size_per_layer_input": text["vocab_size"]} if kind == "gemma4" else {}
    vision = {**VISION, "model_type": "pixtral"} if kind == "mistral3" else VISION
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in parameter_name else 0.05))
    return model


def save_layouts(model: Any, directory: Path) -> list[Path]:
    """Write the model with the names of transformers 5, and with names and layouts of the published checkpoint."""
    directories = [directory / "new", directory / "published"]
    for path, original in zip(directories, (False, True), strict=True):
        model.save_pretrained(path, save_original_format=original)
    if model.config.model_type == "qwen3_vl_moe":  # transformers does not write the published layout of its experts
        rewrite(directories[1], lambda tensors: tensors.update(transposed(tensors)))
    return directories


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts that are one tensor of each layer, as [E, in, out]."""
    names = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    return {name: tensors[name].transpose(1, 2).contiguous() for name in names}
