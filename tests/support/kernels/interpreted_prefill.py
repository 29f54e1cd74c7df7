"""Runs attention of prefill chunks in Triton's interpreter, on the CPU, and prints how far each case is off.

    TRITON_INTERPRET=1 python -m tests.support.kernels.interpreted_prefill

prints one line of JSON: {case: relative error}. In float32: the interpreter cannot multiply bfloat16. Free slots of the
cache, and the scratch memory before a launch, hold NaN.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from triton.runtime import interpreter

from engine.kernels.prefill_attention import PrefillWorkspace, prefill_attention

assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it when it is imported"

D, BLOCK = 16, 16
SINKS = torch.linspace(-3, 5, 6)
# Key heads, query heads of each, (tokens, keys in all) of each chunk, what is special.
CASES: dict[str, tuple[int, int, list[tuple[int, int]], dict[str, Any]]] = {
    "a decode and chunks": (2, 4, [(1, 30), (5, 2100), (17, 640)], {"first": 1}),
    "window": (1, 3, [(40, 1500), (1, 900)], {"window": 600}),
    "cap and sinks": (2, 3, [(9, 5000)], {"softcap": 2.0, "sinks": SINKS}),
    "one key head": (1, 71, [(3, 1200)], {}),
}


def load_masked(self: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
    """The interpreter's load. It gives a condition of a scalar and a tensor the type of an integer."""
    return LOAD(self, pointers, interpreter.TensorHandle(mask.data.astype(bool), mask.dtype), *others, **named)


LOAD = interpreter.InterpreterBuilder.create_masked_load


def worst(
    kv_heads: int, group: int, chunks: list[tuple[int, int]], special: dict[str, Any], splits: int, dense: bool
) -> float:
    """Returns the largest relative error of a chunk's outputs."""
    lengths = torch.tensor([length for _, length in chunks], dtype=torch.int32)
    bounds = torch.tensor([0, *(n for n, _ in chunks)], dtype=torch.int32).cumsum(0).int()
    blocks = int(lengths.max()) // BLOCK + 1
    table = 1 + torch.randperm(len(chunks) * blocks, dtype=torch.int32).view(len(chunks), blocks)
    caches = torch.full((2, len(chunks) * blocks + 1, BLOCK, kv_heads, D), torch.nan)
    qkv = torch.randn(int(bounds[-1]), kv_heads * (group + 2), D)
    q, *own = qkv.split([kv_heads * group, kv_heads, kv_heads], 1)
    texts = []
    for i, (n, length) in enumerate(chunks):
        text = torch.randn(2, length, kv_heads, D)
        text[:, length - n :] = torch.stack([each[bounds[i] : bounds[i + 1]] for each in own])
        at = torch.arange(length)
        caches[:, table[i, at // BLOCK].long(), at % BLOCK] = text
        texts.append(text.double().repeat_interleave(group, 2))
    workspace, out = PrefillWorkspace(kv_heads, D, qkv.device), torch.full((len(q), q[0].numel()), torch.nan)
    workspace.partial.fill_(torch.nan)
    prefill_attention(
        q, caches[0], caches[1], out, workspace, table, lengths, bounds, D**-0.5, max_seq_len=int(lengths.max()),
        dense=(own[0], own[1]) if dense else None, splits=splits, **special,
    )
    assert not workspace.counters.any()
    errors = []
    for i in range(special.get("first", 0), len(chunks)):
        (n, length), (keys, values), where = chunks[i], texts[i], slice(int(bounds[i]), int(bounds[i + 1]))
        scores = torch.einsum("qhd,khd->hqk", q[where].double(), keys) * D**-0.5
        if cap := special.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        of, at = torch.arange(length - n, length)[:, None], torch.arange(length)
        scores = scores.masked_fill((at > of) | (at <= of - special.get("window", length)), -torch.inf)
        sinks = special.get("sinks", torch.full((q.shape[1],), -torch.inf)).double()
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, n, 1)), -1).softmax(-1)[..., :length]
        exact = torch.einsum("hqk,khd->qhd", scores, values)
        errors.append((out[where].view(exact.shape) - exact).norm() / exact.norm())
    return float(torch.stack(errors).max())  # NaN if one is NaN


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreter.InterpreterBuilder.create_masked_load = load_masked
    found = {
        f"{name}, {splits} splits, {dense=}": worst(*case, splits, dense)
        for name, case in CASES.items() for splits in (1, 3, 12, 32) for dense in (False, True)
    }
    print(json.dumps(found))
