"""The gated delta rule and its convolution: in chunks, step by step, over segments and slots."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from engine.attention.base import StateMeta
from engine.attention.kv_pool import KVPool
from engine.groups import cache_groups
from engine.model.config import DeltaConfig, ModelConfig
from engine.model.delta import CHUNK, EPS, causal_conv, delta_rule

KEY_HEADS, HEADS, DK, DV, TAPS, SLOTS = 2, 4, 8, 6, 4, 24
CHANNELS = 2 * KEY_HEADS * DK + HEADS * DV
MODEL = ModelConfig(
    "LlamaForCausalLM", 100, 64, 128, 4, 4, 2, 16, 1024,
    delta=DeltaConfig((True, False, True, True), KEY_HEADS, HEADS, DK, DV, TAPS),
)
Rows = list[tuple[int, int, int, int]]


class Layer:
    """The weights of a layer, and the inputs of one sequence."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, tokens: int = 200) -> None:
        torch.manual_seed(seed)
        wide = torch.promote_types(dtype, torch.float32)
        self.x = torch.randn(tokens, CHANNELS, dtype=dtype)
        self.g = -torch.rand(tokens, HEADS, dtype=wide) * 2
        self.beta = torch.rand(tokens, HEADS, dtype=wide)
        self.weight = torch.linspace(-1, 1.5, CHANNELS * TAPS, dtype=dtype).view(CHANNELS, TAPS)

    def part(self, tokens: slice) -> Layer:
        other = Layer.__new__(Layer)
        other.x, other.g, other.beta, other.weight = self.x[tokens], self.g[tokens], self.beta[tokens], self.weight
        return other


def joined(parts: list[Layer]) -> Layer:
    other = parts[0].part(slice(0))
    other.x, other.g, other.beta = (torch.cat([getattr(p, name) for p in parts]) for name in ("x", "g", "beta"))
    return other


def pool(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the states of a layer. All slots but the null slot hold NaN: no value of a free slot may be used."""
    found = KVPool(MODEL, 2, 16, dtype, torch.device("cpu"), side_blocks=(SLOTS,)).states[0]
    assert found is not None
    for each in found:
        each[1:] = float("nan")
    return found


def meta(rows: Rows, bounds: list[int], decodes: int = 0) -> StateMeta:
    ints = torch.int32
    return StateMeta(torch.tensor(rows, dtype=ints).view(-1, 4), torch.tensor(bounds, dtype=ints), rows, decodes)


def run(layer: Layer, states: tuple[torch.Tensor, torch.Tensor], at: StateMeta) -> torch.Tensor:
    conv, recurrent = states
    y = causal_conv(layer.x, layer.weight, conv, at)
    q, k, v = y.split([KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV], 1)
    heads = q.unflatten(1, (KEY_HEADS, DK)), k.unflatten(1, (KEY_HEADS, DK)), v.unflatten(1, (HEADS, DV))
    return delta_rule(*heads, layer.g, layer.beta, recurrent, at)


def naive(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (outputs, last inputs, state), token by token, head by head, as the equations say."""
    x = torch.cat((torch.zeros(TAPS - 1, CHANNELS, dtype=layer.x.dtype), layer.x))
    tokens = len(layer.x)
    out = torch.zeros(tokens, HEADS, DV, dtype=layer.x.dtype)
    state = torch.zeros(HEADS, DK, DV, dtype=layer.x.dtype)
    for t in range(tokens):
        total = sum(x[t + tap] * layer.weight[:, tap] for tap in range(TAPS))
        assert isinstance(total, torch.Tensor)
        q, k, v = (total * torch.sigmoid(total)).split([KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV])
        for head in range(HEADS):
            own = slice(head * KEY_HEADS // HEADS * DK, (head * KEY_HEADS // HEADS + 1) * DK)
            key, query = (each[own] / (each[own].square().sum() + EPS).sqrt() for each in (k, q))
            value, s = v[head * DV : (head + 1) * DV], state[head]
            s = layer.g[t, head].exp() * s
            s = s + torch.outer(key, layer.beta[t, head] * (value - s.T @ key))
            out[t, head], state[head] = s.T @ query / DK**0.5, s
    return out, x[tokens:].T, state


@pytest.mark.parametrize("tokens", [1, 2, TAPS, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_chunks_and_steps_are_the_loop_over_tokens_and_heads(tokens: int) -> None:
    layer = Layer(tokens, tokens=tokens)
    wanted, last, state = naive(layer)
    whole, steps = pool(), pool()
    torch.testing.assert_close(run(layer, whole, meta([(0, tokens, 0, 5)], [0, 1])), wanted)
    for t in range(tokens):  # in place from the second token on
        one = run(layer.part(slice(t, t + 1)), steps, meta([(0, 1, 7 if t else 0, 7)], [0, 1], decodes=1))
        torch.testing.assert_close(one, wanted[t : t + 1])
    for states, slot in ((whole, 5), (steps, 7)):
        assert torch.equal(states[0][slot], last) and not any(each[0].any() for each in states)
        torch.testing.assert_close(states[1][slot], state)


def test_segments_continue_each_other_and_leave_checkpoints() -> None:
    layer = Layer(1)
    ends = [0, 3, 64, 100, 101, 102, 200]
    rows = [(first, end, i and 10 + i, 11 + i) for i, (first, end) in enumerate(pairwise(ends))]
    states = pool()
    torch.testing.assert_close(run(layer, states, meta(rows, [0, len(rows)])), naive(layer)[0])
    for _, end, _, target in rows:
        _, last, state = naive(layer.part(slice(end)))
        assert torch.equal(states[0][target], last)
        torch.testing.assert_close(states[1][target], state)
    # A sequence that begins at a checkpoint computes the same numbers as one that passed it.
    again = run(layer.part(slice(64, None)), states, meta([(0, 136, 12, 20)], [0, 1]))
    torch.testing.assert_close(again, naive(layer)[0][64:])
    assert torch.equal(states[0][20], states[0][rows[-1][3]])


@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, torch.float64), (1, torch.float64), (2, torch.float32), (3, torch.bfloat16)]
)
def test_sequences_of_a_step_do_not_depend_on_each_other(seed: int, dtype: torch.dtype) -> None:
    """Decodes, decodes with drafts, chunks and padding: the same numbers as alone, in steps that follow each other."""
    rng, layers = random.Random(seed), [Layer(10 * seed + i, dtype, 120) for i in range(6)]
    alone, together = [pool(dtype) for _ in layers], pool(dtype)
    at, slots, free = [0] * len(layers), [0] * len(layers), list(range(1, SLOTS))
    for _ in range(8):
        entries = [(i, rng.choice([1, 1, 2, 5, 40])) for i in rng.sample(range(6), rng.randint(1, 6))]
        entries = sorted(((i, n) for i, n in entries if at[i] + n <= 120), key=lambda each: each[1] > 1)
        if not entries:
            break
        rows: Rows = []
        bounds, parts, decodes = [0], [], sum(n == 1 for _, n in entries)
        wanted = []
        for i, n in entries:
            ends = sorted({n, *rng.sample(range(1, n), min(n - 1, rng.randint(0, 2)))})
            first, base, source, own = 0, rows[-1][1] if rows else 0, slots[i], []
            for end in ends:
                in_place = source and rng.random() < 0.5
                target = source if in_place else free.pop()
                own.append((first, end, source, target))
                if source and not in_place:
                    free.insert(0, source)
                first, source = end, target
            rows += [(base + a, base + b, read, write) for a, b, read, write in own]
            bounds.append(len(rows))
            part = layers[i].part(slice(at[i], at[i] + n))
            parts.append(part)
            wanted.append(run(part, alone[i], meta(own, [0, len(own)], int(n == 1))))
            at[i], slots[i] = at[i] + n, source
        batch = joined(parts)
        got = run(batch, together, meta(rows, bounds, decodes))
        torch.testing.assert_close(got, torch.cat(wanted))
        for i, _ in entries:
            for mine, other in zip(alone[i], together, strict=True):
                torch.testing.assert_close(mine[slots[i]], other[slots[i]])


def test_a_target_of_0_writes_nothing_and_padding_is_no_segment() -> None:
    layer, states = Layer(3, tokens=12), pool()
    rows = [(0, 1, 0, 0), (1, 2, 0, 3), (2, 10, 0, 0)]
    out = run(layer, states, meta(rows, [0, 1, 2, 3], decodes=2))
    torch.testing.assert_close(out[2:10], naive(layer.part(slice(2, 10)))[0])
    assert not out[10:].any()
    assert [slot for slot in range(SLOTS) if not states[1][slot].isnan().any()] == [0, 3]
    assert not states[0][0].any() and not states[1][0].any()


def test_states_have_a_pool_of_slots_and_no_pages() -> None:
    full, state = cache_groups(MODEL)
    assert (full.layers, state.layers, state.kind) == ((1,), (0, 2, 3), "state")
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        found = KVPool(MODEL, 5, 16, dtype, torch.device("cpu"), side_blocks=(9,))
        assert [keys is None for keys in found.keys] == [each is not None for each in found.states]
        assert [each and each.conv.shape for each in found.states][:2] == [(9, CHANNELS, TAPS - 1), None]
        first = found.states[0]
        assert first is not None and first.recurrent.shape == (9, HEADS, DK, DV) and first.recurrent.dtype == wide
        slot = 3 * (CHANNELS * 3 * dtype.itemsize + HEADS * DK * DV * wide.itemsize)
        assert state.block_bytes(16, dtype) == slot
        assert found.nbytes == 9 * slot + 5 * full.block_bytes(16, dtype)
