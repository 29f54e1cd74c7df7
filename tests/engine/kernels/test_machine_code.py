"""Compiled CPU kernels are kept in files that only their user can write: the next start does not compile them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

torch.get_num_threads()  # its OpenMP library runs the kernels
ir = pytest.importorskip("llvmlite.ir")

from engine.disk_cache import COMPILED  # noqa: E402
from engine.kernels.cpu import library, machine_code  # noqa: E402  (they need llvmlite)
from engine.kernels.cpu.emit import I64, PTR, Kernel  # noqa: E402
from engine.kernels.cpu.features import features  # noqa: E402

if why_not := library.lacks(("float32",)):
    pytest.skip(why_not, allow_module_level=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return COMPILED.folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that were compiled."""
    found: list[str] = []

    def compile_(text: str, features: str) -> bytes:
        found.append(text)
        return original(text, features)

    original = machine_code._compile
    monkeypatch.setattr(machine_code, "_compile", compile_)
    return found


def computed(factor: int) -> int:
    """What a new kernel returns for 7: 7 · factor."""
    module = ir.Module()
    b = Kernel(module, "multiply", 4)
    out, number = b.fields(out=PTR, number=I64)
    b.write(b.mul(number, I64(factor)), out, I64(0), I64)
    b.ret_void()
    kernels, result = library.Kernels(lambda: module, features().flags, factor), np.zeros(1, dtype=np.int64)
    call = np.zeros((1, library.FIELDS), dtype=np.int64)
    call[0, :2] = result.ctypes.data, 7
    kernels.run(np.array([kernels.address("multiply")]), call, 1)
    return int(result[0])


def test_the_second_start_links_what_the_first_compiled(folder: Path, compiled: list[str]) -> None:
    assert [computed(3), computed(3), computed(5), computed(3), computed(5)] == [21, 21, 35, 21, 35]
    assert len(compiled) == len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("change", ["processor", "library"])
def test_another_processor_or_library_compiles_again(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    computed(3)
    if change == "processor":
        monkeypatch.setattr(machine_code.llvm, "get_host_cpu_name", lambda: "")
    else:
        monkeypatch.setattr(machine_code.llvmlite, "__version__", "0.0.0")
    assert computed(3) == 21 and len(compiled) == 2


def test_damaged_code_is_not_executed_and_is_compiled_again(folder: Path, compiled: list[str]) -> None:
    computed(3)
    (entry,) = folder.iterdir()
    whole = (entry / machine_code.CODE).read_bytes()
    (entry / machine_code.CODE).write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert computed(3) == 21 and len(compiled) == 2
    assert (entry / machine_code.CODE).read_bytes() == whole


def test_code_that_another_user_could_have_written_is_not_executed(folder: Path, compiled: list[str]) -> None:
    computed(3)
    folder.chmod(0o722)
    assert computed(3) == 21 and len(compiled) == 2


@pytest.mark.parametrize("why", ["a file", "no home"])
def test_without_a_folder_kernels_are_compiled(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "a file":
        folder.parent.parent.write_text("")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "expanduser", no_home)
    assert [computed(3), computed(3)] == [21, 21] and len(compiled) == 2


def no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")
