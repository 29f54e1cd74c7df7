"""Mixtures of experts: Qwen3-MoE against transformers on tiny random models, the loader, the counts.

fp32: logits within 2e-5 of their largest magnitude. float64: the same greedy tokens.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import choose_parts
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.model import ops
from engine.model.config import ExpertsConfig
from engine.model.decoder import Decoder, DenseMLP
from engine.model.experts import Experts
from engine.model.hf.config import read_model_config
from engine.model.weights import dummy_weights
from tests.support.models import Driver, load_decoder, make_request, make_runner, prompt, reference, rewrite, save
from tests.support.parity import (
    PROMPT,
    Checkpoints,
    assert_close,
    assert_parity,
    checkpoints_of,
    our_logits,
    their_logits,
)

MODELS: dict[str, dict[str, Any]] = {
    "as they come": {"norm_topk_prob": False},
    "every second layer": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "some layers dense": {"num_hidden_layers": 3, "mlp_only_layers": [0, 2], "tie_word_embeddings": True},
    "one expert each": {"num_experts_per_tok": 1, "num_experts": 3, "attention_bias": True},
    "windows": {"use_sliding_window": True, "sliding_window": 9},
}
SPARSE_LAYERS = {"every second layer": [1, 3], "some layers dense": [1]}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return checkpoints_of({name: ("qwen3_moe", fields) for name, fields in MODELS.items()}, tmp_path_factory)


# ---- the model


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_whole_and_in_chunks(name: str, checkpoints: Checkpoints) -> None:
    model, directory = checkpoints(name)
    driver = Driver(make_runner(directory))
    layers = driver.runner.loaded.model.layers
    sparse = [i for i, layer in enumerate(layers) if isinstance(layer.mlp, Experts)]
    assert sparse == SPARSE_LAYERS.get(name, list(range(len(layers))))
    assert_parity(model, driver)


# ---- the router


def experts_of(per_token: int, normalised: bool) -> Experts:
    experts = Experts(ExpertsConfig(5, per_token, 3, normalised, (True,)), 4, torch.float64, CPU, ops)
    torch.manual_seed(0)
    for slot in experts.slots(""):
        slot.view.normal_()
    return experts


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_experts_are_summed_with_their_weights(tokens: int) -> None:
    """Token by token and expert by expert, as the formula has it; and each expert's tokens are counted."""
    experts = experts_of(3, False)
    x = torch.randn(tokens, 4, dtype=torch.float64)
    weights, chosen = experts.route(x)
    expected = torch.zeros_like(x)
    for t in range(tokens):
        for weight, expert in zip(weights[t], chosen[t].tolist(), strict=True):
            gate, up = (experts.gate_up[expert] @ x[t]).chunk(2)
            expected[t] += weight * (experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(experts(x.clone()), expected)
    assert experts.load.tolist() == [chosen.flatten().tolist().count(expert) for expert in range(5)]


def test_a_token_with_nan_changes_no_other() -> None:
    experts = experts_of(2, True)
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = experts(x)
    x[1] = torch.nan
    found = experts(x)
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])
    assert found[1].isnan().all()


def test_the_load_of_the_experts_can_be_read_after_each_step(checkpoints: Checkpoints) -> None:
    _, directory = checkpoints("some layers dense")
    driver = Driver(make_runner(directory))
    requests = [make_request(prompt(row, 9), row) for row in range(2)]
    driver.run([(request, 9, True) for request in requests])
    load = driver.result.expert_load
    assert load is not None
    assert [(layer, len(tokens), sum(tokens)) for layer, tokens in load] == [(1, 6, 18 * 2)]  # the other layer is dense
    driver.runner.loaded._expert_load_due = math.inf
    for _ in range(3):  # within a quarter of a second: one report, at its end
        driver.run([(request, 1, True) for request in requests])
        assert driver.result.expert_load is None
    driver.runner.loaded._expert_load_due = 0.0
    driver.run([(request, 1, True) for request in requests])
    assert driver.result.expert_load is not None
    assert sum(driver.result.expert_load[0][1]) == 4 * 2 * 2


# ---- the loader


def test_published_config_fields_are_read_in_both_spellings(tmp_path: Path) -> None:
    directory = save(reference("qwen3_moe"), tmp_path)
    new = read_model_config(directory)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    assert raw["num_local_experts"] == 6
    raw["num_experts"] = raw.pop("num_local_experts")
    del raw["architectures"]
    path.write_text(json.dumps(raw))
    assert read_model_config(directory) == new
    assert new.experts == ExpertsConfig(6, 2, 40, False, (True, True))


def test_missing_and_misshapen_experts_are_named(tmp_path: Path) -> None:
    directory = save(reference("qwen3_moe"), tmp_path / "apart")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.zeros(64, 39)

    rewrite(directory, change)
    message = r"lacks model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight; .*down_proj\.weight is \[64, 39\] and should"
    with pytest.raises(CheckpointError, match=message):
        load_decoder(directory)
    directory = save(reference("qwen3_moe"), tmp_path / "stacked", edit={"num_local_experts": 5}, stacked=True)
    with pytest.raises(CheckpointError, match=r"gate_up_proj is \[6, 80, 64\] and should be \[5, 80, 64\]"):
        load_decoder(directory)


def test_dummy_weights_fill_every_expert(checkpoints: Checkpoints) -> None:
    _, directory = checkpoints("some layers dense")
    model = Decoder(read_model_config(directory), torch.float32, CPU, 16)
    for slot in model.slots():
        slot.view.fill_(torch.nan)
    dummy_weights(model.slots(), 0)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, Experts)
    for expert in (*mlp.gate_up, *mlp.down):
        assert 0.017 < float(expert.std()) < 0.023
    assert isinstance(model.layers[0].mlp, DenseMLP)
    assert not any(slot.view.isnan().any() for slot in model.slots())


# ---- the configuration


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_the_model_has_them(name: str, checkpoints: Checkpoints) -> None:
    model, directory = checkpoints(name)
    config = read_model_config(directory)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert config.experts is not None
    idle = config.experts.count - config.experts.per_token
    expert = 3 * config.hidden_size * config.experts.inner_size
    assert config.num_parameters - config.active_parameters == idle * expert * sum(config.experts.layers)


def test_a_config_without_a_sparse_layer_is_a_dense_model(tmp_path: Path) -> None:
    model = reference("qwen3_moe", mlp_only_layers=[0, 1])
    directory = save(model, tmp_path)
    assert read_model_config(directory).experts is None
    ids = prompt(0, PROMPT)
    assert_close(our_logits(Driver(make_runner(directory)), make_request(ids, 0), [PROMPT]), their_logits(model, ids))


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ({"num_local_experts": None}, "no field 'num_experts'"),
        ({"num_experts_per_tok": 7}, "sends each token to 7 of 6 experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0: it must be a whole number above 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers = '0': it must be a list"),
    ],
)
def test_impossible_values_are_refused(edit: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    directory = save(reference("qwen3_moe"), tmp_path, edit=edit)
    with pytest.raises(CheckpointError, match=complaint):
        read_model_config(directory)


def test_a_shape_that_the_copy_engine_cannot_read_runs_without_graphs(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels read rows that begin at multiples of 16 bytes; what does not fit takes the readable form."""
    from engine.worker.eager import Eager
    from engine.worker.limits import Limits

    _, directory = checkpoints("every second layer")
    model = read_model_config(directory)
    assert model.experts is not None
    odd = replace(model, experts=replace(model.experts, inner_size=36))
    limits = Limits(torch.device("cuda"), torch.bfloat16, torch.bfloat16, "none", 8, 64, 256)
    monkeypatch.setattr("engine.build.resolve", lambda config, model: limits)
    assert choose_parts(odd, EngineConfig(device="cuda")).executors == (Eager,)


def test_padding_is_sent_to_no_expert() -> None:
    experts = experts_of(2, True)
    x = torch.randn(4, 4, dtype=torch.float64)
    expected = experts(x[:3])
    experts.load.zero_()
    found = experts(x, torch.tensor([3], dtype=torch.int32))
    torch.testing.assert_close(found[:3], expected)
    assert not found[3].any()
    assert int(experts.load.sum()) == 3 * 2
