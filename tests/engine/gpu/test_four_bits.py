"""Weights of 4 bits on a GPU: the products of the numbers, and models that compute what their matrices stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.llm import LLM
from engine.model import ops as reference_ops
from engine.model.config import ExpertsConfig
from engine.model.experts import Experts
from engine.model.four_bits import Int4Tiles
from engine.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.kernels import four_bits, moe, moe_int4  # noqa: E402
from engine.kernels.moe_route import route  # noqa: E402
from engine.kernels.moe_tiles import tiles_for  # noqa: E402
from engine.worker.graphs import fused_ops as ops  # noqa: E402
from tests.engine.gpu.test_eight_bits import LENGTHS, SHAPE_8, STORED, distance  # noqa: E402
from tests.engine.gpu.test_engine import OPTIONS, ids_of  # noqa: E402
from tests.engine.gpu.test_kernels import BOUND, DEVICE, DTYPE, error, normal  # noqa: E402
from tests.engine.gpu.test_moe import chosen_in, sum_of  # noqa: E402
from tests.engine.gpu.test_moe_fp8 import SIZES, assert_near  # noqa: E402
from tests.engine.model.test_packed import FOUR_BITS  # noqa: E402
from tests.support.models import Driver, make_runner, reference, save  # noqa: E402
from tests.support.packing import FORMATS, quantise  # noqa: E402
from tests.support.parity import below_best  # noqa: E402

SHAPES = [(128, 128, 32, True), (1024, 1152, 64, False), (4096, 4096, 128, False), (2048, 12288, 64, True),
          (4096, 12288, 128, True), (4096, 5120, 32, False), (17408, 1024, 128, False)]


def matrix(n: int, k: int, group: int, offsets: bool, narrow: bool = False) -> tuple[Int4Tiles, torch.Tensor]:
    """A random matrix, and its values in float64. Row 3 has small numbers, row 4 has zeros. `narrow`: the others are
    about as large as those of a model."""
    kind = type("Kind", (Int4Tiles,), {"__slots__": (), "group": group, "with_offsets": offsets})
    weight = kind.empty(n, k, DEVICE)
    across = torch.full((n,), k**-0.5 / 8) if narrow else torch.logspace(-2, 2, n)
    scales = (torch.rand(n, k // group, device=DEVICE) + 0.1) * across.to(DEVICE)[:, None]
    scales[3], scales[4] = 1e-6, 0
    moved = torch.randint(-7, 9, scales.shape, device=DEVICE) if offsets else None
    weight.store(0, torch.randint(0, 16, (n, k), dtype=torch.uint8, device=DEVICE), scales, moved)
    return weight, weight.dense()


@pytest.mark.parametrize("n,k,group,offsets", SHAPES)
def test_products_are_those_of_the_numbers(n: int, k: int, group: int, offsets: bool) -> None:
    weight, wide = matrix(n, k, group, offsets)
    x, norm, residual = normal(1, k), normal(k), normal(1, n)
    assert error(four_bits.one(x, weight), x.double() @ wide.T) < BOUND
    assert error(four_bits.one(x, weight, residual=residual), x.double() @ wide.T + residual.double()) < BOUND
    normed = reference_ops.norm(x, norm, 1e-6).double()
    if n % 256 == 0:
        gate, up = (normed @ wide.T).chunk(2, -1)
        assert error(four_bits.one(x, weight, norm=(norm, 1e-6), gate_up=True), F.silu(gate) * up) < 2 * BOUND
    for m in (2, 16, 33, 64, 100, 160, 256, 300):
        x, out = normal(m, k), torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        assert error(four_bits.product(x, weight, out), x.double() @ wide.T) < BOUND
        parts = four_bits.back_to_hidden(x, weight)
        assert error(parts.view(-1, m, n).sum(0), x.double() @ wide.T) < BOUND
        gate_up = normal(m, 2 * k)
        inner = reference_ops.silu_mul(gate_up.clone()).double()
        found = four_bits.back_to_hidden(gate_up, weight, silu=True, in_parts=False)
        assert error(found, inner @ wide.T) < 2 * BOUND
    assert four_bits.product(normal(0, k), weight).shape == (0, n)


@pytest.mark.parametrize("m", [2, 33, 64])
def test_factors_of_a_row_may_be_far_apart_and_0(m: int) -> None:
    weight, scales = Int4Tiles.empty(256, 4096, DEVICE), 10 ** (-30 * torch.rand(256, 32, device=DEVICE))
    scales[4] = 0
    weight.store(0, torch.randint(0, 16, (256, 4096), dtype=torch.uint8, device=DEVICE), scales, None)
    assert 0.5 < (weight.groups == 0).double().mean() < 0.9
    x = normal(m, 4096)
    exact = x.double() @ weight.dense().T
    for found in (four_bits.product(x, weight), four_bits.back_to_hidden(x, weight).view(-1, m, 256).sum(0)):
        off = (found.double() - exact).norm(dim=0)
        assert (off <= BOUND * exact.norm(dim=0) + 1e-9).all()


@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 300, 2500])
@pytest.mark.parametrize(
    "shape", [(128, 8, 512, 384, 128, False), (6, 3, 256, 384, 32, True), (9, 4, 2048, 768, 64, True)]
)
def test_experts_of_4_bits_are_multiplied_as_they_are(tokens: int, shape: Any) -> None:
    count, per_token, hidden, inner, group, offsets = shape
    config = ExpertsConfig(count, per_token, inner, True, (True,))
    experts, exact = (Experts(config, size, DTYPE, DEVICE, ops) for size in (hidden, 1))
    experts.router.normal_(0, hidden**-0.5)
    (experts.gate_up, wide), (experts.down, wide_down) = (
        matrix(count * n, k, group, offsets, narrow=True) for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    exact.gate_up, exact.down = wide.view(count, 2 * inner, hidden), wide_down.view(count, hidden, inner)
    x = normal(tokens, hidden)
    for pairs in (1, 20, 40, 500):  # of each expert
        tiles = tiles_for(pairs, 1, 1, 4)
        routes = route(x, experts.router, per_token, True, experts.load, tiles.rows)
        wanted = sum_of(exact, x, routes.weights, chosen_in(routes, tokens * per_token).view(tokens, per_token))
        each = moe_int4.products(x, experts.gate_up, experts.down, routes, tiles)
        assert error(moe.total(each), wanted) < 2.5 * BOUND
        assert torch.equal(each, moe_int4.products(x, experts.gate_up, experts.down, routes, tiles))
    x[0] = torch.nan
    found = experts(x)
    assert not found[0].isfinite().any() and found[1:].isfinite().all()


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}])
@pytest.mark.parametrize("name", ["awq", "symmetric"])
def test_a_checkpoint_with_experts_of_4_bits_is_computed_as_it_is(
    name: str, path: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, name, FOUR_BITS[name])
    theirs = reference("qwen3_moe", **SIZES).bfloat16()
    quantise(theirs, save(theirs, tmp_path / "plain"), tmp_path / "m", name)
    llm = LLM(str(tmp_path / "m"), **{**OPTIONS, "dummy_weights": False, **path})
    layers = llm.engine.runner.loaded.model.layers  # type: ignore[attr-defined]
    assert all(isinstance(layer.mlp.gate_up, Int4Tiles) and isinstance(layer.mlp.down, Int4Tiles) for layer in layers)
    assert_near(llm, tmp_path / "m", (0.06, 0.06, 0.06))


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}])
def test_experts_are_rounded_to_4_bits_and_tokens_are_drawn_that_are_good_when_they_are_read(
    path: dict[str, Any], tmp_path: Path
) -> None:
    directory = save(reference("qwen3_moe", **SIZES).bfloat16(), tmp_path / "m")
    llm = LLM(str(directory), **{**OPTIONS, "dummy_weights": False, "quantization": "int4", **path})
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 5000, int(rng.integers(20, 300))).tolist() for _ in range(20)]
    replies = ids_of(llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), False))
    assert max(below_best(llm, texts, replies)) < 0.2


def test_a_row_that_is_not_finite_shows_and_changes_no_other() -> None:
    weight, _ = matrix(256, 512, 64, offsets=True)
    for m in (1, 5, 100, 300):
        x = normal(m, 512)
        clean = four_bits.product(x, weight)
        x[0, 5] = torch.nan
        found = four_bits.product(x, weight)
        assert not found[0].isfinite().any() and torch.equal(found[1:], clean[1:])


def test_own_numbers_are_near_the_matrix() -> None:
    wide = normal(512, 1024)
    weight = Int4Tiles.empty(512, 1024, DEVICE)
    weight.copy_(wide)
    share = (weight.dense() - wide.double()).square().sum() / wide.double().square().sum()
    assert 0.006 < share < 0.011


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}, {"speculation": "prompt-lookup"}])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_tokens_are_drawn_that_are_good_when_they_are_read(path: dict[str, Any], count: int, tmp_path: Path) -> None:
    """Replies are decoded by the kernels for few tokens, and read as prompts by cuBLAS."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE_8))
    rng = np.random.default_rng(count)
    texts = [rng.integers(0, 5000, int(rng.integers(20, 300))).tolist() for _ in range(count)]
    llm = LLM(str(tmp_path), **OPTIONS, quantization="int4", **path)
    replies = ids_of(llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), False))
    assert max(below_best(llm, texts, replies)) < 0.2, "the spread of the log-probabilities is about 3"


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_checkpoint_of_4_bits_is_computed_as_it_is(
    name: str, path: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of log-probabilities as a share of their spread. No number of the layers is rounded again."""
    monkeypatch.setitem(FORMATS, name, FOUR_BITS[name])
    theirs = reference("qwen3", **STORED).bfloat16()
    quantise(theirs, save(theirs, tmp_path / "plain"), tmp_path / "m", name)
    exact = Driver(make_runner(tmp_path / "m", "float64", num_blocks=200, max_model_len=512))
    llm = LLM(str(tmp_path / "m"), **{**OPTIONS, "dummy_weights": False, **path})
    loaded = llm.engine.runner.loaded  # type: ignore[attr-defined]
    assert loaded.quantization == "int4"
    for ours, whole in zip(loaded.model.slots(), exact.runner.loaded.model.slots(), strict=True):
        if "layers" in ours.name and ours.name.endswith("proj.weight"):
            assert isinstance(ours.view, Int4Tiles)
            torch.testing.assert_close(ours.view.dense().cpu(), whole.view, rtol=1e-3, atol=1e-7)
    for row, length in enumerate(LENGTHS):
        assert distance(llm, exact, row, np.random.default_rng(row).integers(0, 5000, length).tolist()) < 0.05
