"""Weights of 8 bits on a GPU: the products of the rounded matrices, and a model that is near the one in bfloat16."""

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
from engine.model.linear import Fp8Blocks, Fp8Weight, GpuWeight, Int8Rows, embed
from engine.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.kernels import eight_bits, eight_bits_many  # noqa: E402
from engine.kernels.gemv import gemv  # noqa: E402
from tests.engine.gpu.test_engine import OPTIONS, SHAPE, ids_of  # noqa: E402
from tests.engine.gpu.test_kernels import BOUND, DEVICE, error, normal  # noqa: E402
from tests.support.models import Driver, make_request, make_runner, reference, save  # noqa: E402
from tests.support.packing import FORMATS, quantise  # noqa: E402
from tests.support.parity import below_best, our_logits  # noqa: E402

SHAPE_8 = {**SHAPE, "vocab_size": 5008, "initializer_range": 0.02}


def rounded(n: int, k: int, kind: type[GpuWeight] = Fp8Weight) -> tuple[GpuWeight, torch.Tensor]:
    """A random matrix, and its values in float64. Every number of its type occurs in it."""
    weight = kind.empty(n, k, DEVICE)
    across = torch.logspace(-1, 1, k, device=DEVICE) if kind is Fp8Blocks else 1
    weight.copy_(normal(n, k, std=0.02) * torch.logspace(-2, 2, n, device=DEVICE)[:, None] * across)
    numbers = 256 if kind is Int8Rows else 127  # 127 would be the NaN of e4m3
    weight.values[0] = torch.arange(k, device=DEVICE).remainder(numbers).to(torch.uint8).view(kind.dtype)
    return weight, weight.wide(torch.float64)


SHAPES = ((4096, 1024), (1000, 2560), (1024, 3072), (4096, 12288), (70_000, 512))
ROWS = [(kind, n, k) for kind in (Fp8Weight, Int8Rows) for n, k in SHAPES]
BLOCKS = [(Fp8Blocks, n, k) for n, k in ((4096, 1024), (256, 2560), (6144, 4096), (24576, 4096), (4096, 12288))]


@pytest.mark.parametrize("kind,n,k", ROWS + BLOCKS)
def test_gemv_equals_the_product_of_the_rounded_matrix(kind: type[GpuWeight], n: int, k: int) -> None:
    weight, wide = rounded(n, k, kind)
    x, norm, residual = normal(1, k), normal(k), normal(1, n)
    assert error(gemv(x, weight), x.double() @ wide.T) < BOUND
    assert error(gemv(x, weight, residual=residual), x.double() @ wide.T + residual.double()) < BOUND
    normed = reference_ops.norm(x, norm, 1e-6).double()
    gate, up = (normed @ wide.T).chunk(2, -1)
    assert error(gemv(x, weight, norm=(norm, 1e-6), gate_up=True), F.silu(gate) * up) < 2 * BOUND


@pytest.mark.parametrize("m", [2, 16, 33, 64])
@pytest.mark.parametrize(
    "kind,n,k",
    [
        *((kind, n, k) for kind in (Fp8Weight, Int8Rows) for n, k in ((1024, 3072), (4096, 4096), (208, 256))),
        (Int8Rows, 30_000, 512), *BLOCKS,
    ],
)
def test_few_tokens_are_multiplied_with_the_rounded_matrix(m: int, kind: type[GpuWeight], n: int, k: int) -> None:
    weight, wide = rounded(n, k, kind)
    x = normal(m, k)
    exact = x.double() @ wide.T
    parts = eight_bits.back_to_hidden(x, weight)
    assert error(parts.sum(0) if parts.dim() == 3 else parts, exact) < (1e-3 if parts.dim() == 3 else BOUND)
    gate_up = normal(m, 2 * k)
    wanted = reference_ops.silu_mul(gate_up.clone()).double() @ wide.T
    parts = eight_bits.back_to_hidden(gate_up, weight, silu=True)
    assert error(parts.sum(0) if parts.dim() == 3 else parts, wanted) < BOUND
    assert eight_bits.back_to_hidden(gate_up, weight, silu=True, in_parts=False).shape == (m, n)
    out = torch.empty(m, n, dtype=x.dtype, device=DEVICE)
    assert error(eight_bits.byte_linear(x, weight, out), exact) < BOUND
    assert error(out, exact) < BOUND


@pytest.mark.parametrize("kind,n,k", [(Fp8Weight, 512, 1024), (Int8Rows, 512, 1024), (Int8Rows, 1008, 12288)])
@pytest.mark.parametrize("m", [65, 300, 2100])
def test_many_tokens_are_rounded_row_by_row(kind: type[GpuWeight], n: int, k: int, m: int) -> None:
    weight, wide = rounded(n, k, kind)
    x = normal(m, k) * torch.logspace(-3, 3, m, device=DEVICE)[:, None].to(torch.bfloat16)
    values, scale = eight_bits.round_rows(x, dtype=kind.dtype)
    assert error(values.float() * scale, x) < 0.04
    most = eight_bits.RANGES[kind.dtype][0]
    assert torch.equal(values.float().abs().amax(1), torch.full((m,), most, device=DEVICE))
    exact = (values.double() * scale.double()) @ wide.T
    assert error(eight_bits.byte_linear(x, weight), exact) < BOUND
    out = torch.empty(m, n, dtype=x.dtype, device=DEVICE)
    assert torch.equal(eight_bits.byte_linear(x, weight, out), out)
    gate_up = normal(m, 2 * k)
    inner = reference_ops.silu_mul(gate_up.clone())
    assert error(eight_bits.back_to_hidden(gate_up, weight, silu=True), inner.double() @ wide.T) < 0.05


def test_two_whole_numbers_are_an_activation_more_precisely_than_bfloat16() -> None:
    x = normal(64, 4096)
    values, scale = eight_bits.round_rows(x, both=True, dtype=torch.int8)
    high, low = values.double().chunk(2)
    assert ((high + low / 254) * scale - x.double()).abs().div(scale).max() < 1 / 500
    assert low.abs().max() > 120


@pytest.mark.parametrize("m", [65, 128, 300, 1502])
@pytest.mark.parametrize("n,k", [(256, 384), (4096, 4096), (6144, 1024)])
def test_many_tokens_are_rounded_in_groups_of_columns(m: int, n: int, k: int) -> None:
    """A column that is a thousand times as large costs precision in its own group only."""
    weight, wide = rounded(n, k, Fp8Blocks)
    x = normal(m, k) * torch.logspace(-3, 3, m, device=DEVICE)[:, None].to(torch.bfloat16)
    x[:, 5] *= 1000
    values, scale = eight_bits_many.round_groups(x)
    assert scale.shape == (k // 128, len(values)) and len(values) == -(-m // 4) * 4
    again = values[:m].double() * scale[:, :m].t().double().repeat_interleave(128, 1)
    assert error(again[:, 128:], x[:, 128:]) < 0.04
    assert error(eight_bits.byte_linear(x, weight), again @ wide.T) < BOUND
    assert error(eight_bits_many.tiled(values, scale, weight)[:m], again @ wide.T) < BOUND
    out = torch.empty(m, n, dtype=x.dtype, device=DEVICE)
    assert torch.equal(eight_bits.byte_linear(x, weight, out), eight_bits.byte_linear(x, weight))
    gate_up = normal(m, 2 * k)
    inner = reference_ops.silu_mul(gate_up.clone())
    assert error(eight_bits.back_to_hidden(gate_up, weight, silu=True), inner.double() @ wide.T) < 0.05


@pytest.mark.parametrize("kind", [Fp8Weight, Fp8Blocks, Int8Rows])
def test_a_row_that_is_not_finite_shows_and_changes_no_other(kind: type[GpuWeight]) -> None:
    weight, _ = rounded(128, 256, kind)
    for m in (1, 5, 70):
        x = normal(m, 256)
        x[0, 3] = torch.nan
        product = eight_bits.byte_linear(x, weight)
        assert not product[0].isfinite().any()
        assert product[1:].isfinite().all()


def test_a_step_without_draws_multiplies_nothing(model: str) -> None:
    weight, _ = rounded(128, 256)
    assert eight_bits.byte_linear(normal(0, 256), weight).shape == (0, 128)
    llm = LLM(model, **OPTIONS, quantization="fp8")
    text = np.random.default_rng(0).integers(0, 5000, 1300).tolist()  # three chunks, of which the last draws
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(ids_of(llm.generate([text], params, use_tqdm=False))[0]) == 4


@pytest.mark.parametrize("kind,n,k", [(Fp8Weight, 100, 64), (Fp8Blocks, 256, 128), (Int8Rows, 100, 64)])
def test_an_embedding_is_the_rounded_row(kind: type[GpuWeight], n: int, k: int) -> None:
    weight, wide = rounded(n, k, kind)
    ids = torch.tensor([3, 99, 0], device=DEVICE)
    assert error(embed(ids, weight), wide[ids]) < BOUND


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("gpu-fp8")
    (directory / "config.json").write_text(json.dumps(SHAPE_8))
    return str(directory)


def logprobs(llm: LLM, texts: list[list[int]]) -> np.ndarray:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate(texts, params, use_tqdm=False)
    listed = (found for output in outputs for found in output.prompt_logprobs or () if found)
    return np.array([next(iter(found.values())).logprob for found in listed])


def distance(llm: LLM, exact: Driver, row: int, text: list[int]) -> float:
    """The error of a text's log-probabilities, root mean square, as a share of the spread of the exact ones."""
    wanted = our_logits(exact, make_request(text, row), [len(text)]).log_softmax(-1)
    difference = logprobs(llm, [text]) - wanted[torch.arange(len(text) - 1), torch.tensor(text[1:])].numpy()
    found = float(np.sqrt(np.mean(difference**2)) / wanted.std())
    print(f"{len(text)} tokens: {found:.4f} of the spread {wanted.std():.2f}")
    return found


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}, {"speculation": "prompt-lookup"}])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_every_path_draws_tokens_that_are_good_in_bfloat16(model: str, path: dict[str, Any], count: int) -> None:
    """bfloat16 reads each reply as a prompt: how far was each token from its best, rounding of weights included?"""
    rng = np.random.default_rng(count)
    texts = [rng.integers(0, 5000, int(rng.integers(20, 300))).tolist() for _ in range(count)]
    llm, plain = LLM(model, **OPTIONS, quantization="fp8", **path), LLM(model, **OPTIONS)
    assert llm.engine.runner.loaded.model.nbytes < 0.52 * plain.engine.runner.loaded.model.nbytes
    replies = ids_of(llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), False))
    assert max(below_best(plain, texts, replies)) < 0.3, "the spread of the log-probabilities is about 3"
    again = [text + reply for text, reply in zip(texts, replies, strict=True)]
    difference = np.abs(logprobs(llm, again) - logprobs(plain, again))
    assert 0 < difference.mean() < 0.05


# ---- checkpoints with 8-bit numbers

STORED = {
    "vocab_size": 5008, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}
KEPT = ("fp8 rows", "fp8 tensor", "fp8 blocks of 128", "int8 rows", "int8 tensor")
LENGTHS = (40, 300)  # tokens of a prompt: fewer than SKINNY, and more
CASES: list[tuple[str, dict[str, Any], tuple[float, float]]] = [
    *((name, {}, (0.03, 0.2)) for name in KEPT),
    *((name, {"enforce_eager": True}, (0.03, 0.2)) for name in KEPT),
    *((name, {"enforce_eager": True, "quantization": "none"}, (0.03, 0.03)) for name in FORMATS),
    ("awq", {"enforce_eager": True, "quantization": "fp8"}, (0.2, 0.3)),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    theirs = reference("qwen3", **STORED).bfloat16()
    return theirs, save(theirs, tmp_path_factory.mktemp("gpu-stored"))


def computed_as_stored(name: str) -> bool:
    return torch.cuda.get_device_capability() >= ((8, 0) if name.startswith("int8") else (8, 9))


@pytest.mark.parametrize("name,options,bounds", CASES)
def test_a_quantised_checkpoint_is_near_its_expanded_matrices_in_float64(
    name: str, options: dict[str, Any], bounds: tuple[float, float], source: tuple[Any, Path], tmp_path: Path
) -> None:
    """The error of log-probabilities as a share of their spread. Weights that are kept have no error."""
    theirs, plain = source
    quantise(type(theirs)(theirs.config), plain, tmp_path / "m", name)
    exact = Driver(make_runner(tmp_path / "m", "float64", num_blocks=200, max_model_len=512))
    llm = LLM(str(tmp_path / "m"), **{**OPTIONS, "dummy_weights": False, **options})
    kept = [isinstance(layer.qkv, GpuWeight) for layer in llm.engine.runner.loaded.model.layers]  # type: ignore[attr-defined]
    assert kept == [options.get("quantization") != "none" and computed_as_stored(name)] * 3
    for row, (length, bound) in enumerate(zip(LENGTHS, bounds, strict=True)):
        assert distance(llm, exact, row, np.random.default_rng(row).integers(0, 5000, length).tolist()) < bound
