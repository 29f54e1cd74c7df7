"""Maps the decoder's parameters to the tensors of a family's checkpoint.

Families name tensors differently, and some store several matrices as one. What can be computed once is computed here,
while the weights are loaded, so no step computes it and no fast path can forget it:

    multipliers          into the embedding, the projections to the hidden size, and the last norm
    norms by 1 + w       into the weight
    decays of states     -exp(A_log)
    other rotary pairs   into the order of the rows of q and k (engine/model/rope.py, row_order)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from engine.model.config import DeltaConfig, ModelConfig
from engine.model.families import ARCHITECTURES
from engine.model.rope import row_order
from engine.model.slots import Cut, Slot

REORDERED = ("q_proj", "k_proj", "q_norm", "k_norm")  # rows of heads, which may be in another order
Fold = Callable[[torch.Tensor], torch.Tensor]


def checkpoint_slots(slots: Iterable[Slot], config: ModelConfig, dtype: torch.dtype) -> Iterator[Slot]:
    """Returns the slots with the names and the layout of the family's checkpoint. `slots`: of a decoder of this dtype,
    or of one rank's shard of it. `config`: the configuration of the whole model."""
    arch = ARCHITECTURES[config.architecture]
    dim, inner = config.head_dim, config.intermediate_size
    kv_width = config.num_kv_heads * dim
    widths = {"q_proj": config.num_heads * dim, "k_proj": kv_width, "v_proj": kv_width}

    def mapped(slot: Slot) -> Slot:
        module, _, leaf = slot.name.rpartition(".")
        owner = module.rpartition(".")[2]
        order, fold = row_order(config.rope, dim) if owner in REORDERED else None, _fold(slot, config, dtype, owner)
        slot = replace(slot, order=order, fold=fold, parts=tuple(map(mapped, slot.parts)))
        if arch.clamped and owner == "experts":
            return _transposed(slot, leaf)
        if arch.fused_qkv and owner in widths:
            first = sum(width for name, width in list(widths.items())[: list(widths).index(owner)])
            return _part_of(slot, owner, "qkv_proj", first, sum(widths.values()))
        if arch.fused_gate_up and owner in ("gate_proj", "up_proj"):
            return _part_of(slot, owner, "gate_up_proj", inner * (owner == "up_proj"), 2 * inner)
        if config.output_gate and owner in ("q_proj", "q_gate"):
            return _of_heads(slot, owner, "q_proj", config.num_heads, [dim, dim], owner == "q_gate")
        if config.delta is not None and ".linear_attn." in slot.name:
            return _delta_slot(slot, owner, config.delta, arch.fused_delta)
        return replace(slot, name=".".join(arch.names.get(part, part) for part in slot.name.split(".")))

    return map(mapped, slots)


def _delta_slot(slot: Slot, owner: str, delta: DeltaConfig, fused: bool) -> Slot:
    """Returns the slot of a parameter of the delta rule. `fused`: projections are stored key head by key head."""
    heads, each = (delta.key_heads, delta.value_heads // delta.key_heads) if fused else (1, delta.value_heads)
    keys, values = delta.key_heads // heads * delta.key_dim, each * delta.value_dim
    inputs = {"q": keys, "k": keys, "v": values}
    fusions = {"in_proj_qkv": inputs}
    if fused:
        fusions = {"in_proj_qkvz": inputs | {"z": values}, "in_proj_ba": {"b": each, "a": each}}
    leaf = owner.removeprefix("in_proj_")
    for name, parts in fusions.items():
        if leaf in parts:
            return _of_heads(slot, owner, name, heads, list(parts.values()), list(parts).index(leaf))
    return slot


def _of_heads(slot: Slot, owner: str, fused: str, heads: int, sizes: Sequence[int], part: int) -> Slot:
    """Returns the slot as rows of the tensor `fused`, in which each head has parts with these numbers of rows."""
    first, whole = sum(sizes[:part]), sum(sizes)
    cut = Cut(0, tuple(head * whole + first for head in range(heads)), heads * whole)
    return replace(slot, name=slot.name.replace(f".{owner}.", f".{fused}."), cut=cut)


def _part_of(slot: Slot, owner: str, fused: str, first: int, whole: int) -> Slot:
    """Returns the slot as rows of the tensor `fused`, which has `whole` rows; those of `owner` begin at `first`."""
    starts = slot.cut.starts if slot.cut is not None else (0,)
    cut = Cut(0, tuple(first + start for start in starts), whole)
    name = ".".join(fused if part == owner else part for part in slot.name.split("."))
    return replace(slot, name=name, cut=cut)


def _fold(slot: Slot, config: ModelConfig, dtype: torch.dtype, owner: str) -> Fold | None:
    arch = ARCHITECTURES[config.architecture]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    factor, offset = 1.0, float(arch.offset_norms and "norm" in owner)
    if ".linear_attn." in slot.name:
        folds: dict[str, Fold] = {
            "A_log": lambda tensor: -tensor.to(exact).exp(),
            "conv1d.weight": lambda tensor: tensor[:, 0],
        }
        return next((fold for name, fold in folds.items() if slot.name.endswith(name)), None)
    embedding = config.embedding_scale
    if arch.scaled_embedding:  # transformers rounds this factor to the model's type
        embedding = float(torch.tensor(embedding).to(dtype))
    if owner == "embed_tokens":
        factor = embedding
    elif owner == "embed_tokens_per_layer":
        factor = float(torch.tensor(config.per_layer_size**0.5).to(dtype))
    elif slot.name.endswith("router.scale"):
        factor = config.hidden_size**-0.5
    elif slot.name.startswith("model.norm."):
        factor = config.logit_scale / (embedding if config.tie_word_embeddings else 1.0)
    elif owner in ("o_proj", "down_proj") or slot.name.endswith("experts.down_proj"):
        factor = config.residual_scale
    if (factor, offset) == (1.0, 0.0):
        return None
    return lambda tensor: (tensor.to(exact) + offset) * factor


def _transposed(slot: Slot, leaf: str) -> Slot:
    """Returns the slot for gpt-oss's experts: [E, in, out], where gates and ups alternate in gate_up_proj."""
    cut, fold = slot.cut, None
    if leaf.startswith("gate_up"):
        if cut is not None and cut.dim > 0:
            cut = replace(cut, starts=(2 * cut.starts[0],))  # a rank's gates and ups are together

        def fold(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)

    slot = replace(slot, fold=fold, parts=(), cut=cut)
    return slot.transpose() if slot.view.dim() == 3 else slot
