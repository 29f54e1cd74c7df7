"""Weights of 8 bits on a GPU: the products of the rounded matrices, and a model that is near the one in bfloat16."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.llm import LLM
from engine.model import ops as reference_ops
from engine.model.linear import Fp8Weight, embed
from engine.outputs import RequestOutput
from engine.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.kernels import fp8  # noqa: E402
from engine.kernels.gemv import gemv  # noqa: E402
from tests.engine.gpu.test_engine import OPTIONS, SHAPE, ids_of  # noqa: E402
from tests.engine.gpu.test_kernels import BOUND, DEVICE, error, normal  # noqa: E402

SHAPE_8 = {**SHAPE, "vocab_size": 5008, "initializer_range": 0.02}


def rounded(n: int, k: int) -> tuple[Fp8Weight, torch.Tensor]:
    """A random matrix, and its values in float64. Every value of e4m3 occurs in it."""
    weight = Fp8Weight.empty(n, k, DEVICE)
    weight.copy_(normal(n, k, std=0.02) * torch.logspace(-2, 2, n, device=DEVICE)[:, None])
    every = torch.arange(k, device=DEVICE).remainder(127).to(torch.uint8)  # 127 would be NaN
    weight.values[0] = every.view(torch.float8_e4m3fn)
    return weight, weight.values.double() * weight.scale.double()[:, None]


@pytest.mark.parametrize("n,k", [(4096, 1024), (1000, 2560), (1024, 3072), (4096, 12288), (70_000, 512)])
def test_gemv_equals_the_product_of_the_rounded_matrix(n: int, k: int) -> None:
    weight, wide = rounded(n, k)
    x, norm, residual = normal(1, k), normal(k), normal(1, n)
    assert error(gemv(x, weight), x.double() @ wide.T) < BOUND
    assert error(gemv(x, weight, residual=residual), x.double() @ wide.T + residual.double()) < BOUND
    normed = reference_ops.norm(x, norm, 1e-6).double()
    gate, up = (normed @ wide.T).chunk(2, -1)
    assert error(gemv(x, weight, norm=(norm, 1e-6), gate_up=True), F.silu(gate) * up) < 2 * BOUND


@pytest.mark.parametrize("m", [2, 16, 33, 64])
@pytest.mark.parametrize("n,k", [(1024, 3072), (4096, 4096), (208, 256)])
def test_few_tokens_are_multiplied_with_the_rounded_matrix(m: int, n: int, k: int) -> None:
    weight, wide = rounded(n, k)
    x = normal(m, k)
    exact = x.double() @ wide.T
    parts = fp8.back_to_hidden(x, weight)
    assert error(parts.sum(0) if parts.dim() == 3 else parts, exact) < (1e-3 if parts.dim() == 3 else BOUND)
    gate_up = normal(m, 2 * k)
    wanted = reference_ops.silu_mul(gate_up.clone()).double() @ wide.T
    parts = fp8.back_to_hidden(gate_up, weight, silu=True)
    assert error(parts.sum(0) if parts.dim() == 3 else parts, wanted) < BOUND
    out = torch.empty(m, n, dtype=x.dtype, device=DEVICE)
    assert error(fp8.fp8_linear(x, weight, out), exact) < BOUND
    assert error(out, exact) < BOUND


@pytest.mark.parametrize("m", [65, 300])
def test_many_tokens_are_rounded_row_by_row(m: int) -> None:
    weight, wide = rounded(512, 1024)
    x = normal(m, 1024) * torch.logspace(-3, 3, m, device=DEVICE)[:, None].to(torch.bfloat16)
    values, scale = fp8.round_rows(x)
    assert error(values.float() * scale, x) < 0.04
    assert torch.equal(values.float().abs().amax(1), torch.full((m,), 448.0, device=DEVICE))
    exact = (values.double() * scale.double()) @ wide.T
    assert error(fp8.fp8_linear(x, weight), exact) < BOUND


def test_a_row_that_is_not_finite_shows_and_changes_no_other() -> None:
    weight, _ = rounded(128, 256)
    for m in (1, 5, 70):
        x = normal(m, 256)
        x[0, 3] = torch.nan
        product = fp8.fp8_linear(x, weight)
        assert not product[0].isfinite().any()
        assert product[1:].isfinite().all()


def test_a_step_without_draws_multiplies_nothing(model: str) -> None:
    weight, _ = rounded(128, 256)
    assert fp8.fp8_linear(normal(0, 256), weight).shape == (0, 128)
    llm = LLM(model, **OPTIONS, quantization="fp8")
    text = np.random.default_rng(0).integers(0, 5000, 1300).tolist()  # three chunks, of which the last draws
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(ids_of(llm.generate([text], params, use_tqdm=False))[0]) == 4


def test_an_embedding_is_the_rounded_row() -> None:
    weight, wide = rounded(100, 64)
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
    return np.array([own for output in outputs for own, _ in own_and_best(output)])


def own_and_best(output: RequestOutput) -> list[tuple[float, float]]:
    """The log-probabilities of each prompt token but the first, and of the most likely token in its place."""
    listed = [list(found.values()) for found in output.prompt_logprobs or () if found]
    return [(found[0].logprob, max(each.logprob for each in found)) for found in listed]


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}, {"speculation": "prompt-lookup"}])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_every_path_draws_tokens_that_are_good_in_bfloat16(model: str, path: dict[str, Any], count: int) -> None:
    """bfloat16 reads each reply as a prompt: how far was each token from its best, rounding of weights included?"""
    rng = np.random.default_rng(count)
    texts = [rng.integers(0, 5000, int(rng.integers(20, 300))).tolist() for _ in range(count)]
    llm, plain = LLM(model, **OPTIONS, quantization="fp8", **path), LLM(model, **OPTIONS)
    assert llm.engine.runner.loaded.model.nbytes < 0.52 * plain.engine.runner.loaded.model.nbytes
    replies = ids_of(llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), False))
    again = [text + reply for text, reply in zip(texts, replies, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    short = []
    for text, output in zip(texts, plain.generate(again, params, use_tqdm=False), strict=True):
        short += [best - own for own, best in own_and_best(output)[len(text) - 1 :]]
    assert max(short) < 0.3, "the spread of the log-probabilities is about 3"
    difference = np.abs(logprobs(llm, again) - logprobs(plain, again))
    assert 0 < difference.mean() < 0.05
