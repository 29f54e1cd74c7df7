"""Every family of the table against transformers, on tiny random configurations and on every path of a CPU.

FAMILY_CONFIGS=20 runs 20 configurations of each family; the default is 1.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError
from engine.groups import cache_groups
from engine.model.config import ModelConfig
from engine.model.families import ARCHITECTURES, MODEL_TYPES
from engine.model.hf.config import read_model_config
from engine.model.traits import SUPPORTED, TRAITS, lacking, traits
from engine.parallel.shards import check
from engine.params import SamplingParams
from engine.worker.cpu.executor import CPUSteps
from engine.worker.limits import resolve
from tests.engine.model.test_engine_model import make_engine
from tests.engine.worker.test_parallel import play
from tests.support import paths
from tests.support.families import FAMILIES, checkpoint
from tests.support.kernels.ranks import run_in_threads
from tests.support.models import VOCAB, Driver, eager, make_request, make_runner, plain_runner, prompt
from tests.support.parity import PROMPT, compiled_or_not, decodes_on_a_cpu, our_logits, their_logits  # noqa: F401 (a fixture)
from tests.support.simulation import run

SEEDS = range(int(os.environ.get("FAMILY_CONFIGS", "1")))
REPLY = 10


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(kind, seed) -> (model of transformers in float64, directory), each made once."""
    found: dict[tuple[str, int], tuple[Any, Path]] = {}

    def get(kind: str, seed: int = 0) -> tuple[Any, Path]:
        if (kind, seed) not in found:
            directory = tmp_path_factory.mktemp(f"{kind}-{seed}")
            found[kind, seed] = checkpoint(kind, seed, directory), directory
        return found[kind, seed]

    yield get


def wordy(seed: int) -> list[list[int]]:
    """Prompts that share a prefix, of few words: the words repeat, so drafts are made."""
    r = random.Random(seed)
    words = [r.randrange(3, VOCAB) for _ in range(4)]
    prefix = [r.choice(words) for _ in range(9)]
    return [prefix[: r.randrange(5, 10)] + [r.choice(words) for _ in range(count)] for count in (1, 6, 14)]


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The greedy reply of transformers, whose cache the whole prompt fills at once."""
    cache, tokens, reply = None, torch.tensor([ids]), []
    with torch.no_grad():
        for _ in range(count):
            out = model(tokens, past_key_values=cache, use_cache=True)
            cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
            reply.append(int(tokens))
    return reply


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_equal_those_of_transformers(kind: str, seed: int, made: Any) -> None:
    """In float64, from a config.json that transformers has not put in order before."""
    theirs, directory = made(kind, seed)
    ids = prompt(seed, PROMPT)
    ours = our_logits(Driver(make_runner(directory, "float64")), make_request(ids, 0), [PROMPT])
    expected = their_logits(theirs, ids)
    torch.testing.assert_close(ours.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert read_model_config(directory).num_parameters == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_equal_those_of_transformers_on_every_schedule(kind: str, seed: int, made: Any) -> None:
    """Prefixes cached, prompts in chunks of 7, batched, preempted, with drafts."""
    theirs, directory = made(kind, seed)
    prompts = wordy(seed)
    expected = [greedy(theirs, ids, REPLY) for ids in prompts]
    engine = make_engine(directory, budget=7, blocks=14, watermark=0.0, speculative_tokens=4)
    params = SamplingParams(temperature=0.0, max_tokens=REPLY, ignore_eos=True)
    requests = []
    for ids in prompts:
        requests.append(engine.add_request(ids, params))
        for _ in range(3):
            engine.step()
    run(engine)
    assert [request.output_ids for request in requests] == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_decode_steps_on_a_cpu_compute_what_the_decoder_does(kind: str, made: Any) -> None:
    """The path that lacks a trait of the family is not chosen; the other families get the same logits and keys."""
    _, directory = made(kind)
    runner = make_runner(directory)
    fast = runner.executors[0]
    assert isinstance(fast, CPUSteps)
    told = [note for note in runner.loaded.notes if "without most of our compiled kernels: " in note]
    assert (fast.compiled is None) == bool(told)
    if fast.compiled is None:
        return
    assert not lacking(read_model_config(directory), "compiled")
    for ours, plainly in zip(*decodes_on_a_cpu(directory, 7), strict=True):
        torch.testing.assert_close(ours, plainly, rtol=0, atol=2e-5 * float(plainly.abs().max()))


@pytest.mark.usefixtures("compiled_or_not")
@pytest.mark.parametrize("speculative_tokens", [0, 4])
@pytest.mark.parametrize("kind", ["cwm", "ministral"])
def test_a_cpu_reads_nothing_behind_a_window(kind: str, speculative_tokens: int, made: Any) -> None:
    """The pages that requests have released are NaN, as if another request had computed it."""
    _, directory = made(kind, next(s for s in range(9) if len(set(read_config_of(kind, s).get("layer_types", ()))) > 1))
    replies = []
    for spoilt in (False, True):
        options: dict[str, Any] = {"dtype": "float32", "prefix_caching": False}
        engine = make_engine(directory, budget=16, speculative_tokens=speculative_tokens, **options)
        fast = engine.runner.executors[0]  # type: ignore[attr-defined]
        assert isinstance(fast, CPUSteps)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        layers, released = cache_groups(read_model_config(directory))[1].layers, 0
        requests = [engine.add_request(ids, params) for ids in wordy(3)]
        while engine.has_work:
            engine.step()
            engine.check()
            free = list(engine.cache.sides[0].pool.free)
            released += bool({*fast._batch.host_tables[1].flat} & {*free})
            with torch.inference_mode():
                for layer in layers if spoilt else ():
                    fast._loaded.pool.keys[layer][free], fast._loaded.pool.values[layer][free] = torch.nan, torch.nan
        assert released > 4
        replies.append([request.output_ids for request in requests])
    assert replies[0] == replies[1]


@pytest.mark.parametrize("kind", FAMILIES)
def test_two_ranks_draw_what_one_does(kind: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_threads(monkeypatch)
    # A key/value head for each rank, and a half of a head in neither.
    _, directory = made(kind, next(s for s in range(99) if read_config_of(kind, s)["num_key_value_heads"] > 1))
    config = read_model_config(directory)
    if lacks := lacking(config, "ranks"):
        with pytest.raises(EngineError, match=f"this {config.architecture} has {lacks}, which several ranks"):
            check(config, 2)
        return
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float64", "block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "cpu_threads": 1,
    }
    one = plain_runner(config, EngineConfig(model=str(directory), **options), directory)
    eager(one).pads = True  # as on a GPU
    alone, expected = play(one)
    runner = make_runner(directory, "float64", tensor_parallel_size=2)
    together, found = play(runner)
    runner.close()
    assert together == alone
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def read_config_of(kind: str, seed: int) -> dict[str, Any]:
    from tests.support.families import random_config

    return random_config(kind, seed)


@pytest.mark.parametrize("kind", FAMILIES)
def test_half_precision_stays_close_to_transformers(kind: str, made: Any) -> None:
    """In bfloat16, the log-probabilities differ by rounding only; no other order of operations shows."""
    from transformers import AutoModelForCausalLM

    _, directory = made(kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    ids = prompt(0, PROMPT)
    ours = our_logits(Driver(make_runner(directory, "bfloat16")), make_request(ids, 0), [PROMPT]).float()
    exact = their_logits(made(kind)[0], ids).float().log_softmax(-1)
    distance = (their_logits(theirs, ids).float().log_softmax(-1) - exact).square().mean().sqrt()
    assert (ours.log_softmax(-1) - exact).square().mean().sqrt() < 1.5 * distance + 1e-3


# ---- longrope: two lists of factors


def test_the_context_decides_which_factors_of_longrope_are_used(tmp_path: Path) -> None:
    """transformers takes the long factors for a sequence beyond the original context."""
    seed = next(s for s in range(99) if "rope_scaling" in read_config_of("phi3", s))
    theirs = checkpoint("phi3", seed, tmp_path)
    model = read_model_config(tmp_path)
    assert (model.default_context, model.max_context) == (128, 256)
    assert resolve(EngineConfig(device="cpu"), model).max_model_len == 128
    assert "so all positions use the first one" in resolve(EngineConfig(device="cpu"), model).notes[0]
    ids = prompt(0, 140)
    driver = Driver(make_runner(tmp_path, "float64", max_model_len=256))
    ours = our_logits(driver, make_request(ids, 0), [140]).log_softmax(-1)
    torch.testing.assert_close(ours, their_logits(theirs, ids).log_softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("factors", [[1.0], "x", [0.0] * 8, [float("nan")] * 8, [1e9] * 8])
def test_factors_of_longrope_that_cannot_be_are_refused(factors: Any, tmp_path: Path) -> None:
    import json

    scaling = {"type": "longrope", "short_factor": factors, "long_factor": [1.0] * 8}
    raw = read_config_of("phi3", 0) | {"rope_scaling": scaling, "partial_rotary_factor": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"short_factor = .* in its rope parameters: it must be a list of 8"):
        read_model_config(tmp_path)


# ---- the tables


def test_every_family_is_tested_and_has_a_model_type() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)
    assert set(MODEL_TYPES.values()) == set(ARCHITECTURES)


def test_the_readme_lists_the_families_of_the_table() -> None:
    text = (paths.ROOT / "README.md").read_text()
    rows = re.findall(r"^\| ([^|`]+) \| `(\w+)` \| ([^|`]+) \|$", text, re.MULTILINE)
    assert rows == [(arch.title, name, arch.example) for name, arch in ARCHITECTURES.items()]


def test_every_trait_that_a_path_may_lack_is_named() -> None:
    """A field of ModelConfig that changes the computation is a trait, or every path has it."""
    for supported in SUPPORTED.values():
        assert supported <= set(TRAITS)
    plain = ModelConfig("LlamaForCausalLM", 100, 64, 64, 2, 4, 2, 16, 512)
    assert not traits(plain)
    everywhere = {
        "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "max_position", "rms_norm_eps", "tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias",
        "qk_norm", "wide_norms", "attention_scale", "dtype", "embedding_scale", "residual_scale", "logit_scale",
        "rope", "experts", "packing", "next_layers",
    }
    others = {field.name for field in fields(ModelConfig)} - everywhere
    assert others == {
        "full_qk_norm", "layer_norm", "pre_norms", "post_norms", "activation", "gated", "softcap", "sinks",
        "logit_softcap", "layer_ropes", "windows", "layer_heads", "kv_source", "keys_as_values", "value_norm",
        "layer_widths", "per_layer_size", "layer_scalars", "delta", "output_gate",
    }


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Gemma3nForCausalLM", "Gemma 3 (text)"), ("Gemma4AssistantForCausalLM", "Gemma 4"),
        ("PhiForCausalLM", "Phi-3"), ("Qwen2MoeForCausalLM", "Qwen3-MoE"), ("Qwen4NextForCausalLM", "Qwen3"),
        ("Qwen3OmniMoeForConditionalGeneration", "Qwen3-MoE"), ("GraniteMoeHybridForCausalLM", "Granite 3"),
        ("OlmoForCausalLM", "OLMo 3"), ("Llama4ForConditionalGeneration", "Llama 2, 3"), ("GlmForCausalLM", "GLM-4"),
        ("DeepseekV3ForCausalLM", "Qwen3-MoE"), ("InternLM3ForCausalLM", "Llama"), ("Mistral4ForCausalLM", "Mistral"),
    ],
)
def test_the_nearest_family_of_an_unknown_one_is_named(name: str, nearest: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    match = rf"names {name}, and the nearest family is {re.escape(nearest)}.* \(for example \S+/\S+\): supported are"
    with pytest.raises(CheckpointError, match=match):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Qwen3ForSequenceClassification", "not a model that generates text, and the nearest family is Qwen3 ("),
        ("BertForMaskedLM", "which is not a model that generates text: supported are"),
        ("MistralModel", "such as an embedding model, which generates no text, and the nearest family is Mistral ("),
        ("SiglipModel", "such as an embedding model, which generates no text: supported are"),
    ],
)
def test_a_model_that_generates_no_text_is_named(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    with pytest.raises(CheckpointError, match=f"names {name}, .*{re.escape(what)}"):
        read_model_config(tmp_path)
