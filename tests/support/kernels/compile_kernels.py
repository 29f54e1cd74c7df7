"""Compiles Triton kernels for a card that is not there. Functions that launch kernels are called with tensors on the
CPU. Each launch only compiles its kernel for the card. So a test sees what the functions choose: tiles, stages, whether
launches overlap."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from engine.kernels import card
from engine.kernels.card import Card


class Size(NamedTuple):
    """The most that a form of a kernel takes."""

    shared: int = 0  # bytes of shared memory of a program
    local: int = 0  # bytes of a thread outside registers: spilled ones
    ahead: bool = True  # all its forms copy numbers into shared memory while they compute


Sizes = dict[str, Size]  # by kernel


class AbsentCard:
    """In the place of Triton's driver."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def local_bytes(made: Any) -> int:
    """Returns the bytes of local memory of each thread of a compiled kernel."""
    from triton import knobs

    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(stack) + int(local) for stack, local in re.findall(r"STACK:(\d+) .*?LOCAL:(\d+)", said))


@contextmanager
def compiling_for(wanted: Card, monkeypatch: Any) -> Iterator[Sizes]:
    """Inside the block, launches compile for the card `wanted`, and the dict receives what they take."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: Sizes = {}

    def compiled(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            kernel.device_caches.clear()  # they belong to another card
            made = kernel.run(*args, grid=(1,), warmup=True, **options)
            name = kernel.fn.__name__
            most = found.get(name, Size())
            ahead = most.ahead and "cp.async" in made.asm["ptx"]
            found[name] = Size(max(most.shared, made.metadata.shared), max(most.local, local_bytes(made)), ahead)

        return launch

    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("engine.kernels.") and callable(getattr(module, "card", None)):
                patch.setattr(module, "card", lambda: wanted)
        card.overlap.cache_clear()
        patch.setattr(JITFunction, "__getitem__", compiled)
        patch.setattr(driver, "_active", AbsentCard(wanted.capability))
        yield found
    card.overlap.cache_clear()
