"""`minitui verify` says "same" only of what is the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineError
from engine.worker.weights import quantised
from minitui import tutor
from minitui.cli import verify
from minitui.cli.verify import NEW_TOKENS, PROMPTS, Reference, _same_tokens, run_verify
from tests.support.checkpoints.gguf_files import HELD, add_tokenizer, write_gguf
from tests.support.checkpoints.images import save_layouts, with_images
from tests.support.families import checkpoint
from tests.support.models import reference, save
from tests.support.packing import FORMATS, mxfp4, quantise

PROMPT, SAME = [5, 6], [1, 2, 3]


def row(reply: list[int], have: list[int], slack: float, margin: float = 0.5, said: list[int] | None = None) -> Any:
    """One reply compared; at every position the two best tokens are `margin` apart."""
    logprobs = torch.full((len(PROMPT) + len(reply), 10), -1.0)
    logprobs[:, 1] -= margin
    reference = Reference([PROMPT], [said or reply], [logprobs])
    return _same_tokens("row", reference, [reply], [have], slack)


def test_equal_replies_are_the_same_and_a_tie_is_told() -> None:
    assert row(SAME, SAME, 0.0).passed
    tie = row([2, 2, 3], [2, 1, 3], slack=0.6)
    assert tie.passed and "1 differ at a tie" in tie.detail


@pytest.mark.parametrize("have", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_another_length_is_no_tie(have: list[int]) -> None:
    check = row(SAME, have, slack=9.0)
    assert not check.passed
    assert f"{len(have)} tokens instead of 3" in check.detail


def test_no_slack_makes_no_tie_of_a_margin() -> None:
    assert not row([2, 2, 3], [2, 1, 3], slack=0.0).passed
    assert not row([2, 2, 3], [2, 1, 3], slack=9.0, margin=float("nan")).passed


def test_a_margin_that_is_not_known_is_no_tie() -> None:
    assert not row([2, 2, 3], [2, 2, 4], slack=9.0, said=[7, 2, 3]).passed


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts and six tokens of each reply, instead of all."""
    monkeypatch.setattr(verify, "PROMPTS", PROMPTS[:2])
    monkeypatch.setattr(verify, "NEW_TOKENS", 6)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_different(bad: float | None, tmp_path: Path, capsys: Any) -> None:
    directory = tmp_path / "m"
    shutil.copytree(tutor.model_dir(), directory)
    if bad is not None:
        [path] = directory.glob("*.safetensors")
        tensors = load_file(path)
        tensors["model.layers.1.self_attn.o_proj.weight"][3, 3] = bad
        save_file(tensors, path, metadata={"format": "pt"})
    code = run_verify(str(directory), "float64", "cpu", as_json=True)
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert code == (bad is not None)
    assert [check["passed"] for check in checks] == [bad is None] * len(checks) or (bad and not checks[0]["passed"])
    if bad is not None:
        assert not any(check["passed"] for check in checks if "transformers" in check["name"]), checks


def with_positions(number: int, directory: Path) -> str:
    """The bundled model with this number of positions; returns its directory."""
    shutil.copytree(tutor.model_dir(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": number}))
    return str(directory)


def test_a_model_that_transformers_cannot_run_is_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    directory = with_positions(NEW_TOKENS + 1, tmp_path / "m")
    with pytest.raises(EngineError, match="m has 21 positions; verify needs at least 22"):
        run_verify(directory, "float32", "cpu", as_json=True)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("rope_type")

    monkeypatch.setattr("transformers.Qwen3ForCausalLM.from_pretrained", fail)
    with pytest.raises(EngineError, match="transformers cannot run m: KeyError: 'rope_type'"):
        run_verify(directory, "float32", "cpu", as_json=True)


def test_a_model_of_few_positions_is_compared(tmp_path: Path, capsys: Any, recwarn: Any) -> None:
    directory = with_positions(NEW_TOKENS + 2, tmp_path / "m")
    assert run_verify(directory, "float32", "cpu", as_json=True) == 0, capsys.readouterr().out
    assert not [one for one in recwarn if one.category is FutureWarning], "it is about transformers' next versions"


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("kind", os.environ.get("VERIFY_FAMILIES", "gemma2 gpt_oss phi3").split())
def test_a_random_checkpoint_of_a_family_passes(kind: str, tmp_path: Path, capsys: Any) -> None:
    """VERIFY_FAMILIES names other families: the model types in tests/support/families.py."""
    checkpoint(kind, 1, tmp_path, vocab_size=with_the_tutor_s_tokenizer(tmp_path))
    code = run_verify(str(tmp_path), "float64", "cpu", as_json=True)
    assert code == 0, capsys.readouterr().out


Plant = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def leaf(tensors: dict[str, torch.Tensor], name: str) -> str:
    return f"model.layers.1.{name}.weight"


def swap(tensors: dict[str, torch.Tensor], one: str, other: str) -> None:
    one, other = leaf(tensors, one), leaf(tensors, other)
    tensors[one], tensors[other] = tensors[other], tensors[one]


FAULTS: dict[str, tuple[str, Plant]] = {  # name -> the family in which it is planted, and how
    "eps times 1.5": ("qwen3", lambda config, _: config.update(rms_norm_eps=1.5e-6)),
    "theta off by 1e-4": ("qwen3", lambda config, _: config.update(rope_theta=10_001.0)),
    "no norm of queries": ("qwen3", lambda _, t: t[leaf(t, "self_attn.q_norm")].fill_(1)),
    "no norm of keys": ("qwen3", lambda _, t: t[leaf(t, "self_attn.k_norm")].fill_(1)),
    "gate and up swapped": ("qwen3", lambda _, t: swap(t, "mlp.gate_proj", "mlp.up_proj")),
    "a number of a norm": ("qwen3", lambda _, t: t[leaf(t, "input_layernorm")].view(-1)[3].mul_(1.001)),
    "scores scaled by 1.001": ("gemma2", lambda config, _: config.update(
        query_pre_attn_scalar=config["query_pre_attn_scalar"] * 1.002)),
    "soft cap of logits": ("gemma2", lambda config, _: config.update(
        final_logit_softcapping=(config["final_logit_softcapping"] or 30.0) + 0.01)),
    "a window one wider": ("gemma2", lambda config, _: config.update(sliding_window=config["sliding_window"] + 1)),
    "residual times 1.001": ("granite", lambda config, _: config.update(
        residual_multiplier=config["residual_multiplier"] * 1.001)),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """A family's random checkpoint, and what transformers computes for two short prompts."""

    @cache
    def get(kind: str) -> tuple[Path, Reference]:
        directory = tmp_path_factory.mktemp(kind)
        more = {"residual_multiplier": 0.22} if kind == "granite" else {}
        checkpoint(kind, 1, directory, vocab_size=with_the_tutor_s_tokenizer(directory), **more)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "PROMPTS", PROMPTS[:2])
            patch.setattr(verify, "NEW_TOKENS", 4)
            return directory, verify.run_reference(directory, torch.float64, torch.device("cpu"))

    return get


@pytest.mark.parametrize("name", FAULTS)
def test_a_small_fault_is_found(
    name: str, sound: Callable[[str], tuple[Path, Reference]], tmp_path: Path, monkeypatch: Any
) -> None:
    """The engine gets the checkpoint with the fault, and transformers the sound one."""
    kind, plant = FAULTS[name]
    source, reference = sound(kind)
    monkeypatch.setattr(verify, "NEW_TOKENS", 4)
    directory = tmp_path / "m"
    shutil.copytree(source, directory)
    (check, *_) = verify.compare(directory, reference, "float64", "cpu")
    assert check.passed, check.detail
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    plant(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (check, *_) = verify.compare(directory, reference, "float64", "cpu")
    assert not check.passed, check.detail


def test_memory_decides_about_float64(monkeypatch: Any, capsys: Any) -> None:
    """Without it, the tolerance is a multiple of the difference that transformers has from itself."""
    monkeypatch.setattr(verify, "PROMPTS", PROMPTS[:1])
    for free, name in (1 << 40, "float64"), (0, "float32"):
        monkeypatch.setattr(quantised, "free_memory", lambda free=free: free)
        monkeypatch.setattr(verify, "run_reference", lambda _, dtype, *__: pytest.fail(str(dtype)))
        with pytest.raises(pytest.fail.Exception, match=name):
            run_verify(str(tutor.model_dir()), "auto", "cpu", as_json=True)
    assert Reference([], [], [], noise=3e-5).tolerance("float32") == pytest.approx(3e-4)
    assert Reference([], [], [], noise=9.0).tolerance("float32") == 1e-2
    assert Reference([], [], []).tolerance("bfloat16") == 0.05


def with_the_tutor_s_tokenizer(directory: Path) -> int:
    """Copy the tokenizer of the bundled model; return the size of its vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tutor.model_dir() / name, directory)
    return int(json.loads((tutor.model_dir() / "config.json").read_text())["vocab_size"])


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("name", os.environ.get("VERIFY_IMAGES", "ministral3 qwen3_vl_moe").split())
def test_the_text_part_of_a_model_with_images_passes(name: str, tmp_path: Path, capsys: Any) -> None:
    """VERIFY_IMAGES names other models of tests/support/checkpoints/images.py. The second checkpoint is quantised."""
    sizes = {"vocab_size": with_the_tutor_s_tokenizer(tmp_path), "max_position_embeddings": 1024}
    plain, published = save_layouts(with_images(name, **sizes), tmp_path)
    path = published / "model.safetensors"
    tensors = load_file(path)
    key = next(name for name in tensors if name.endswith("layers.0.self_attn.o_proj.weight") and "vision" not in name)
    fields, store = FORMATS["fp8 whole"]
    stored, _ = store(tensors.pop(key).float())
    tensors |= {key.removesuffix("weight") + suffix: tensor for suffix, tensor in stored.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    for directory in plain, published:
        with_the_tutor_s_tokenizer(directory)
        assert run_verify(str(directory), "float64", "cpu", as_json=True) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("form", os.environ.get("VERIFY_FORMATS", "awq").split(","))
def test_a_random_quantised_checkpoint_passes(form: str, tmp_path: Path, capsys: Any) -> None:
    """VERIFY_FORMATS names other formats, with commas: those of tests/support/packing.py, or mxfp4."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    sizes = {"vocab_size": with_the_tutor_s_tokenizer(plain), "hidden_size": 96, "intermediate_size": 160}
    if form == "mxfp4":
        checkpoint("gpt_oss", 1, plain, **{**sizes, "intermediate_size": 64})
        mxfp4(plain, packed)
    else:
        model = reference("qwen3", **sizes, head_dim=32)
        quantise(model, save(model, plain), packed, form)
    with_the_tutor_s_tokenizer(packed)
    assert run_verify(str(packed), "float64", "cpu", as_json=True) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("kind", os.environ.get("VERIFY_GGUF", "gemma3_text").split())
def test_a_random_gguf_file_passes(kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """VERIFY_GGUF names other families: the model types in tests/support/checkpoints/gguf_files.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint(kind, 1, tmp_path, **HELD.get(kind, {}), vocab_size=with_the_tutor_s_tokenizer(tmp_path))
    path = write_gguf(tmp_path, tmp_path / "m.gguf", "Q8_0", lambda w: add_tokenizer(w, tutor.model_dir(), "gpt-2"))
    assert run_verify(str(path), "float64", "cpu", as_json=True) == 0, capsys.readouterr().out
