"""Each kernel against the plain torch operation that specifies it, with a float64 reference for the bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import kv_fp8
from engine.core.request import Request
from engine.core.step import RowSettings
from engine.model import ops as reference_ops
from engine.params import SamplingParams
from engine.worker.sampler import Sampler

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.kernels import norms, sample, split_linear  # noqa: E402
from engine.kernels.decode_attention import DecodeWorkspace, decode_attention  # noqa: E402
from engine.kernels.gemv import gemv  # noqa: E402
from engine.kernels.prefill_attention import PrefillWorkspace, prefill_attention  # noqa: E402
from engine.worker.graphs import fused_ops  # noqa: E402

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
SHAPES = [(8, 4, 128, 16), (8, 2, 128, 16), (2, 7, 64, 32), (2, 1, 64, 8), (3, 3, 64, 16)]
ROUNDED_APART = 5e-3  # of 8-bit keys: two that are nearly the same may be rounded to neighbours
BOUND = 4e-3  # relative error of bfloat16 results: one rounding is 2e-3 of the norm at most


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN is infinite."""
    distance = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return distance if distance == distance else float("inf")


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(0, std)


def at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[n, kv_heads, dim] of a cache of any type."""
    return cache.view(torch.uint8).flatten(0, 1)[slots].view(cache.dtype)


class Pages:
    """A cache in which every block that no sequence owns is NaN, and random sequences in it."""

    def __init__(
        self, rng: np.random.Generator, lengths: list[int], block_size: int, kv_heads: int, dim: int,
        small: bool = False,
    ) -> None:
        """`small`: of 8-bit numbers, with scales that are not all the same."""
        counts = [-(-length // block_size) for length in lengths]
        blocks = sum(counts) + 3
        self.keys, self.values = (normal(blocks, block_size, kv_heads, dim) for _ in range(2))
        order = rng.permutation(np.arange(1, blocks))
        self.table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32, device=DEVICE)
        at = 0
        for i, count in enumerate(counts):
            self.table[i, :count] = torch.from_numpy(order[at : at + count].astype(np.int32))
            at += count
        for cache in (self.keys, self.values):
            cache[torch.from_numpy(order[at:]).to(DEVICE)] = float("nan")
            cache[0] = 0
            for i, length in enumerate(lengths):  # nor may the slots behind a sequence's end matter
                if length % block_size:
                    cache[self.table[i, counts[i] - 1].long(), length % block_size :] = float("nan")
        self.scales = None
        if small:
            self.scales = torch.exp2(torch.arange(2 * kv_heads, device=DEVICE) % 3 - 3.0).view(2, kv_heads)
            self.scales[0] *= 4
            self.keys, self.values = (
                kv_fp8.quantise(cache.flatten(0, 1), scale).view(cache.shape)
                for cache, scale in zip((self.keys, self.values), self.scales, strict=True)
            )
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self._block_size = block_size

    def of(self, i: int, cache: torch.Tensor) -> torch.Tensor:
        """[length, kv_heads, dim] of sequence i, float64."""
        length = int(self.lengths[i])
        if self.scales is not None:
            cache = kv_fp8.dequantise(cache, self.scales[0 if cache is self.keys else 1], torch.float64)
        return cache[self.table[i].long()].flatten(0, 1)[:length].double()

    def slots(self, i: int, positions: range) -> torch.Tensor:
        row = self.table[i].tolist()
        size = self._block_size
        return torch.tensor([row[p // size] * size + p % size for p in positions], device=DEVICE)

    def attention(
        self, i: int, q: torch.Tensor, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Float64 attention of the last len(q) positions of sequence i; q [n, heads, dim]."""
        keys, values = self.of(i, self.keys), self.of(i, self.values)
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
        n, length = len(q), len(keys)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at, of = torch.arange(length, device=DEVICE), torch.arange(length - n, length, device=DEVICE)[:, None]
        scores = scores.masked_fill(~((at <= of) & (at > of - (window or length))), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values)


def features(special: str, heads: int) -> dict[str, Any]:
    """The arguments of the attention kernels for a model with windows, soft caps or sinks."""
    sinks = torch.linspace(-3, 5, heads, device=DEVICE).to(DTYPE)
    return {
        "plain": {}, "window": {"window": 37}, "cap": {"softcap": 1.5}, "sinks": {"sinks": sinks},
        "all": {"window": 100, "softcap": 2.0, "sinks": sinks}, "wide window": {"window": 1000, "sinks": sinks},
    }[special]


SPECIAL = ["window", "cap", "sinks", "all", "wide window"]
# What is special, kv heads, query heads for each, their size, tokens of a block.
FORMS = [*(("plain", *shape) for shape in SHAPES), *((special, 2, 4, 64, 16) for special in SPECIAL)]


@pytest.mark.parametrize("n,longest", [(1, 40), (1, 5000), (3, 700), (20, 1500), (64, 300), (200, 400)])
@pytest.mark.parametrize("special,kv_heads,group,dim,block_size", FORMS)
@pytest.mark.parametrize("small", [False, True])
def test_decode_attention_equals_the_reference(
    small: bool, n: int, longest: int, special: str, kv_heads: int, group: int, dim: int, block_size: int
) -> None:
    rng = np.random.default_rng(n * longest + group)
    lengths = rng.integers(1, longest + 1, n).tolist()
    lengths[0] = longest
    pages, more = Pages(rng, lengths, block_size, kv_heads, dim, small), features(special, kv_heads * group)
    workspace = DecodeWorkspace(n + 1, kv_heads, group, dim, DEVICE)
    q = normal(n + 1, kv_heads * group, dim)
    rows = torch.arange(n + 1, dtype=torch.int32, device=DEVICE).clamp_max(n - 1)
    seq_lens = torch.cat((pages.lengths, torch.zeros(1, dtype=torch.int32, device=DEVICE)))  # and a padding row
    for _ in range(2):  # the second time finds the counters as the first left them
        out = torch.full((n + 1, kv_heads * group * dim), float("nan"), device=DEVICE, dtype=DTYPE)
        decode_attention(
            q, pages.keys, pages.values, out, workspace, pages.table, rows, seq_lens, dim**-0.5, group,
            kv_scales=pages.scales, **more,
        )
        for i in range(0, n, max(1, n // 12)):
            assert error(out[i].view(1, -1, dim), pages.attention(i, q[i : i + 1], **more)) < BOUND
        assert not out[n].any()
    assert not workspace.counters.any()


@pytest.mark.parametrize("n,longest", [(1, 40), (1, 5000), (5, 700), (70, 600), (256, 400)])
@pytest.mark.parametrize(
    "special,norm,kv_heads,group,dim",
    [("plain", "bf16", 8, 2, 128), ("plain", "none", 8, 2, 128), *((each, "fp32", 2, 4, 64) for each in SPECIAL)],
)
@pytest.mark.parametrize("small", [False, True])
def test_fused_decode_equals_norm_rope_store_and_attention(
    small: bool, n: int, longest: int, special: str, norm: str, kv_heads: int, group: int, dim: int
) -> None:
    """A weight in fp32 is multiplied before the only rounding."""
    rng, eps = np.random.default_rng(n + longest), 1e-6
    lengths = rng.integers(1, longest + 1, n).tolist()
    lengths[0] = longest
    pages, more = Pages(rng, lengths, 16, kv_heads, dim, small), features(special, kv_heads * group)
    table = torch.randn(longest + 1, dim, device=DEVICE)
    exact = torch.rand(kv_heads * (group + 1), dim, device=DEVICE) + 0.5
    weight = {"fp32": exact, "bf16": exact.bfloat16(), "none": None}[norm]
    qkv, positions = normal(n, kv_heads * (group + 2) * dim), pages.lengths.long() - 1
    slots = torch.cat([pages.slots(i, range(length - 1, length)) for i, length in enumerate(lengths)])
    keys, values, rope = pages.keys.clone(), pages.values.clone(), reference_ops.rope_rows(table, positions)
    q = reference_ops.qk_norm_rope_store(qkv.clone(), weight, eps, rope, pages.keys, pages.values, slots, pages.scales)
    workspace = DecodeWorkspace(n, kv_heads, group, dim, DEVICE)
    out = torch.full((n, kv_heads * group * dim), float("nan"), device=DEVICE, dtype=DTYPE)
    rows = torch.arange(n, dtype=torch.int32, device=DEVICE)
    decode_attention(
        qkv, keys, values, out, workspace, pages.table, rows, pages.lengths, dim**-0.5, group,
        fused=(weight, table, eps), kv_scales=pages.scales, **more,
    )
    assert error(at(keys, slots).float(), at(pages.keys, slots).float()) < (ROUNDED_APART if small else 1e-3)
    assert torch.equal(at(values, slots).float(), at(pages.values, slots).float())
    for i in range(0, n, max(1, n // 12)):
        assert error(out[i].view(1, -1, dim), pages.attention(i, q[i : i + 1], **more)) < BOUND
    assert not workspace.counters.any()


@pytest.mark.parametrize("splits", [None, 1, 4, 32])
@pytest.mark.parametrize(
    "special,kv_heads,group,dim,block_size", [*FORMS, *((special, 2, 4, 256, 16) for special in SPECIAL)]
)
@pytest.mark.parametrize("small", [False, True])
def test_prefill_attention_equals_the_reference(
    small: bool, splits: int | None, special: str, kv_heads: int, group: int, dim: int, block_size: int
) -> None:
    """Chunks after cached prefixes of any length, behind sequences that decode; own keys from cache and projection."""
    rng, more = np.random.default_rng(group * dim), features(special, kv_heads * group)
    for case in range(4):
        decodes = int(rng.integers(0, 3))
        chunks = [1] * decodes + rng.integers(1, (20, 300)[case % 2], int(rng.integers(1, 6))).tolist()
        fresh = case == 3  # no keys of earlier steps
        reach = (700, 700, 9000, 1)[case]
        lengths = [chunk + int(rng.integers(0, reach)) * int(rng.integers(0, 2)) for chunk in chunks]
        pages = Pages(rng, lengths, block_size, kv_heads, dim, small)
        bounds = torch.tensor([0, *np.cumsum(chunks)], dtype=torch.int32, device=DEVICE)
        qkv = normal(sum(chunks), kv_heads * (group + 2), dim)
        q, keys, values = qkv.split([kv_heads * group, kv_heads, kv_heads], 1)
        for i, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
            where, slots = slice(int(bounds[i]), int(bounds[i + 1])), pages.slots(i, range(length - chunk, length))
            if pages.scales is not None:
                keys[where], values[where] = (
                    kv_fp8.dequantise(at(cache, slots), scale, DTYPE)
                    for cache, scale in zip((pages.keys, pages.values), pages.scales, strict=True)
                )
                continue
            pages.keys.flatten(0, 1)[slots] = keys[where]
            pages.values.flatten(0, 1)[slots] = values[where]
        workspace = PrefillWorkspace(kv_heads, dim, DEVICE)
        for dense in (None, (keys, values)):
            out = torch.full((len(q), kv_heads * group * dim), float("nan"), device=DEVICE, dtype=DTYPE)
            prefill_attention(
                q, pages.keys, pages.values, out, workspace, pages.table, pages.lengths, bounds, dim**-0.5,
                first=decodes, max_seq_len=max(lengths), dense=dense, splits=splits, kv_scales=pages.scales,
                fresh=fresh, **more,
            )
            for i in range(decodes, len(chunks)):
                where = slice(int(bounds[i]), int(bounds[i + 1]))
                assert error(out[where].view(chunks[i], -1, dim), pages.attention(i, q[where], **more)) < BOUND
        assert not workspace.counters.any()


@pytest.mark.parametrize("tokens,hidden", [(1, 1024), (7, 2560), (300, 4096), (64, 96)])
def test_norms_and_activation_equal_the_reference(tokens: int, hidden: int) -> None:
    x, residual, weight = normal(tokens, hidden), normal(tokens, hidden), normal(hidden)
    kept = residual.clone()
    wanted = reference_ops.add_norm(x, kept, weight, 1e-6)
    mine = residual.clone()
    assert error(fused_ops.add_norm(x, mine, weight, 1e-6), wanted) < 1e-3
    assert torch.equal(mine, kept)
    assert error(fused_ops.norm(x, weight, 1e-6), reference_ops.norm(x, weight, 1e-6)) < 1e-3
    exact = weight.float() * 1.001  # a weight in fp32 is multiplied before the only rounding
    assert error(fused_ops.norm(x, exact, 1e-6), reference_ops.norm(x, exact, 1e-6)) < 1e-3
    assert fused_ops.norm(x, exact, 1e-6).dtype == x.dtype
    parts = torch.stack((x.float() * 0.25, x.float() * 0.75))
    assert error(norms.rms_norm(parts, weight, 1e-6, residual.clone()), wanted) < 1e-3
    gate_up = normal(tokens, 2 * hidden)
    assert error(fused_ops.silu_mul(gate_up), reference_ops.silu_mul(gate_up.clone())) < 1e-3


@pytest.mark.parametrize("heads,kv_heads,dim", [(32, 8, 128), (16, 8, 128), (14, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("small", [False, True])
def test_qk_norm_rope_store_equals_the_reference(
    small: bool, heads: int, kv_heads: int, dim: int, normed: bool
) -> None:
    tokens = 50
    table, positions = torch.randn(90, dim, device=DEVICE), torch.randint(0, 90, (tokens,), device=DEVICE)
    weight = normal(heads + kv_heads, dim) if normed else None
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    caches = [torch.zeros(10, 16, kv_heads, dim, device=DEVICE, dtype=kv_fp8.FP8 if small else DTYPE) for _ in range(4)]
    scales = torch.exp2(torch.randint(-1, 2, (2, kv_heads), device=DEVICE).float()) if small else None
    slots = torch.randperm(144, device=DEVICE)[:tokens] + 16
    rope, own = reference_ops.rope_rows(table, positions), fused_ops.rope_rows(table, positions)
    wanted = reference_ops.qk_norm_rope_store(qkv.clone(), weight, 1e-6, rope, caches[0], caches[1], slots, scales)
    mine = qkv.clone()
    got = fused_ops.qk_norm_rope_store(mine, weight, 1e-6, own, caches[2], caches[3], slots, scales)
    assert error(got, wanted) < 1e-3
    assert error(caches[2].float(), caches[0].float()) < (ROUNDED_APART if small else 1e-3)
    assert torch.equal(caches[3].view(torch.uint8), caches[1].view(torch.uint8))
    # What attention relies on: keys stand rotated behind the queries, and values behind those, as the cache has them.
    keys, values = (at(cache, slots) for cache in caches[2:])
    if scales is not None:
        keys, values = (kv_fp8.dequantise(x, scale, DTYPE) for x, scale in zip((keys, values), scales, strict=True))
    else:
        assert torch.equal(values, qkv.view(tokens, -1, dim)[:, heads + kv_heads :])
    rotated = mine.view(tokens, -1, dim)
    assert torch.equal(rotated[:, heads : heads + kv_heads], keys)
    assert torch.equal(rotated[:, heads + kv_heads :], values)


@pytest.mark.parametrize("n,k", [(4096, 1024), (1000, 2560), (1024, 3072), (4096, 12288), (70_001, 512)])
def test_gemv_equals_a_matrix_product(n: int, k: int) -> None:
    x, w, weight, residual = normal(1, k), normal(n, k, std=0.02), normal(k), normal(1, n)
    exact = x.double() @ w.double().T
    assert error(gemv(x, w), exact) < BOUND
    assert error(gemv(x, w, residual=residual), exact + residual.double()) < BOUND
    normed = reference_ops.norm(x, weight, 1e-6).double()
    assert error(gemv(x, w, norm=(weight, 1e-6)), normed @ w.double().T) < BOUND
    gate, up = (normed @ w[: n // 2 * 2].double().T).chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    assert error(gemv(x, w[: n // 2 * 2], norm=(weight, 1e-6), gate_up=True), wanted) < 2 * BOUND


@pytest.mark.parametrize(
    "m,n,k",
    [(m, n, k) for m in (2, 16, 33, 64, 100, 128, 225, 256) for n, k in ((1024, 3072), (4096, 4096), (200, 256))],
)
def test_split_linear_adds_up_to_a_matrix_product(m: int, n: int, k: int) -> None:
    x, w = normal(m, k), normal(n, k, std=0.02)
    form = split_linear.form_for(m, n, k)
    assert form is not None
    assert error(split_linear.split_linear(x, w, form).sum(0), x.double() @ w.double().T) < 1e-4


@pytest.mark.parametrize("vocab", [151_936, 1000])
def test_the_sampling_kernel_draws_what_the_sampler_draws(vocab: int) -> None:
    """Every mixture of settings; rows whose logits are bad are marked, padding is left alone."""
    asked = [
        SamplingParams(temperature=0.0), SamplingParams(temperature=0.7), SamplingParams(temperature=0.8, top_k=5),
        SamplingParams(top_p=0.3), SamplingParams(min_p=0.1), SamplingParams(top_k=50, top_p=0.5, temperature=1.3),
        SamplingParams(temperature=0.01, top_p=0.9), SamplingParams(top_k=1), SamplingParams(temperature=3.0),
    ]
    n = len(asked)
    sampler = Sampler(n + 2, vocab, DEVICE, lambda array: torch.from_numpy(array.copy()).to(DEVICE))
    order = np.random.default_rng(0).permutation(n + 2)[:n].astype(np.int32)
    for row, params in zip(order.tolist(), asked, strict=True):
        request = Request(id=1, ids=[1, 2], params=params, seed=row * 1000 + 7, max_total=100, prompt_len=2, row=row)
        sampler.set_row(RowSettings.of(request))
    settings, keys, top_k = (torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE) for a in sampler.host_settings())
    workspace = sample.SampleWorkspace(n + 1, vocab, DEVICE)
    rows = torch.from_numpy(np.append(order, 0)).to(DEVICE)
    differences = 0
    for trial in range(20):
        torch.manual_seed(trial)
        logits = normal(n + 1, vocab, std=2.0)
        bad = trial % n
        if trial >= 15:
            logits[bad, trial] = (float("nan"), float("inf"))[trial % 2]
        lengths = torch.randint(3, 3000, (n + 1,), dtype=torch.int32, device=DEVICE)
        lengths[n] = 0
        outcome = torch.full((n + 1,), -99, dtype=torch.int64, device=DEVICE)
        last = torch.full((n + 2,), -5, dtype=torch.int64, device=DEVICE)
        sample.draw(
            logits, rows, lengths, settings, top_k.to(torch.int32), keys, outcome, last, workspace, noisy=True,
            truncated=True,
        )
        wanted = sampler.sample(
            logits[:n].float(), order, lengths[:n].cpu().numpy().astype(np.int64), rows[:n].long(), lengths[:n].long()
        )
        assert outcome[n] == -99
        good = ~wanted.bad
        assert torch.equal(outcome[:n] < 0, wanted.bad)
        assert bool(wanted.bad[bad]) == (trial >= 15)
        differences += int((outcome[:n][good] != wanted.ids[good]).sum())
        chosen = torch.where(outcome[:n] < 0, -1 - outcome[:n], outcome[:n])
        assert torch.equal(last[rows[:n].long()], chosen)
    assert differences <= 1  # two roundings of a logarithm may part a near-tie; anything else would show every time
