"""Mixtures of experts on a GPU: the kernels against float64, and whole engines against the readable form.

The router's choice is compared where rounding leaves it no doubt, the products for the experts that were chosen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.model import ops as reference_ops
from engine.model.config import ExpertsConfig
from engine.model.experts import Experts
from engine.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
triton = pytest.importorskip("triton")

from engine.kernels import moe  # noqa: E402
from engine.kernels.gemv import gemv  # noqa: E402
from engine.kernels.moe_one import one_token  # noqa: E402
from engine.kernels.moe_route import Routes, route  # noqa: E402
from engine.kernels.moe_tiles import tiles_for  # noqa: E402
from engine.worker.graphs import fused_ops as ops  # noqa: E402
from tests.engine.gpu.test_engine import OPTIONS, greedy, ids_of  # noqa: E402
from tests.engine.gpu.test_kernels import DEVICE, DTYPE, error, normal  # noqa: E402
from tests.support.parity import below_best  # noqa: E402

BOUND = 8e-3  # relative error in bfloat16: two roundings of the inner values, and one of each expert's output
SHAPES = [(128, 8, 512, 192, True), (6, 3, 96, 40, False), (5, 1, 64, 64, True), (60, 4, 256, 88, False)]
TOKENS = [1, 2, 7, 17, 64, 300, 2500]


def mixture(count: int, per_token: int, hidden: int, inner: int, normalised: bool, ops: Any = reference_ops) -> Experts:
    experts = Experts(ExpertsConfig(count, per_token, inner, normalised, (True,)), hidden, DTYPE, DEVICE, ops)
    experts.router.normal_(0, hidden**-0.5)
    experts.gate_up.normal_(0, hidden**-0.5)
    experts.down.normal_(0, inner**-0.5)
    return experts


def sum_of(experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Float64: what these experts [T, K] with these weights make of x."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for expert in range(experts.config.count):
        t, k = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[t].double() @ experts.gate_up[expert].double().T).chunk(2, 1)
        y = (torch.nn.functional.silu(gate) * up) @ experts.down[expert].double().T
        out.index_add_(0, t, y * weights[t, k, None].double())
    return out


def chosen_in(routes: Routes, pairs: int) -> torch.Tensor:
    """[pairs]: the expert in whose tiles each pair lies; every pair lies in one place."""
    found = torch.full((pairs,), -1, dtype=torch.int64)
    for expert, first, rows, _ in routes.tiles.tolist():
        mine = routes.order[first : first + rows].long().cpu()
        assert (found[mine] == -1).all()
        found[mine] = expert
    return found.to(DEVICE)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("count,per_token,hidden,inner,normalised", SHAPES)
def test_pairs_are_grouped_by_the_experts_that_the_router_chooses(
    tokens: int, count: int, per_token: int, hidden: int, inner: int, normalised: bool
) -> None:
    experts = mixture(count, per_token, hidden, inner, normalised)
    x = normal(tokens, hidden)
    weights, chosen = experts.route(x)
    for rows in (16, 128):
        experts.load.zero_()
        routes = route(x, experts.router, per_token, normalised, experts.load, rows)
        mine = chosen_in(routes, tokens * per_token).view(tokens, per_token)
        assert (mine >= 0).all()
        assert int(routes.tiles[:, 2].max()) <= rows
        assert experts.load.tolist() == mine.flatten().bincount(minlength=count).tolist()
        same = (mine.sort(1).values == chosen.sort(1).values).all(1)
        assert same.float().mean() > 0.8  # the rest are near ties of rounded logits
        assert error(routes.weights[same].sort(1).values, weights[same].sort(1).values) < BOUND


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("count,per_token,hidden,inner,normalised", SHAPES)
def test_the_products_are_those_of_the_experts_chosen(
    tokens: int, count: int, per_token: int, hidden: int, inner: int, normalised: bool
) -> None:
    experts = mixture(count, per_token, hidden, inner, normalised)
    x = normal(tokens, hidden)
    for rows in (16, 32, 64, 128):
        tiles = tiles_for(rows * count // (2 * per_token), per_token, count)._replace(rows=rows)
        routes = route(x, experts.router, per_token, normalised, experts.load, rows)
        wanted = sum_of(experts, x, routes.weights, chosen_in(routes, tokens * per_token).view(tokens, per_token))
        each = moe.products(x, experts.gate_up, experts.down, routes, tiles)
        assert error(moe.total(each), wanted) < BOUND
        again = moe.products(x, experts.gate_up, experts.down, routes, tiles)
        assert torch.equal(each, again)


@pytest.mark.parametrize("tokens,live", [(7, 3), (64, 20), (64, 0), (300, 129), (16, 16)])
def test_padding_reaches_no_expert_and_the_order_of_pairs_changes_nothing(tokens: int, live: int) -> None:
    experts = mixture(16, 4, 256, 96, True, ops)
    x = normal(tokens, 256)
    wanted = experts(x)[:live]
    x[live:] = torch.nan
    for _ in range(3):
        experts.load.zero_()
        found = experts(x, torch.tensor([live], dtype=torch.int32, device=DEVICE))
        assert torch.equal(found[:live], wanted)
        assert not found[live:].any()
        assert int(experts.load.sum()) == 4 * live


def test_one_expert_may_get_all_tokens_and_a_bad_token_changes_no_other() -> None:
    experts = mixture(16, 2, 256, 96, True, ops)
    experts.router.zero_()
    experts.router[3] = 1
    x = normal(500, 256).abs()
    found = experts(x)
    chosen = torch.tensor([3, 0], device=DEVICE).expand(500, 2)  # of equals, the first
    assert error(found, sum_of(experts, x, experts.route(x)[0], chosen)) < BOUND
    assert experts.load.tolist() == [500, 0, 0, 500, *[0] * 12]
    x[7] = torch.nan
    again = experts(x)
    others = torch.arange(500, device=DEVICE) != 7
    assert torch.equal(again[others], found[others])
    assert again[7].isnan().all()


@pytest.mark.parametrize("count,per_token,hidden,inner,normalised", SHAPES)
def test_one_token_equals_norm_experts_and_residual(
    count: int, per_token: int, hidden: int, inner: int, normalised: bool
) -> None:
    experts = mixture(count, per_token, hidden, inner, normalised)
    live = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for _ in range(5):
        x, weight = normal(1, hidden), normal(hidden)
        normed = reference_ops.norm(x, weight, 1e-6)
        logits = gemv(x, experts.router, norm=(weight, 1e-6))
        experts.load.zero_()
        found = one_token(
            x, (weight, 1e-6), logits, experts.gate_up, experts.down, per_token, normalised, experts.load, live
        )
        chosen = experts.load.nonzero().flatten()
        kept = logits[0].sort(descending=True).values[:per_token]
        assert torch.equal(logits[0, chosen].sort(descending=True).values, kept)
        shares = logits[0].float().softmax(0)[chosen]
        shares = shares / shares.sum() if normalised else shares
        assert error(found, x.double() + sum_of(experts, normed, shares[None], chosen[None])) < BOUND


# ---- engines

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 5003, "hidden_size": 512,
    "intermediate_size": 1024, "moe_intermediate_size": 192, "num_experts": 24, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1], "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
PATHS: dict[str, dict[str, Any]] = {"graphs": {}, "kernel by kernel": {"enforce_eager": True}}
TOLERANCE = 0.15  # of a log-probability: where two experts are as good as equal, rounding chooses


def prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 5000, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count,longest", [(1, 700), (5, 100), (40, 500)])
def test_greedy_replies_are_those_of_the_readable_form(model: str, path: str, count: int, longest: int) -> None:
    llm, reference = LLM(model, **OPTIONS, **PATHS[path]), LLM(model, attention_backend="torch", **OPTIONS)
    asked = prompts(count, longest)
    replies = ids_of(llm.generate(asked, greedy(16), use_tqdm=False))
    llm.engine.check()
    short = below_best(reference, asked, replies)
    assert len(short) == 16 * count
    assert max(short) < TOLERANCE
    assert sum(value > 0 for value in short) < 0.15 * len(short)


@pytest.mark.parametrize("path", PATHS)
def test_the_records_count_every_token_and_no_padding(model: str, path: str) -> None:
    """Three sequences in graphs for four, prompts in graphs for more tokens than they have."""
    llm = LLM(model, **OPTIONS, **PATHS[path])
    runner = llm.engine.runner
    assert (runner.executors[0].num_graphs > 0) == (path == "graphs")
    asked = [[1, 2, 3, 4, 5], [7] * 20, [8, 9]]
    llm.engine.log.drain()
    llm.generate(asked, greedy(12), use_tqdm=False)
    runner.loaded._expert_load_due = 0.0
    llm.generate([[5]], greedy(1), use_tqdm=False)
    steps = [record for record in llm.engine.log.drain() if record[2] == "experts"]
    got: dict[int, int] = {}
    for record in steps:
        for layer, tokens in record[4]:
            assert len(tokens) == 24
            got[layer] = got.get(layer, 0) + sum(tokens)
    prompt = sum(map(len, asked)) + 1
    assert got == {0: 4 * (prompt + 3 * 11), 2: 4 * (3 * 12 + 1)}  # the last layer: whose logits are wanted
    assert math.isinf(runner.loaded._expert_load_due) is False


@pytest.mark.parametrize("kind", ["experts", "dense", "experts in 8 bits"])
def test_nothing_is_compiled_during_a_request(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of all sizes, alone and together, drawn in every way: each form of the kernels was made at the start."""
    shape = {**SHAPE, "hidden_size": 384, "moe_intermediate_size": 136, "intermediate_size": 1152}
    if kind == "dense":
        shape = {**shape, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if kind == "experts in 8 bits":
        stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        shape = {**shape, "moe_intermediate_size": 256, "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    llm = LLM(str(tmp_path), **{**OPTIONS, "max_num_batched_tokens": 1500})
    compiled: list[str] = []
    hook = "jit_post_compile_hook"
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda **found: compiled.append(found["fn"].name), raising=False)
    generator = torch.Generator().manual_seed(3)
    together = ([5, 40], [600, 31, 2], [33] * 40, [200] * 11)
    for sizes in ([1], [3], [17], [64], [90], [333], [700], [1501], [1999], *together):
        asked = [torch.randint(0, 5000, (size,), generator=generator).tolist() for size in sizes]
        params = [greedy(3), SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=2, top_p=0.9)]
        llm.generate(asked, [params[i % 3] for i in range(len(asked))], use_tqdm=False)
        assert not compiled, f"prompts of {sizes}"
    llm.engine.check()
