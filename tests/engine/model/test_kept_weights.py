"""Weights that were rounded for a CPU are kept on disk: the next start computes the same without rounding again."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import build
from engine.config import EngineConfig
from engine.disk_cache import ROUNDED
from engine.errors import EngineError
from engine.model.four_bits import Int4Weight
from engine.model.linear import ByteWeight
from engine.text import early_tokenizer
from engine.worker.weights import kept_files, load_model, quantised
from tests.support.models import Driver, make_request, make_runner, prompt, reference, save
from tests.support.packing import FORMATS, quantise

INT8 = {"quantization": "int8", "block_size": 16}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept weights. All sizes are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_model, "LEAST", 0)
    monkeypatch.delenv(ROUNDED.variable, raising=False)
    return ROUNDED.folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(reference("qwen3"), tmp_path / "Org" / "Model")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose weights were read and rounded."""
    found: list[Path] = []

    def load_weights(slots: Any, directory: Path, *others: Any) -> None:
        found.append(directory)
        original(slots, directory, *others)

    original = load_model.load_weights
    monkeypatch.setattr(load_model, "load_weights", load_weights)
    return found


def reply(runner: Any) -> list[int]:
    return Driver(runner).generate(make_request(prompt(), 0), 8)


@pytest.mark.parametrize("kind", ["int8", "int4", "gptq in order"])
def test_the_second_start_computes_the_same_without_rounding(
    checkpoint: Path, folder: Path, read: list[Path], kind: str
) -> None:
    if kind != "int8" and (why_not := Int4Weight.why_not()):
        pytest.skip(why_not)
    if kind in FORMATS:  # a 4-bit checkpoint, whose groups have offsets
        whole, checkpoint, kind = checkpoint, checkpoint.parent.parent / "Model", "int4"
        quantise(reference("qwen3"), whole, checkpoint, "gptq in order")
    options = INT8 | {"quantization": kind}
    first, second = make_runner(checkpoint, **options), make_runner(checkpoint, **options)
    assert read == [checkpoint], "the second start must not round"
    (path,) = folder.iterdir()
    assert path.name.startswith(f"Model-{kind}-")
    assert (path / "weights").stat().st_size > first.loaded.memory.weights
    assert reply(first) == reply(second)
    assert first.loaded.notes == second.loaded.notes == ()
    assert second.loaded.memory.weights == first.loaded.memory.weights


@pytest.mark.parametrize("choice", ["int8", "auto"])
def test_the_second_start_reads_the_file_while_other_work_is_done(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    """While torch is imported if the kind of weights is known by then; and while the tokenizer is loaded."""
    monkeypatch.setattr(quantised, "free_memory", lambda: quantised.BESIDE_WEIGHTS + 200_000)  # too small for float32
    make_runner(checkpoint, **INT8)
    have_read, meanwhile = threading.Event(), []

    def read(path: Path) -> Any:
        memory = original(path)
        have_read.set()
        return memory

    original = kept_files._read
    monkeypatch.setattr(kept_files, "_read", read)

    def import_torch() -> None:
        meanwhile.append(have_read.wait(10 if choice == "int8" else 0))

    def load_tokenizer(directory: Path) -> None:
        meanwhile.append(have_read.wait(10))

    monkeypatch.setattr(early_tokenizer, "_load", load_tokenizer)
    config = EngineConfig(str(checkpoint), device="cpu", quantization=choice, cpu_threads=1)
    built = build.build_engine(config, before_torch=import_torch)
    assert meanwhile == [choice == "int8", True]
    assert built.info.quantization == "int8" and not kept_files._begun


def flags(address: int) -> list[str]:
    """What Linux says about the memory at this address, in the words of /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
def test_weights_are_in_one_piece_of_memory_in_large_pages(checkpoint: Path, folder: Path) -> None:
    """Also those that are not rounded, and those of a second start."""
    for options in {}, INT8, INT8:
        model = make_runner(checkpoint, **options).loaded.model
        views = [slot.view.values if isinstance(slot.view, ByteWeight) else slot.view for slot in model.slots()]
        begin, end = min(view.data_ptr() for view in views), max(view.data_ptr() + view.nbytes for view in views)
        assert end - begin < 1.1 * model.nbytes + 4096
        assert all("hg" in flags(view.data_ptr()) for view in (views[0], views[-1]))


@pytest.mark.parametrize("change", ["contents", "kind", "configuration"])
def test_other_weights_have_another_file(checkpoint: Path, folder: Path, read: list[Path], change: str) -> None:
    make_runner(checkpoint, **INT8)
    expected = 2
    if change == "contents":
        save(reference("qwen3", seed=1), checkpoint)
    elif change == "configuration":
        save(reference("qwen3"), checkpoint, edit={"rms_norm_eps": 1e-3})
    else:
        expected = 1  # float32 weights are read from the checkpoint at each start
    make_runner(checkpoint, **(INT8 | ({"quantization": "none"} if change == "kind" else {})))
    assert len(read) == 2 and len(list(folder.iterdir())) == expected


def test_it_can_be_switched_off(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runner(checkpoint, keep_weights=False, **INT8)
    monkeypatch.setenv(ROUNDED.variable, "0")
    make_runner(checkpoint, **INT8)
    assert not folder.exists()
    monkeypatch.setenv(ROUNDED.variable, "lots")
    with pytest.raises(EngineError, match="MINITUI_KEPT_WEIGHTS_GB is 'lots': it must be a number of gigabytes"):
        make_runner(checkpoint, **INT8)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def swap_pages(path: Path) -> None:
    """The sum of the words stays the same."""
    data = path.read_bytes()
    first, second = data[:4096], data[4096:8192]
    assert first != second
    path.write_bytes(second + first + data[8192:])


@pytest.mark.parametrize("damage,why", [
    (cut, r"weights has [\d,]+ bytes instead of"), (swap_pages, "the contents of weights have changed"),
])


def test_a_damaged_entry_is_named_and_written_again(
    checkpoint: Path, folder: Path, read: list[Path], damage: Callable[[Path], None], why: str
) -> None:
    first = make_runner(checkpoint, **INT8)
    (entry,) = folder.iterdir()
    damage(entry / "weights")
    second = make_runner(checkpoint, **INT8)
    (note,) = second.loaded.notes
    assert str(entry) in note and re.search(why, note) and note.endswith("the weights were rounded again")
    assert reply(first) == reply(second) == reply(make_runner(checkpoint, **INT8))
    assert len(read) == 2, "the third start uses the entry again"


def test_an_entry_of_another_size_is_written_again(checkpoint: Path, folder: Path, read: list[Path]) -> None:
    """As if REVISION had been forgotten."""
    make_runner(checkpoint, **INT8)
    (entry,) = folder.iterdir()
    shutil.rmtree(entry)
    ROUNDED.keep(entry.name, lambda place: (place / "weights").write_bytes(bytes(640)), 640)
    (note,) = make_runner(checkpoint, **INT8).loaded.notes
    assert "the weights were rounded again" in note and len(read) == 2
    assert make_runner(checkpoint, **INT8).loaded.notes == ()


def test_a_folder_that_cannot_be_written_is_a_sentence(checkpoint: Path, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    (note,) = make_runner(checkpoint, **INT8).loaded.notes
    assert "are not kept for the next start" in note and "set XDG_CACHE_HOME to a writable folder" in note
