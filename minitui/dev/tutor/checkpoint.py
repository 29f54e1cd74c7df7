"""Writes the checkpoint of a trained model, with its chat template."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from minitui.dev.tutor.network import Network, Shape

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def save(network: Network, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """Writes the checkpoint, with bf16 weights, in the format that transformers and the engine read."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in network.named_parameters()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **asdict(shape),
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True,
        "use_cache": True, "use_sliding_window": False, "dtype": "bfloat16", "initializer_range": 0.02,
        "bos_token_id": None, "eos_token_id": ends[0],
    }  # fmt: skip
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1], "max_new_tokens": 512}
    added = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": True, "lstrip": False, "rstrip": False,
                                            "normalized": False, "single_word": False}
        for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": shape.max_position_embeddings, "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
