"""The memory of a decoder's parameters on a CPU: one piece, in large pages where the system has them.

A decode step reads all weights, so the processor needs the address of every page. Pages of 2 MiB instead of 4 KiB make
one row faster (engine/kernels/MEASURED.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.model.decoder import Decoder

ALIGNED = 64  # bytes: each parameter begins at a multiple


class Parameters(TorchFunctionMode):
    """Within this context, empty tensors take their memory from `memory`; if that is None, they are only collected."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.tensors: list[torch.Tensor] = []
        self.end = 0  # bytes from the first parameter to the end of the last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.empty_like):
            return func(*args, **kwargs)
        tensor = func(*args, **(kwargs if self._memory is None else {**kwargs, "device": "meta"}))
        begin, self.end = self.end, aligned(self.end + tensor.nbytes)
        if self._memory is not None:
            if self.end > len(self._memory):
                raise ValueError(f"it has {len(self._memory):,} bytes, and the model needs more")
            tensor = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.tensors.append(tensor)
        return tensor


def aligned(end: int) -> int:
    return -(-end // ALIGNED) * ALIGNED


def in_large_pages(make: Callable[[], Decoder]) -> tuple[Decoder, Parameters]:
    """Returns what `make` returns, with uninitialised parameters in large pages, and the parameters."""
    with Parameters() as counted:
        make()  # takes addresses only: memory that is never written has no pages
    with Parameters(large_pages(counted.end)) as made:
        return make(), made


def large_pages(size: int) -> torch.Tensor:
    """Returns `size` bytes, at an address that is a multiple of ALIGNED."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel was built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)
