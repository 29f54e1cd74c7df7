"""What config.json may look like, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError
from engine.files import eos_ids, read_json
from engine.model.config import ModelConfig
from engine.model.families import MODEL_TYPES
from engine.model.hf.config import read_model_config
from engine.worker.limits import graph_bytes, resolve, step_limits

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 151645,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
}


def read(directory: Path, changes: dict[str, Any] | None = None, **files: Any) -> ModelConfig:
    """A config with changes (None: the field is removed), beside other JSON files."""
    raw: dict[str, Any] = dict(QWEN3)
    if (changes or {}).get("architectures"):
        for key in ("model_type", "use_sliding_window", "sliding_window", "max_window_layers"):
            del raw[key]
    for key, value in (changes or {}).items():
        raw.pop(key, None)
        if value is not None:
            raw[key] = value
    (directory / "config.json").write_text(json.dumps(raw))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return read_model_config(directory)


def test_a_qwen3_config_is_read_as_it_stands(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.num_parameters == 596_049_920  # Qwen3-0.6B
    assert (config.head_dim, config.qk_norm, config.qkv_bias, config.tie_word_embeddings) == (128, True, False, True)
    assert config.rope.theta == 1e6
    assert config.max_context == 40960
    assert config.windows == ()
    assert config.dtype == "bfloat16"
    assert config.kv_bytes_per_token(torch.bfloat16) == 28 * 2 * 8 * 128 * 2


def test_end_ids_come_from_both_files_each_once(tmp_path: Path) -> None:
    read(tmp_path)
    assert eos_ids(tmp_path) == (151645,)
    read(tmp_path, generation_config={"eos_token_id": [151645, 151643]})
    assert eos_ids(tmp_path) == (151645, 151643)
    read(tmp_path, {"eos_token_id": None}, generation_config={})
    assert eos_ids(tmp_path) == ()


@pytest.mark.parametrize("value", ["x", [1, 2.0], 10**30])
def test_end_ids_must_be_token_ids(value: Any, tmp_path: Path) -> None:
    read(tmp_path, {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"config\.json has eos_token_id = .*: it must be a token id"):
        eos_ids(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("LlamaForCausalLM", {}, {"qkv_bias": False, "output_bias": False, "qk_norm": False, "mlp_bias": False}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True},
         {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {}, {"qkv_bias": True, "output_bias": False, "qk_norm": False, "windows": ()}),
        ("Qwen3ForCausalLM", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True, "qk_norm": True}),
        ("MistralForCausalLM", {"sliding_window": 4096}, {"windows": (4096,) * 28, "qkv_bias": False}),
        ("MistralForCausalLM", {}, {"windows": (4096,) * 28}),
        ("MinistralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 14},
         {"windows": (0, 4096) * 14}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 27}, {"windows": (0,) * 27 + (4096,)}),
        ("Qwen2ForCausalLM", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 26},
         {"windows": (0,) * 26 + (100, 100)}),
        ("Qwen3ForCausalLM", {"sliding_window": 7, "use_sliding_window": True,
                              "layer_types": ["full_attention", "sliding_attention"] * 14}, {"windows": (0, 7) * 14}),
        ("Qwen2ForCausalLM", {"sliding_window": 100, "use_sliding_window": False}, {"windows": ()}),
        ("LlamaForCausalLM", {"sliding_window": 40960}, {"windows": ()}),
    ],
)
def test_architectures_differ_in_biases_norms_and_windows(
    architecture: str, fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, {"architectures": [architecture], **fields})
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_may_be_left_out_has_its_usual_value(tmp_path: Path) -> None:
    left_out = dict.fromkeys(["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"])
    config = read(tmp_path, {**left_out, "architectures": ["LlamaForCausalLM"]})
    assert (config.head_dim, config.num_kv_heads) == (64, 16)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (1e-6, 10000.0, False)
    assert read(tmp_path, {"head_dim": None}).head_dim == 128, "Qwen3's own default"
    assert read(tmp_path, {"architectures": None}).architecture == "Qwen3ForCausalLM", "from model_type"


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_in_every_spelling(key: str, table: str, tmp_path: Path) -> None:
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.5}
    rope = read(tmp_path, {table: scaling}).rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.attention_factor) == ("yarn", 4.0, 32768, 1.5)
    assert rope.theta == 1e6
    assert read(tmp_path, {table: scaling}).max_context == 131072
    inner = {**scaling, "rope_theta": 5e5}
    assert read(tmp_path, {table: inner, "rope_theta": None}).rope.theta == 5e5


def test_linear_and_dynamic_scaling_stretch_the_context(tmp_path: Path) -> None:
    for kind in ("linear", "dynamic"):
        config = read(tmp_path, {"rope_scaling": {"type": kind, "factor": 2.0}})
        assert (config.max_context, config.rope.original_max_position) == (81920, 40960)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}
LLAMA, MISTRAL = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["MistralForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"config\.json names MambaForCausalLM: supported are Qwen3, "),
        ({"architectures": None, "model_type": "gpt2"}, r"names gpt2: supported are"),
        ({"hidden_size": None}, r"config\.json has no field 'hidden_size': add it"),
        ({"vocab_size": None}, r"no field 'vocab_size'"),
        ({"max_position_embeddings": None}, r"no field 'max_position_embeddings'"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0: it must be a whole number above 0"),
        ({"hidden_size": "1024"}, r"hidden_size = '1024': it must be a whole number"),
        ({"num_key_value_heads": 7}, r"16 attention heads and 7 key/value heads"),
        ({"head_dim": 33}, r"head_dim 33: rotary positions need an even number"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*allowed: None or 'silu'"),
        ({"quantization_config": {"bits": 4}}, r"has quant_method None in its quantization_config: supported"),
        ({"rope_scaling": {"type": "longrope"}}, r"rope type 'longrope': supported are default, linear"),
        ({"rope_scaling": {"type": "linear"}}, r"no field 'factor' in its rope parameters"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"no field 'low_freq_factor'"),
        ({"rope_scaling": 3}, r"rope parameters 3: they must be an object"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: only whole heads"),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"]}, r"each of the 28"),
        ({"torch_dtype": "int8"}, r"dtype 'int8': supported are float64"),
        ({"attn_logit_softcapping": 50.0}, "softcapping = 50.0, which is not supported for Qwen3ForCausalLM"),
        (LLAMA | {"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        (LLAMA | {"attention_multiplier": 0.1}, "attention_multiplier = 0.1"),
        (LLAMA | {"logit_scale": 0.06}, "logit_scale = 0.06"),
        (LLAMA | {"no_rope_layers": [1, 1, 1, 0] * 7}, "no_rope_layers"),
        (LLAMA | {"sliding_window": 512}, "sliding_window = 512"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        (LLAMA | {"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config"),
        (LLAMA | {"rotary_pct": 0.25}, "rotary_pct = 0.25"),
        (MISTRAL | {"attention_bias": True}, "attention_bias = True"),
        (MISTRAL | {"use_sliding_window": False}, "use_sliding_window = False"),
        (MISTRAL | {"sliding_window": "4096"}, "sliding_window = '4096'.*a whole number"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window = 0.*a whole number"),
        (MISTRAL | {"layer_types": ["chunked_attention"] * 28}, "must name 'sliding_attention' or"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"layer_types": ["sliding_attention"] * 28}, "no sliding_window in use"),
        ({"use_sliding_window": "no"}, "use_sliding_window = 'no'.*true or false"),
        ({"tie_word_embeddings": "false"}, "true or false"),
        (MOE | {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        (MOE | {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (MOE | {"num_local_experts": 4}, "num_experts and num_local_experts, which differ"),
        (MOE | {"use_sliding_window": True, "layer_types": ["full_attention"] * 28}, "in every layer or in none"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "separate rope parameters"),
        ({"rope_scaling": YARN | {"attention_factor": "1.0"}}, "attention_factor = '1.0' in its rope parameters"),
        ({"rope_scaling": YARN | {"beta_fast": "32"}}, "beta_fast = '32'"),
        ({"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta = 0.1 in its rope parameters"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "two rope types, 'yarn' and 'linear'"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "which differ"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 4096}, "4,096, and 32,768"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope'"),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5"),
        ({"rope_theta": 1}, "rope_theta = 1.*above 1"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, r"beta_fast = 1e\+308 .*at most 1e\+06"),
        ({"rope_scaling": YARN | {"beta_slow": 1e308}}, r"beta_slow = 1e\+308 .*at most 1e\+06"),
        ({"rope_scaling": YARN | {"beta_slow": 5e-324}}, "beta_slow = 5e-324 .*at least 1e-06"),
        ({"rope_scaling": YARN | {"factor": 1e308}}, r"factor = 1e\+308 .*at most 1e\+06"),
        ({"rope_scaling": YARN | {"factor": 1e9}}, "factor = 1000000000.0 .*at most 1e"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 10**9}}, "at most 16,777,216"),
        ({"rope_scaling": YARN | {"attention_factor": 1e308}}, r"attention_factor = 1e\+308 .*at most 1e\+06"),
        ({"rope_scaling": YARN | {"factor": 1e5}}, "asks for 3,276,800,000 positions .* at most 16,777,216"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, r"factor = 1e\+308 .*at most 1e\+06"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1e-308}}, "low_freq_factor = 1e-308"),
        ({"rope_theta": 1e308}, r"rope_theta = 1e\+308: it must be at most 1e\+30"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings = 1000000000: it must be at most 16,777,216"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000+….*a finite number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: it must be at most 10,000"),
        ({"hidden_size": 10**12}, "at most 2,147,483,647"),
        ({"architectures": "Qwen3ForCausalLM"}, "a list of names"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "supported are"),
        ({"architectures": None, "model_type": ["qwen3"]}, "the name of a family"),
        (LLAMA | {"model_type": "qwen2"}, "belong to different families"),
    ],
)
def test_what_cannot_be_used_or_is_not_understood_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, changes)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_a_file_of_millions_of_empty_lists_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": [' + b"[]," * 5_000_000 + b"1]}")
    with pytest.raises(CheckpointError, match=r"has 5,000,004 quotation marks, lists and objects, and the limit is"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": None, "residual_multiplier": 1.0, "logit_scale": 1, "is_encoder_decoder": False},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0, "mrope_section": None}, "partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention"] * 28, "use_mrope": False, "add_cross_attention": False, "n_group": None},
        LLAMA | {"no_rope_layers": [1] * 28, "layer_types": ["full_attention"] * 28, "pretraining_tp": 2},
        LLAMA | {"attention_multiplier": 128**-0.5, "query_pre_attn_scalar": 128},
        MISTRAL | {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28},
    ],
)
def test_fields_of_other_families_may_say_that_they_change_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    dropped = {"model_type", "sliding_window"} if "architectures" in changes else set()
    raw = {key: value for key, value in QWEN3.items() if key not in dropped} | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).windows == ()


WITHOUT_EFFECT = {
    "transformers_version", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label", "label2id",
    "problem_type", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "attention_dropout",
    "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "residual_dropout",
    "hidden_dropout", "embedding_dropout", "embd_pdrop", "resid_pdrop",
}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_field_of_the_familys_configuration_is_looked_at(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that transformers' configuration has, each field is read or refused, or known to change nothing."""
    import dataclasses

    from transformers import AutoConfig

    import engine.model.hf.config

    class Watched(dict[str, Any]):
        seen: set[str] = set()  # noqa: RUF012

        def get(self, key: str, default: Any = None) -> Any:
            self.seen.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            self.seen.add(key)
            return super().__getitem__(key)

    config = AutoConfig.for_model(kind)
    raw = Watched({**QWEN3, **EXPERTS, "architectures": None, "model_type": kind})
    del raw["use_sliding_window"], raw["max_window_layers"]
    if kind == "gemma4_text":
        raw |= {"enable_moe_block": True, "top_k_experts": 2}
    monkeypatch.setattr(engine.model.hf.config, "read_json", lambda path: raw)
    read_model_config(tmp_path)
    from engine.model.hf.config import neutral_values

    looked_at = raw.seen | set(neutral_values(64, 64, 2))
    looked_at.add("eos_token_id")  # by eos_ids
    looked_at |= {"num_local_experts", "original_max_position_embeddings"}  # not for every rope
    assert {field.name for field in dataclasses.fields(config)} - looked_at - WITHOUT_EFFECT == set()


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist.*give the directory"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 12')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*download it again"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds list, not a JSON object"):
        read_model_config(tmp_path)


def test_open_choices_are_decided_by_device_and_model(tmp_path: Path) -> None:
    model = read(tmp_path)
    limits = resolve(EngineConfig(device="cpu"), model)
    assert (limits.dtype, limits.max_model_len) == (torch.float32, 40960)
    assert limits.max_num_batched_tokens >= limits.max_num_seqs > 1
    assert [step_limits(EngineConfig(), gib << 30) for gib in (8, 16, 141)] == [(256, 2048), (256, 8192), (256, 8192)]
    assert [graph_bytes(gib << 30) / 2**30 for gib in (8, 16, 141)] == [0.5, 1, 1]
    chosen = EngineConfig(device="cpu", dtype="bfloat16", max_num_seqs=3, max_num_batched_tokens=17, max_model_len=100)
    limits = resolve(chosen, model)
    assert (limits.dtype, limits.max_num_seqs, limits.max_num_batched_tokens) == (torch.bfloat16, 3, 17)
    assert limits.max_model_len == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"overlap": True}, "overlap is True: it must be auto, on or off"),
        ({"block_size": 0}, "block_size is 0: it must be a whole number, at least 1"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"device": "tpu9"}, "device is 'tpu9': it must be auto, cpu, cuda"),
        ({"max_model_len": 50000}, "max_model_len is 50,000, but .* 40,960 positions"),
        ({"num_blocks": 99_999_999_999}, "num_blocks is 99,999,999,999: it must be at most 2,147,483,647"),
        ({"num_blocks": 100_000_000}, r"not enough memory .*a KV cache of 100,000,000 blocks 367,001\.60 GB"),
        ({"num_blocks": 2_000_000_000}, "2,147,483,647 tokens can be addressed"),
        ({"block_size": 10**12}, "block_size is 1,000,000,000,000: it must be at most 65,536"),
        ({"kv_tokens": 10**30}, "kv_tokens is .* at most"),
        ({"max_num_seqs": 10**9}, "max_num_seqs is 1,000,000,000: it must be at most 65,536"),
        ({"max_num_batched_tokens": 10**12}, "max_num_batched_tokens is .* at most"),
        ({"tensor_parallel_size": 10**6}, "tensor_parallel_size is 1,000,000: it must be at most 64"),
        ({"cpu_threads": 10**9}, "cpu_threads is 1,000,000,000: it must be at most 1,024"),
        ({"seed": 1 << 64}, "seed is .* 64-bit"),
        ({"num_blocks": "64"}, "num_blocks is '64': it must be a whole number, at least 1"),
        ({"block_size": None}, "block_size is None"),
        ({"speculative_tokens": "8"}, "speculative_tokens is 8"),
    ],
)
def test_options_that_cannot_be_are_refused_with_the_numbers_before_anything_is_allocated(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from engine.worker.weights.memory import check_memory

    model = read(tmp_path)
    with pytest.raises(EngineError, match=message):
        config = EngineConfig(**{"device": "cpu", **options})
        check_memory(model, config, resolve(config, model), total=64 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="sees no GPU: use cpu"):
        resolve(EngineConfig(device="cuda"), read(tmp_path))


def test_configuration_tokenizer_and_lookup_load_without_torch() -> None:
    """The process of the user interface uses them."""
    code = "import sys, engine.config, engine.hub.resolve, engine.text.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- files that are no files of a checkpoint


READ_ALL = """
import sys
from engine.errors import CheckpointError
from engine.model.hf.config import read_model_config
from engine.text.tokenizer import Tokenizer
for directory in sys.argv[1:]:
    try:
        read_model_config(directory), Tokenizer(directory)
        print("all was read")
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.parametrize("kind", ["fifo", "device", "huge", "deep", "directory", "surrogate"])
def test_whatever_lies_in_the_place_of_a_file_is_a_sentence(kind: str, tmp_path: Path) -> None:
    """Nothing blocks, and nothing without end is read: in a process of its own, which would hang."""
    from minitui import tutor

    names = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
    paths = [tmp_path / name.replace(".", "-") / name for name in names]
    for path in paths:
        shutil.copytree(tutor.model_dir(), path.parent, ignore=shutil.ignore_patterns(path.name))
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "directory":
            path.mkdir()
        elif kind == "huge":
            with path.open("wb") as file:
                file.truncate(10_000_000_000)
        elif kind == "deep":
            path.write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
        else:
            path.write_text('{"model_type": "\\ud800", "eos_token_id": 1}')
    run = [sys.executable, "-c", READ_ALL, *(str(path.parent) for path in paths)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True)
    told, begins = done.stdout.splitlines(), [f"{path} " for path in paths]
    if kind == "surrogate":
        begins[-1] = "all was read"  # any text is a template; jinja2 judges it when it is used
    assert len(told) == len(begins) and all(map(str.startswith, told, begins)), told


@pytest.mark.parametrize(
    ("recommended", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': it must be a finite number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 7}, "top_p is 7"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"do_sample": "no"}, "do_sample = 'no': it must be true or false"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x': it must be a token id"),
        ([], "holds list, not a JSON object"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused(recommended: Any, message: str, tmp_path: Path) -> None:
    from engine.text.tokenizer import Tokenizer
    from minitui import tutor

    shutil.copy(tutor.model_dir() / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json .*{message}"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"])
def test_an_absurd_size_in_a_config_is_refused_before_anything_is_allocated(field: str, tmp_path: Path) -> None:
    from engine.build import make_runner

    model = read(tmp_path, {field: 1_000_000_000})
    with pytest.raises(EngineError, match=r"not enough memory for this model: weights [\d,.]+ GB"):
        make_runner(model, EngineConfig(device="cpu", dummy_weights=True))


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"layer_types": ["linear_attention", "mamba", "full_attention"]},
     r"layer_types = .* it must be 'linear_attention' or 'full_attention' for each of the 3 layers"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "for each of the 3 layers"),
    ({"layer_types": ["linear_attention"] * 3}, "at least one of the 3 layers has full_attention"),
    ({"full_attention_interval": 4}, "full_attention_interval = 4: it must be such that at least one of the 3 layers"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3: it must be a multiple of linear_num_key_heads, 2"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1: it must be a whole number above 1"),
    ({"linear_key_head_dim": 1 << 20}, "linear_key_head_dim = 1048576: it must be at most 4,096"),
    ({"linear_value_head_dim": "8"}, "linear_value_head_dim = '8': it must be a whole number above 0"),
    ({"attn_output_gate": False}, "attn_output_gate = False, which is not supported"),
    ({"attention_bias": True}, "attention_bias = True, which is not supported"),
])
def test_layers_with_a_recurrent_state_are_refused_by_field(
    fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    raw = {
        "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "attn_output_gate": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).state_layers == (0, 2)
    if "full_attention_interval" in fields:
        del raw["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(CheckpointError, match=sentence):
        read_model_config(tmp_path)
