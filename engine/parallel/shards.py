"""The part of a model that each rank holds, split as in Megatron-LM (Shoeybi et al. 2019).

Split by rows: every rank computes some of the outputs    q, k, v (whole heads), gate and up, each expert's gate and up,
                                                          embedding and output matrix (by vocabulary)
Split by columns: the output is the sum over the ranks    the attention's output, down, each expert's down
Whole on every rank                                       norms, the router of the experts

So a layer needs two sums over the ranks. With more ranks than key/value heads, several ranks hold the same head. The
ranks' parts of an MLP's inner size may differ in size. The vocabulary is split into equal pieces; the last pieces may
be padded. The bias of a matrix that is split by columns is on rank 0; other ranks have zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.model.linear import BLOCK
from engine.model.slots import Cut, Slot
from engine.model.traits import lacking


def check(config: ModelConfig, size: int) -> None:
    """Raise EngineError unless the model can be split over `size` ranks."""
    if lacks := lacking(config, "ranks"):
        raise EngineError(
            f"tensor_parallel_size is {size}, but this {config.architecture} has {lacks}, which several ranks cannot "
            "share: use 1"
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    fitting = [n for n in range(2, heads + 1) if _fits(heads, kv_heads, n)]
    if not _fits(heads, kv_heads, size):
        raise EngineError(
            f"tensor_parallel_size is {size}, but this {config.architecture} has {heads} query heads and {kv_heads} "
            f"key/value heads, which {size} ranks cannot share evenly: use 1{_alternatives(fitting)}"
        )
    for what, extent in _inner_sizes(config).items():
        if extent < size:
            raise EngineError(
                f"tensor_parallel_size is {size}, but the {what} of this model is only {extent}: lower "
                "tensor_parallel_size"
            )


def shard_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """Returns the configuration of one rank's shard: fewer heads, a narrower MLP, a slice of the vocabulary."""
    experts = config.experts
    if experts is not None:
        begin, end = _inner_span(config, experts.inner_size, rank, size)
        experts = replace(experts, inner_size=end - begin)
    begin, end = _inner_span(config, config.intermediate_size, rank, size)
    return replace(
        config, num_heads=config.num_heads // size, num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=end - begin, vocab_size=-(-config.vocab_size // size), experts=experts,
    )


def shard_slots(slots: Iterable[Slot], config: ModelConfig, rank: int, size: int) -> Iterator[Slot]:
    """Returns the slots of one rank, each with its slice of the tensor in the checkpoint. `slots`: the slots of a
    decoder with the configuration that `shard_config` returns. `config`: the configuration of the whole model."""
    kv_rank = rank * config.num_kv_heads // size if size > config.num_kv_heads else rank
    dim, pieces = config.head_dim, min(size, config.num_kv_heads)
    q_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    queries, keys = _span(q_width, rank, size)[0], kv_rank * kv_width // pieces
    inner = _inner_span(config, config.intermediate_size, rank, size)[0]
    experts_inner = config.experts.inner_size if config.experts is not None else 0
    experts_from = _inner_span(config, experts_inner, rank, size)[0]

    def cut(slot: Slot) -> Slot:
        owner, _, leaf = slot.name.rpartition(".")
        owner, in_expert = owner.rpartition(".")[2], ".experts." in slot.name
        start, whole = (experts_from, experts_inner) if in_expert else (inner, config.intermediate_size)
        if leaf == "down_proj_bias":
            return slot if rank == 0 else _nothing(slot)
        if leaf in ("gate_up_proj", "gate_up_proj_bias"):  # of all experts [E, 2·I, …], gates before ups
            parts = tuple(map(cut, slot.parts))
            return replace(slot, parts=parts, cut=Cut(1, (start, whole + start), 2 * whole))
        if leaf == "down_proj":  # [E, H, I]
            return replace(slot, parts=tuple(map(cut, slot.parts)), cut=Cut(2, (start,), whole))
        if owner in ("embed_tokens", "lm_head"):
            begin = min(rank * len(slot.view), config.vocab_size)
            slot.view.zero_()  # the last pieces may be padded
            return replace(slot, view=slot.view[: config.vocab_size - begin], cut=Cut(0, (begin,), config.vocab_size))
        if leaf == "sinks":
            return replace(slot, cut=Cut(0, (queries // dim,), config.num_heads))
        if owner == "q_proj":
            return replace(slot, cut=Cut(0, (queries,), q_width))
        if owner in ("k_proj", "v_proj"):
            return replace(slot, cut=Cut(0, (keys,), kv_width))
        if owner in ("gate_proj", "up_proj"):
            return replace(slot, cut=Cut(0, (start,), whole))
        if owner in ("o_proj", "down_proj"):
            if leaf == "bias":
                return slot if rank == 0 else _nothing(slot)
            return replace(slot, cut=Cut(1, (queries,), q_width) if owner == "o_proj" else Cut(1, (start,), whole))
        return slot

    return map(cut, slots)


def _nothing(slot: Slot) -> Slot:
    """Sets the slot's parameter to zero; returns a slot that reads nothing from the checkpoint."""
    slot.view.zero_()
    return replace(slot, view=slot.view[:0], cut=Cut(0, (0,), len(slot.view)))


def _span(extent: int, rank: int, size: int) -> tuple[int, int]:
    return extent * rank // size, extent * (rank + 1) // size


def _inner_span(config: ModelConfig, extent: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the part of an MLP's inner size. Whole blocks of 8-bit floats stay whole, if each rank can have one."""
    packing = config.packing
    floats = packing is not None and any(each.floats for each in packing.each)
    blocks = extent // BLOCK if floats and extent % BLOCK == 0 else 0
    if blocks < size:
        return _span(extent, rank, size)
    begin, end = _span(blocks, rank, size)
    return begin * BLOCK, end * BLOCK


def _fits(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _inner_sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {"intermediate_size": config.intermediate_size}
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.inner_size
    return sizes


def _alternatives(numbers: list[int]) -> str:
    if not numbers:
        return ""
    listed = [str(n) for n in numbers]
    return (", " + ", ".join(listed[:-1]) if listed[:-1] else "") + " or " + listed[-1]
