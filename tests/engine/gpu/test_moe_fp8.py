"""Mixtures of experts whose weights are 8-bit floats: the kernels against float64, and engines with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.model import ops as reference_ops
from engine.model.config import ExpertsConfig
from engine.model.experts import Experts
from engine.model.linear import Fp8Blocks, Fp8Weight, GpuWeight

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.kernels import moe, moe_fp8  # noqa: E402
from engine.kernels.gemv import gemv  # noqa: E402
from engine.kernels.moe_one import one_token  # noqa: E402
from engine.kernels.moe_route import route  # noqa: E402
from engine.kernels.moe_tiles import tiles_for  # noqa: E402
from engine.worker.graphs import fused_ops as ops  # noqa: E402
from tests.engine.gpu.test_eight_bits import computed_as_stored, distance  # noqa: E402
from tests.engine.gpu.test_engine import OPTIONS, greedy, ids_of  # noqa: E402
from tests.engine.gpu.test_kernels import DEVICE, DTYPE, error, normal  # noqa: E402
from tests.engine.gpu.test_moe import BOUND, SHAPE, chosen_in, sum_of  # noqa: E402
from tests.support.families import checkpoint  # noqa: E402
from tests.support.models import Driver, make_runner, reference, save  # noqa: E402
from tests.support.packing import mxfp4, quantise  # noqa: E402
from tests.support.parity import below_best  # noqa: E402

SIZES = {key: SHAPE[key] for key in ("hidden_size", "head_dim", "max_position_embeddings")} | {
    "vocab_size": 5008, "moe_intermediate_size": 256, "num_experts": 6, "num_experts_per_tok": 6,
}
SHAPES_8 = [(128, 8, 512, 128, True), (6, 3, 256, 384, False), (60, 4, 2048, 768, True)]


def of_8_bits(kind: type[GpuWeight], *shape: Any) -> tuple[Experts, Experts]:
    """A mixture with random e4m3 weights, and the same mixture with expanded weights in float64."""
    count, per_token, hidden, inner, normalised = shape
    config = ExpertsConfig(count, per_token, inner, normalised, (True,))
    experts = Experts(config, hidden, DTYPE, DEVICE, ops, kind)
    experts.router.normal_(0, hidden**-0.5)
    across = torch.logspace(-1, 1, hidden, device=DEVICE)
    experts.gate_up.copy_(normal(count * 2 * inner, hidden, std=hidden**-0.5) * across)
    experts.down.copy_(normal(count * hidden, inner, std=inner**-0.5))
    exact = Experts(config, 1, torch.float64, DEVICE, reference_ops)
    exact.gate_up = experts.gate_up.wide(torch.float64).view(count, 2 * inner, hidden)
    exact.down = experts.down.wide(torch.float64).view(count, hidden, inner)
    return experts, exact


@pytest.mark.parametrize("kind", [Fp8Weight, Fp8Blocks])
@pytest.mark.parametrize("tokens", [2, 17, 64, 300, 2500])
@pytest.mark.parametrize("shape", SHAPES_8)
def test_weights_of_8_bits_are_multiplied_as_they_are(tokens: int, shape: Any, kind: type[GpuWeight]) -> None:
    """With few pairs in a tile as precisely as in bfloat16; with many, activations are rounded to 8 bits too."""
    experts, exact = of_8_bits(kind, *shape)
    _, per_token, hidden, *_ = shape
    x = normal(tokens, hidden)
    x[:, 5] *= 100
    for pairs in (1, 20, 40, 500):  # of each expert
        tiles = tiles_for(pairs, 1, 1, 8)
        routes = route(x, experts.router, per_token, True, experts.load, tiles.rows)
        wanted = sum_of(exact, x, routes.weights, chosen_in(routes, tokens * per_token).view(tokens, per_token))
        each = moe_fp8.products(x, experts.gate_up, experts.down, routes, tiles)
        assert error(moe.total(each), wanted) < (BOUND if tiles.narrow else 0.07)
    x[0] = torch.nan
    found = experts(x)
    assert not found[0].isfinite().any()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("kind", [Fp8Weight, Fp8Blocks])
@pytest.mark.parametrize("shape", SHAPES_8)
def test_one_token_equals_norm_experts_and_residual_in_8_bits(shape: Any, kind: type[GpuWeight]) -> None:
    experts, exact = of_8_bits(kind, *shape)
    _, per_token, hidden, _, normalised = shape
    x, weight = normal(1, hidden), normal(hidden)
    logits = gemv(x, experts.router, norm=(weight, 1e-6))
    live = torch.ones(1, dtype=torch.int32, device=DEVICE)
    found = one_token(
        x, (weight, 1e-6), logits, experts.gate_up, experts.down, per_token, normalised, experts.load, live
    )
    chosen = experts.load.nonzero().flatten()
    shares = logits[0].float().softmax(0)[chosen]
    shares = shares / shares.sum() if normalised else shares
    normed = reference_ops.norm(x, weight, 1e-6)
    assert error(found, x.double() + sum_of(exact, normed, shares[None], chosen[None])) < BOUND


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}])
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks of 128"])
def test_a_checkpoint_with_8_bit_experts_is_near_its_expanded_weights(
    name: str, path: dict[str, Any], tmp_path: Path
) -> None:
    """The error of log-probabilities as a share of their spread. Each token gets all experts: no choice is close."""
    theirs = reference("qwen3_moe", **SIZES).bfloat16()
    quantise(theirs, save(theirs, tmp_path / "plain"), tmp_path / "m", name)
    llm = LLM(str(tmp_path / "m"), **{**OPTIONS, "dummy_weights": False, **path})
    assert has_8_bits(llm) == computed_as_stored(name)
    assert_near(llm, tmp_path / "m", (0.03, 0.03, 0.2))


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_rounded_to_8_bits(stacked: bool, path: dict[str, Any], tmp_path: Path) -> None:
    """Most of the error comes from the embedding and the output matrix, which are rounded too."""
    directory = save(reference("qwen3_moe", **SIZES).bfloat16(), tmp_path / "m", stacked=stacked)
    llm = LLM(str(directory), **{**OPTIONS, "dummy_weights": False, "quantization": "fp8", **path})
    assert has_8_bits(llm)
    assert_near(llm, directory, (0.25, 0.25, 0.3))


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}])
def test_the_experts_of_gpt_oss_are_near_their_weights_in_float64(path: dict[str, Any], tmp_path: Path) -> None:
    """MXFP4 experts are expanded to bfloat16, which has them exactly. On a CPU, the PyTorch reference in bfloat16 is
    0.047, 0.059 and 0.090 away for these prompts."""
    sizes = {key: SHAPE[key] for key in SHAPE if key.startswith(("vocab", "hidden", "num_", "head", "max_"))}
    (tmp_path / "plain").mkdir()
    experts = {"num_local_experts": 6, "num_experts_per_tok": 6, "num_experts": ..., "intermediate_size": 256}
    checkpoint("gpt_oss", 0, tmp_path / "plain", **sizes | experts, layer_types=...)
    mxfp4(tmp_path / "plain", tmp_path / "m")
    llm = LLM(str(tmp_path / "m"), **{**OPTIONS, "dummy_weights": False, **path})
    assert_near(llm, tmp_path / "m", (0.06, 0.08, 0.12))


def has_8_bits(llm: LLM) -> bool:
    experts = [layer.mlp for layer in llm.engine.runner.loaded.model.layers]  # type: ignore[attr-defined]
    return all(isinstance(each, Experts) and isinstance(each.gate_up, GpuWeight) for each in experts)


def assert_near(llm: LLM, directory: Path, bounds: tuple[float, ...]) -> None:
    """Prompts of 1, 10 and 300 tokens: the log-probabilities are near those of the same weights in float64. Each expert
    gets all tokens, so with 300 tokens, activations are rounded to 8 bits too."""
    exact = Driver(make_runner(directory, "float64", num_blocks=200, max_model_len=512))
    for row, (length, bound) in enumerate(zip((1, 10, 300), bounds, strict=True)):
        text = torch.randint(0, 5000, (length,), generator=torch.Generator().manual_seed(row)).tolist()
        reply = ids_of(llm.generate([text], greedy(8), use_tqdm=False))[0]
        assert distance(llm, exact, row, text + reply) < bound
        short = below_best(llm, [text], [reply])
        assert sum(short) / len(short) < 2 * bound
