"""The memory of a decoder's parameters on a CPU: one piece, in large pages (engine/worker/pages.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.model.decoder import Decoder
from engine.worker.kept_files import ALIGNED
from engine.worker.pages import large_pages


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
    with Parameters(torch.from_numpy(large_pages(counted.end))) as made:
        return make(), made
