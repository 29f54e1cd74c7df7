"""A checkpoint in Qwen3's format that calls one tool, and says one sentence once the conversation has a tool's result.

It has one layer. Attention head i looks i + 1 tokens back. So the nearest marker ("assistant", or "</think>" without
thinking; both are the last token but one of a prompt) says how many tokens of the reply exist. The last head has a zero
query: it averages over all tokens, and is above 0 if one is "</tool_response>". Each neuron writes one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.support.paths import QWEN3

HEAD, THETA = 32, 100.0
CONSTANT, MARKER, RESULT, SEEN, CODE, FOUND = 0, 1, 2, 3, slice(4, 12), 12  # the parts of a hidden state
LARGE = 64.0  # the constant: beside it the rest does not change the norm, so normalising divides by LARGE / unit


def scripted(directory: Path, name: str, arguments: dict[str, Any], sentence: str) -> Path:
    """Write the checkpoint, with Qwen3's tokenizer and template, and return its directory."""
    tokenizer = Tokenizer.from_file(str(QWEN3 / "tokenizer.json"))
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    replies = [tokenizer.encode(text + "<|im_end|>").ids for text in (call, sentence)]
    script = [(token, step, seen) for seen, reply in enumerate(replies) for step, token in enumerate(reply)]
    steps = max(map(len, replies))
    heads, width, neurons = steps + 1, FOUND + steps, len(script)
    unit = width**0.5
    config = json.loads((QWEN3 / "configs" / "Qwen3-0.6B.json").read_text()) | {
        "num_hidden_layers": 1, "hidden_size": width, "intermediate_size": neurons, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": HEAD, "rope_theta": THETA, "torch_dtype": "float32",
    }

    embedding = torch.zeros(config["vocab_size"], width)
    embedding[:, CONSTANT] = LARGE
    embedding[[tokenizer.token_to_id("assistant"), tokenizer.token_to_id("</think>")], MARKER] = 1
    embedding[tokenizer.token_to_id("</tool_response>"), RESULT] = 1
    for number, token in enumerate(sorted({token for token, _, _ in script})):
        embedding[token, CODE] = torch.tensor([float((number >> bit & 1) * 2 - 1) for bit in range(8)])

    q, k, v = torch.zeros(heads * HEAD, width), torch.zeros(HEAD, width), torch.zeros(HEAD, width)
    o, gate, up = torch.zeros(width, heads * HEAD), torch.zeros(neurons, width), torch.zeros(neurons, width)
    down = torch.zeros(width, neurons)
    k[:, CONSTANT] = 1
    v[0, MARKER] = v[1, RESULT] = LARGE / unit
    for step in range(steps):  # the key of `step + 1` tokens back is the query, turned back by as many positions
        angles = (step + 1) * THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
        turned = torch.cat([angles.cos() + angles.sin(), angles.cos() - angles.sin()])
        q[step * HEAD : (step + 1) * HEAD, CONSTANT] = turned
        o[FOUND + step, step * HEAD] = 1
    o[SEEN, steps * HEAD + 1] = 1
    for neuron, (token, step, seen) in enumerate(script):  # on if the nearest marker is `step + 1` tokens back
        gate[neuron, FOUND : FOUND + step], gate[neuron, FOUND + step], gate[neuron, CONSTANT] = -2, 1, -0.5 / LARGE
        up[neuron, SEEN if seen else CONSTANT] = 1e8 if seen else 1  # one token of 40,960 outweighs the call
        down[CODE, neuron] = embedding[token, CODE]
    last = torch.zeros(width)
    last[CODE] = 100
    layer = {
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": o,
        "self_attn.q_norm": torch.full((HEAD,), 10.0), "self_attn.k_norm": torch.full((HEAD,), 10.0),
        "mlp.gate_proj": gate * 100 * LARGE / unit, "mlp.up_proj": up, "mlp.down_proj": down,
        "input_layernorm": torch.ones(width), "post_attention_layernorm": torch.ones(width),
    }
    tensors = {f"model.layers.0.{part}.weight": tensor for part, tensor in layer.items()}
    tensors |= {"model.embed_tokens.weight": embedding, "model.norm.weight": last}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / file).symlink_to(QWEN3 / file)
    return directory
