"""Writes a GGUF file with a model's shape and random weights, for llama.cpp. Speed depends only on shape and type."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.model.config import ModelConfig

ARCHITECTURES = {  # those whose tensors the writer knows
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
TYPES = {"none": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}  # kind of weights -> the nearest type in GGUF
BITS = {"F32": 32.0, "BF16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5}  # of a weight, with its share of the scale
DIFFERENT_ROWS = 64  # a matrix repeats so many random rows


def family(config: ModelConfig) -> str | None:
    """Returns the model's architecture in GGUF; None if the writer does not know it."""
    return None if config.experts or config.packing else ARCHITECTURES.get(config.architecture)


def file_bytes(config: ModelConfig, type_name: str) -> int:
    """Returns about how large the file becomes."""
    return round(config.num_parameters * BITS[type_name] / 8)


def write_gguf(config: ModelConfig, type_name: str, path: Path) -> None:
    """Writes the file. `type_name`: of all matrices, a value of TYPES. Needs the package gguf."""
    import gguf
    from gguf.quants import quantize

    kind, name = gguf.GGMLQuantizationType[type_name], family(config)
    assert name is not None
    writer: Any = gguf.GGUFWriter(str(path), name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(0)

    @cache  # the matrices of all layers are the same, so the file needs little memory and time
    def random(rows: int, columns: int) -> np.ndarray:
        values = rng.standard_normal((min(rows, DIFFERENT_ROWS), columns), dtype=np.float32) * np.float32(0.02)
        few = quantize(values, kind)
        return np.resize(few, (rows, few.shape[1]))

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random(rows, columns), raw_dtype=kind)

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(size, value, dtype=np.float32))

    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrix("token_embd", config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        matrix("output", config.vocab_size, hidden)
    vector("output_norm.weight", hidden)
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        for part, rows in ("q", query), ("k", key), ("v", key):
            matrix(f"{block}.attn_{part}", rows, hidden)
            if config.qkv_bias:
                vector(f"{block}.attn_{part}.bias", rows, 0.0)
        matrix(f"{block}.attn_output", hidden, query)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner)
        for part in "attn_norm", "ffn_norm":
            vector(f"{block}.{part}.weight", hidden)
        if config.qk_norm:
            for part in "attn_q_norm", "attn_k_norm":
                vector(f"{block}.{part}.weight", config.head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
