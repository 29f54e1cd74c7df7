"""Compiles Triton kernels for a card that is not there. Functions that launch kernels are called with tensors on the
CPU. Each launch only compiles its kernel for the card. So a test sees what the functions choose: tiles, stages, whether
launches overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.kernels import card, four_bits
from engine.kernels.card import Card

Sizes = dict[str, int]  # kernel -> the largest number of bytes of shared memory of its forms


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
            found[name] = max(found.get(name, 0), made.metadata.shared)

        return launch

    with monkeypatch.context() as patch:
        for module in (card, four_bits):
            patch.setattr(module, "card", lambda: wanted)
        card.overlap.cache_clear()
        patch.setattr(JITFunction, "__getitem__", compiled)
        patch.setattr(driver, "_active", AbsentCard(wanted.capability))
        yield found
    card.overlap.cache_clear()
