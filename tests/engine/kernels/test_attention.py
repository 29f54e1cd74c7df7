"""The torch attention backend against attention written out key by key, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from engine.attention.base import AttentionShape, ForwardMeta, PagedGroup
from engine.attention.choose import choose_attention
from engine.attention.kv_pool import KVPool
from engine.attention.torch_backend import TorchAttention
from engine.errors import EngineError
from engine.groups import paged_groups
from engine.model.config import ModelConfig

CPU = torch.device("cpu")


def config(heads: int, kv_heads: int, dim: int, windows: tuple[int, ...] = (0,)) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 100, 64, 64, len(windows), heads, kv_heads, dim, 512, windows=windows)


@dataclass
class Case:
    """Random sequences in a shuffled pool in which every slot without an owner is NaN, except in the null block."""

    meta: ForwardMeta
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    keys: list[torch.Tensor]  # per sequence [seq_len, Hkv, D]
    values: list[torch.Tensor]


def make_case(model: AttentionShape, lengths: list[tuple[int, int]], decodes: int, block_size: int, seed: int) -> Case:
    """lengths: (tokens in this step, keys in all) of each sequence, the first `decodes` of them decoding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (model.num_kv_heads, model.head_dim)
    columns = [-(-keys // block_size) for _, keys in lengths]
    order = (torch.randperm(sum(columns) + 5, generator=generator) + 1).tolist()
    caches = torch.full((2, len(order) + 1, block_size, *shape), torch.nan, dtype=torch.float64)
    caches[:, 0] = 0
    # Beyond a sequence's columns, the table may name a block of another sequence.
    table = torch.full((len(lengths), max(columns) + 2), order[-1], dtype=torch.int32)
    keys, values, slots, positions = [], [], [], []
    for i, (count, length) in enumerate(lengths):
        blocks = torch.tensor([order.pop() for _ in range(columns[i])])
        table[i, : columns[i]] = blocks
        where = blocks[torch.arange(length) // block_size] * block_size + torch.arange(length) % block_size
        own = torch.randn(2, length, *shape, generator=generator, dtype=torch.float64)
        caches.view(2, -1, *shape)[:, where] = own
        keys.append(own[0])
        values.append(own[1])
        slots.append(where[length - count :])
        positions.append(torch.arange(length - count, length))
    counts = torch.tensor([count for count, _ in lengths])
    q = torch.randn(int(counts.sum()), model.num_heads, model.head_dim, generator=generator, dtype=torch.float64)
    meta = ForwardMeta(
        positions=torch.cat(positions), slot_mapping=torch.cat(slots),
        cu_seqlens_q=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        seq_lens=torch.tensor([length for _, length in lengths]).int(), block_table=table, max_q_len=int(counts.max()),
        max_seq_len=max(length for _, length in lengths), num_decodes=decodes, logit_rows=None,
    )
    return Case(meta, q, caches[0], caches[1], keys, values)


def expected(case: Case, window: int, scale: float = 0.0) -> torch.Tensor:
    """Query i of a sequence attends exactly the keys 0 … seq_len − q_len + i, or the last `window` of those."""
    rows = []
    bounds = case.meta.cu_seqlens_q.tolist()
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        start, end = bounds[i], bounds[i + 1]
        for token in range(start, end):
            last = len(keys) - (end - start) + (token - start)
            first = max(0, last - window + 1) if window else 0
            heads = []
            for head in range(case.q.shape[1]):
                own = head // (case.q.shape[1] // keys.shape[1])
                scores = keys[first : last + 1, own] @ case.q[token, head] * (scale or case.q.shape[2] ** -0.5)
                heads.append(scores.softmax(0) @ values[first : last + 1, own])
            rows.append(torch.cat(heads))
    return torch.stack(rows)


def check(model: ModelConfig, case: Case, block_size: int) -> None:
    backend = TorchAttention(model, block_size, torch.float64, CPU)
    backend.plan(case.meta)
    for layer in range(model.num_layers):
        out = backend.run(layer, case.q, case.k_cache, case.v_cache)
        torch.testing.assert_close(out, expected(case, model.window(layer)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(4, 4, 8, 1), (4, 1, 16, 3), (6, 2, 24, 16), (1, 1, 2, 3)]
)
def test_every_query_attends_exactly_its_own_past(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    """Here as below, every slot that was not written is NaN, also in the tail of a sequence's last block."""
    model = config(heads, kv_heads, dim)
    lengths = [(1, 1), (1, 17), (1, 40), (1, 16), (5, 5), (1, 1), (7, 30), (3, 19), (16, 32)]
    check(model, make_case(model, lengths, 4, block_size, 0), block_size)


@pytest.mark.parametrize("seed", range(5))
def test_random_lengths_and_cuts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    decodes, prefills, block_size = number(0, 6), number(0, 3), number(1, 17)
    lengths = [(1, number(1, 90)) for _ in range(decodes)]
    for _ in range(prefills or not decodes):
        count = number(1, 30)
        lengths.append((count, count + number(0, 50)))
    model = config(4, 2, 8, (0, number(1, 20)))
    check(model, make_case(model, lengths, decodes, block_size, seed), block_size)


@pytest.mark.parametrize("lengths", [[(1, 64)], [(1, 3), (1, 64)], [(1, 200)], [(1, 1)] * 9, [(1, 90), (1, 2)] * 4])
@pytest.mark.parametrize("windows", [(0,), (0, 5, 0, 64)])
def test_decodes_alone(lengths: list[tuple[int, int]], windows: tuple[int, ...]) -> None:
    model = config(4, 2, 8, windows)
    check(model, make_case(model, lengths, len(lengths), 8, 1), 8)


def test_no_sequence_reads_another_ones_blocks() -> None:
    model = config(4, 2, 8, (0, 6))
    lengths = [(1, 21), (1, 9), (6, 20)]
    case = make_case(model, lengths, 2, 4, 3)
    backend = TorchAttention(model, 4, torch.float64, CPU)
    backend.plan(case.meta)
    before = [backend.run(layer, case.q, case.k_cache, case.v_cache) for layer in range(2)]
    own = case.meta.block_table[1, :3].long()
    case.k_cache[own], case.v_cache[own] = 1e6, torch.nan
    for layer in range(2):
        after = backend.run(layer, case.q, case.k_cache, case.v_cache)
        changed = (after != before[layer]).any(-1)
        assert changed.tolist() == [False, True] + [False] * 6


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"'fast'.*auto"):
        choose_attention("fast", config(4, 2, 8), 16, torch.float32, CPU, 8)
    assert choose_attention("auto", config(4, 2, 8), 16, torch.float32, CPU, 8).name == "torch"


def behind_windows(case: Case, window: int, block_size: int) -> Case:
    """Release the blocks behind each sequence's window: the table has 0 for them, and others write NaN to them."""
    table, bounds = case.meta.block_table.clone(), case.meta.cu_seqlens_q.tolist()
    for i, length in enumerate(case.meta.seq_lens.tolist()):
        first_seen = max(0, length - (bounds[i + 1] - bounds[i]) + 1 - window)
        gone = table[i, : first_seen // block_size].clone()
        table[i, : len(gone)] = 0
        case.k_cache[gone.long()], case.v_cache[gone.long()] = torch.nan, torch.nan
    return replace(case, meta=replace(case.meta, block_table=table))


@pytest.mark.parametrize("seed", range(5))
def test_each_cache_group_has_its_own_table_heads_and_pool_and_nothing_behind_a_window_is_read(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    decodes, block_size, small, large = number(0, 4), number(1, 9), number(1, 12), number(13, 40)
    lengths = [(1, number(1, 90)) for _ in range(decodes)]
    lengths += [(count := number(1, 30), count + number(0, 60)) for _ in range(number(int(not decodes), 3))]
    model = replace(
        config(4, 2, 8, (small, 0, large, 0)), attention_scale=0.4, layer_heads=((4, 6), (1, 10), (2, 4), (1, 10))
    )
    groups = paged_groups(model)
    cases = [
        behind_windows(
            make_case(model.of_group(group), lengths, decodes, block_size, seed + i), group.window or 1000, block_size
        )
        for i, group in enumerate(groups)
    ]
    sides = tuple(PagedGroup(case.meta.slot_mapping, case.meta.block_table) for case in cases[1:])
    attention = choose_attention("torch", model, block_size, torch.float64, CPU, 8)
    attention.plan(replace(cases[0].meta, groups=sides))
    for case, group in zip(cases, groups, strict=True):
        for layer in group.layers:
            out = attention.run(layer, case.q, case.k_cache, case.v_cache)
            torch.testing.assert_close(out, expected(case, group.window, 0.4))


def test_a_pool_has_the_blocks_and_heads_of_each_group_and_shares_those_of_a_source() -> None:
    model = replace(
        config(4, 2, 8, (9, 0, 9, 0)), layer_heads=((4, 6), (1, 10)) * 2, kv_source=(0, 1, 0, 1), attention_scale=1.0
    )
    pool = KVPool(model, 7, 16, torch.float32, CPU, side_blocks=(5,))
    assert [tuple(keys.shape) for keys in pool.keys] == [(5, 16, 4, 6), (7, 16, 1, 10)] * 2
    assert pool.keys[2] is pool.keys[0] and pool.values[3] is pool.values[1] and pool.values[1] is not pool.keys[1]
    assert pool.nbytes == 2 * 4 * 16 * (5 * 4 * 6 + 7 * 10)
