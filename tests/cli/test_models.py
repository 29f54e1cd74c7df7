"""`minitui models` and what a shell completes for --model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.disk_cache import ROUNDED, UNPACKED
from engine.errors import CheckpointError
from engine.hub.cache import cached_snapshots
from engine.hub.gguf_files import in_cache
from engine.hub.resolve import resolve_model
from engine.model.four_bits import Int4Weight
from engine.model.hf.config import read_model_config
from engine.worker.weights import quantised
from minitui import tutor
from minitui.bench.limits import write_config
from minitui.cli.models import Machine, complete_model, examine, fit, models
from tests.support.checkpoints.gguf_files import add_sizes, finish

GB = 10**9
CONFIG = (tutor.model_dir() / "config.json").read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a whole model of two revisions, one that is not supported, and one that is not complete."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(Machine, "here", lambda: Machine(None, 10e9))
    add(tmp_path, "Org/Whole", "a" * 40, {"config.json": CONFIG, "model.safetensors": bytes(2_500_000)}, "main")
    add(tmp_path, "Org/Whole", "b" * 40, {"config.json": CONFIG, "model.safetensors": bytes(1_000_000)})
    add(tmp_path, "Org/Other", "c" * 40, {"config.json": b'{"architectures": ["GPT9"]}', "model.safetensors": b"x"})
    add(tmp_path, "Org/Begun", "d" * 40, {"config.json": CONFIG})
    return tmp_path


def add(cache: Path, name: str, commit: str, files: dict[str, bytes], ref: str = "") -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file, data in ({"tokenizer.json": b"{}"} | files).items():
        (snapshot / file).write_bytes(data)
    if ref:
        (folder / "refs").mkdir()
        (folder / "refs" / ref).write_text(commit)


def test_each_model_is_listed_with_its_revision_size_and_whether_it_runs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models()
    heading, begun, other, whole, older, total = capsys.readouterr().out.splitlines()
    assert heading.split() == ["model", "revision", "size", "architecture", "runs", "here"]
    assert whole.split()[:5] == ["Org/Whole", "main", "2.5", "MB", "Qwen3"]
    assert whole.endswith("yes, in bf16: at least 1.5 ms a token")
    assert older.split()[:4] == ["Org/Whole", "bbbbbbb", "1.0", "MB"]
    assert "Org/Other  ccccccc" in other and "GPT9" in other and " no: " in other
    assert "no: model.safetensors missing" in begun
    assert total == f"3.5 MB in {cache}"
    models(json=True)
    assert [(row["name"], row["size"]) for row in json.loads(capsys.readouterr().out)] == [
        ("Org/Begun", None), ("Org/Other", 1), ("Org/Whole", 2_500_000), ("Org/Whole", 1_000_000),
    ]


def test_a_model_without_a_tokenizer_does_not_run(cache: Path) -> None:
    whole = next(each for each in cached_snapshots() if each.repository == "Org/Whole")
    assert examine(whole, Machine(None, 10e9)).runs.startswith("yes")
    (whole.path / "tokenizer.json").unlink()
    assert examine(whole, Machine(None, 10e9)).runs.startswith("no: it has no tokenizer.json; save one there with")


def test_an_empty_cache_says_how_to_get_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    models()
    assert capsys.readouterr().out == f"no models in {tmp_path}: minitui chat --model Qwen/Qwen3-0.6B downloads one\n"


def test_what_is_kept_is_listed_and_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kept, name in (ROUNDED, "Whole-int8-abc"), (ROUNDED, "Other-int4-\x1b[2J"), (UNPACKED, "tiny-123"):
        (kept.folder / name).mkdir(parents=True)
        (kept.folder / name / "weights").write_bytes(bytes(2_500_000))
    models()
    *_, heading, first, second, _, unpacked, third = capsys.readouterr().out.splitlines()
    assert heading == f"rounded weights, kept in {ROUNDED.folder} (minitui models --forget-kept removes them):"
    assert {first.split()[-1], second.split()[-1]} == {"Whole-int8-abc", "Other-int4-␛[2J"}
    assert unpacked.startswith(f"unpacked GGUF files, kept in {UNPACKED.folder}") and "2.5 MB  tiny-123" in third
    models(forget_kept=True)
    removed = f"removed 2 entries from {ROUNDED.folder}\nremoved 1 entry from {UNPACKED.folder}\n"
    assert capsys.readouterr().out == removed
    models()
    assert "kept in" not in capsys.readouterr().out and not list(ROUNDED.folder.iterdir())


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize("free,expected", [
    (40, "yes, in bf16: at least 757 ms a token"),
    (12, "yes, in int8: at least 378 ms a token"),
    (8, "yes, in int4: at least 226 ms a token"),
    (4, "no: in int4 it takes 7.3 GB, and 4.0 GB are free"),
])
def test_the_list_names_the_weights_that_the_engine_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: str
) -> None:
    """Qwen3-8B on a CPU that reads 20 GB/s."""
    if (why_not := Int4Weight.why_not()) or importlib.util.find_spec("llvmlite") is None:
        pytest.skip(why_not or "llvmlite is not installed")
    monkeypatch.setattr(quantised, "free_memory", lambda: free * GB)
    config = read_model_config(write_config("8B", tmp_path))
    assert fit(config, Machine(None, 20e9)) == expected
    chosen, _ = quantised.choose(EngineConfig(), config, torch.device("cpu"), "float32")
    assert f"in {chosen}" in expected, "the list says something else than the engine does"


@pytest.mark.parametrize("size,free,expected", [
    ("8B", 20, "yes"), ("8B", 12, "with --quantization fp8"),
    ("8B", 8, "with --quantization int4"), ("8B", 4, "no: its weights take at least 5.6 GB, and 4.0 GB are free"),
    ("30B-A3B", 80, "yes"), ("30B-A3B", 40, "with --quantization fp8"),
    ("30B-A3B", 30, "with --quantization int4"),
    ("30B-A3B", 16, "no: its weights take at least 18.6 GB, and 16.0 GB are free"),
])
def test_what_fits_on_a_gpu(tmp_path: Path, size: str, free: int, expected: str) -> None:
    assert fit(read_model_config(write_config(size, tmp_path)), Machine(free * GB, 0.0)) == expected


@pytest.mark.parametrize("size,fields,free,newer,expected", [
    ("30B-A3B", BLOCKS, 40, True, "yes, in 8 bits as stored"),
    ("30B-A3B", BLOCKS, 30, True, "with --quantization int4"),
    ("30B-A3B", BLOCKS, 40, False, "with --quantization int4"),
    ("30B-A3B", BLOCKS, 16, True, "no: its weights take at least 18.6 GB, and 16.0 GB are free"),
    ("8B", GPTQ, 12, True, "yes, in 4 bits as stored"), ("8B", GPTQ, 12, False, "yes, in 4 bits as stored"),
    ("8B", GPTQ | {"desc_act": True}, 20, True, "yes, expanded to bfloat16"),
    ("8B", GPTQ | {"desc_act": True}, 12, True, "yes, rounded to 8 bits"),
    ("8B", GPTQ | {"desc_act": True}, 12, False, "with --quantization int4"),
])
def test_what_fits_of_a_quantised_checkpoint(
    tmp_path: Path, size: str, fields: dict[str, Any], free: int, newer: bool, expected: str
) -> None:
    path = write_config(size, tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fields}))
    assert fit(read_model_config(path.parent), Machine(free * GB, 0.0, (8, 9) if newer else (8, 6))) == expected


def test_weights_are_counted_as_the_checkpoint_has_them(cache: Path) -> None:
    """Which matrices are quantised is seen from the names of the tensors; a damaged file does not end the list."""
    config = {"config.json": json.dumps(json.loads(CONFIG) | {"quantization_config": BLOCKS}).encode()}
    add(cache, "Org/Damaged", "e" * 40, config | {"model.safetensors": b"x"})
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    add(cache, "Org/Plain", "f" * 40, config | {"model.safetensors": data})
    snapshots = {snapshot.repository: snapshot for snapshot in cached_snapshots()}
    newer = Machine(10e6, 0.0)
    assert "model.safetensors is not a complete safetensors file" in examine(snapshots["Org/Damaged"], newer).runs
    assert examine(snapshots["Org/Plain"], newer).runs == "with --quantization int4", "its 16.7 MB do not fit"


def gguf(path: Path, architecture: str = "qwen3") -> Path:
    """The header of a GGUF file of a model with the bundled one's shape, without its tensors' data."""
    writer = pytest.importorskip("gguf").GGUFWriter(str(path), architecture)
    config = json.loads(CONFIG)
    add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tensor("token_embd.weight", np.zeros((config["vocab_size"], config["hidden_size"]), np.float16))
    finish(writer)
    return path


def test_gguf_files_of_the_cache_are_listed_by_the_names_that_start_them(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, files in {"One": ["a.gguf", "mmproj-a.gguf"], "Two": ["b-Q4_0.gguf", "Q8/b-00001-of-00002.gguf"]}.items():
        for file in files:
            path = tmp_path / f"models--Org--{name}-GGUF" / "snapshots" / ("a" * 40) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            gguf(path, "qwen3" if "b-" not in file else "mamba")
    models(json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out) if row["revision"] == "GGUF"}
    split = "Org/Two-GGUF/Q8/b-00001-of-00002.gguf"
    assert set(rows) == {"Org/One-GGUF", "Org/Two-GGUF/b-Q4_0.gguf", split}
    assert rows["Org/One-GGUF"]["runs"].startswith("yes, in ") and rows["Org/One-GGUF"]["architecture"] == "Qwen3"
    assert "has the architecture 'mamba'" in rows["Org/Two-GGUF/b-Q4_0.gguf"]["runs"]
    assert "b-00002-of-00002.gguf is missing" in rows[split]["runs"]
    assert set(complete_model("Org/")) >= set(rows)
    assert in_cache("Org/One-GGUF") == tmp_path / "models--Org--One-GGUF" / "snapshots" / ("a" * 40) / "a.gguf"
    with pytest.raises(CheckpointError, match=r"Org/Two-GGUF has 2 GGUF files in the cache: name one of them, Org/Two"):
        resolve_model("Org/Two-GGUF")
    gguf(tmp_path / "mine.gguf")
    assert complete_model(f"{tmp_path}/mi") == [f"{tmp_path}/mine.gguf"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert complete_model("~/mi") == ["~/mine.gguf"]


def test_a_shell_completes_models_of_the_cache_and_directories(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_bytes(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert complete_model("Org/") == ["Org/Other", "Org/Whole"], "what is not complete is not offered"
    assert complete_model("mi") == ["mine"]
    assert complete_model(f"{tmp_path}/") == [f"{tmp_path}/mine"]
    assert complete_model("nothing") == []
