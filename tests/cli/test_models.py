"""`minitui models` and what a shell completes for --model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.model.four_bits import Int4Weight
from engine.worker.kept_files import directory
from minitui import tutor
from minitui.cli.models import Memory, complete_model, fit, models

GB = 10**9
CONFIG = (tutor.model_dir() / "config.json").read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a whole model of two revisions, one that is not supported, and one that is not complete."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    add(tmp_path, "Org/Whole", "a" * 40, {"config.json": CONFIG, "model.safetensors": bytes(2_500_000)}, "main")
    add(tmp_path, "Org/Whole", "b" * 40, {"config.json": CONFIG, "model.safetensors": bytes(1_000_000)})
    add(tmp_path, "Org/Other", "c" * 40, {"config.json": b'{"architectures": ["GPT9"]}', "model.safetensors": b"x"})
    add(tmp_path, "Org/Begun", "d" * 40, {"config.json": CONFIG})
    return tmp_path


def add(cache: Path, name: str, commit: str, files: dict[str, bytes], ref: str = "") -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file, data in files.items():
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
    assert whole.split() == ["Org/Whole", "main", "2.5", "MB", "Qwen3", "yes"]
    assert older.split()[:4] == ["Org/Whole", "bbbbbbb", "1.0", "MB"]
    assert "Org/Other  ccccccc" in other and "GPT9" in other and " no: " in other
    assert "no: model.safetensors missing" in begun
    assert total == f"3.5 MB in {cache}"
    models(json=True)
    assert [(row["name"], row["size"]) for row in json.loads(capsys.readouterr().out)] == [
        ("Org/Begun", None), ("Org/Other", 1), ("Org/Whole", 2_500_000), ("Org/Whole", 1_000_000),
    ]  # fmt: skip


def test_an_empty_cache_says_how_to_get_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    models()
    assert capsys.readouterr().out == f"no models in {tmp_path}: minitui chat --model Qwen/Qwen3-0.6B downloads one\n"


def test_kept_weights_are_listed_and_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory().mkdir(parents=True)
    for name in "Whole-int8-abc.weights", "Other-int4-\x1b[2J.weights":
        (directory() / name).write_bytes(bytes(2_500_000))
    models()
    *_, heading, first, second = capsys.readouterr().out.splitlines()
    assert heading == f"rounded weights, kept in {directory()} (minitui models --forget-kept removes them):"
    assert {first.split()[-1], second.split()[-1]} == {"Whole-int8-abc.weights", "Other-int4-␛[2J.weights"}
    assert "2.5 MB" in first
    models(forget_kept=True)
    assert capsys.readouterr().out == f"removed 2 files from {directory()}\n"
    models()
    assert "rounded weights" not in capsys.readouterr().out and not list(directory().iterdir())


def test_what_does_not_fit_in_full_precision_is_quantised_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 billion parameters in bfloat16."""
    installed: dict[str, object] = {"llvmlite": object()}
    monkeypatch.setattr("minitui.cli.models.importlib.util.find_spec", installed.get)
    assert fit(16 * GB, 2, Memory(40 * GB, on_gpu=False)) == "yes"
    assert fit(16 * GB, 2, Memory(20 * GB, on_gpu=True)) == "yes"
    assert fit(16 * GB, 2, Memory(24 * GB, on_gpu=False)) == "yes, in bf16"
    assert fit(16 * GB, 2, Memory(12 * GB, on_gpu=False)) == "yes, in int8"
    monkeypatch.setattr(Int4Weight, "why_not", lambda: "")
    assert fit(16 * GB, 2, Memory(8 * GB, on_gpu=False)) == "yes, in int4"
    assert fit(16 * GB, 2, Memory(5 * GB, on_gpu=False)) == "no: even 4-bit weights take 6.0 GB, and 5.0 GB are free"
    monkeypatch.setattr(Int4Weight, "why_not", lambda: "llvmlite is not installed")
    installed.clear()
    assert fit(16 * GB, 2, Memory(24 * GB, on_gpu=False)) == "yes, in int8"
    assert fit(16 * GB, 2, Memory(12 * GB, on_gpu=True)) == "with --quantization fp8"
    assert fit(16 * GB, 2, Memory(8 * GB, on_gpu=False)) == "no: even 8-bit weights take 9.2 GB, and 8.0 GB are free"


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
