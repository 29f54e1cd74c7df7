"""Copies of small arrays to the device and back. The host waits only if all buffers are in use.

A buffer is not changed while a copy from it is running.
"""

from __future__ import annotations

import numpy as np
import torch

RING = 32  # pinned buffers, so at most this many copies run at the same time
STAGING_RING = 4  # more than the largest number of steps in flight


class Uploader:
    """Copies arrays to the device: `upload(array)` returns a device tensor. The copy runs in stream order. On a CPU the
    tensor shares the array's memory. On a GPU the copy uses a ring of pinned buffers. A buffer is reused only after the
    copy from it has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * RING
        self._copied: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(array)
        if self._device.type == "cpu":
            return source
        slot = self._next
        self._next = (slot + 1) % RING
        buffer, copied = self._buffers[slot], self._copied[slot]
        if copied is not None:
            copied.synchronize()
        if buffer is None or buffer.nbytes < source.nbytes:
            buffer = torch.empty(max(source.nbytes, 4096), dtype=torch.uint8, pin_memory=True)
            self._buffers[slot] = buffer
        staged = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        staged.copy_(source)
        tensor = staged.to(self._device, non_blocking=True)
        if copied is None:
            copied = self._copied[slot] = torch.cuda.Event()
        copied.record()
        return tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned host memory; return the copy, valid once an event recorded after this call completes."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class Staging:
    """Copies host arrays to one fixed device buffer, which CUDA graphs read. The copies use pinned buffers. A buffer is
    reused only after the copy from it has finished."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.target = torch.zeros(size, dtype=dtype, device=device)
        self._pinned = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(STAGING_RING)]
        self._arrays = [buffer.numpy() for buffer in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(STAGING_RING)]
        self._next = 0

    def array(self) -> np.ndarray:
        """Wait for the next pinned buffer, and return it for writing. `send` copies it to the device."""
        self._copied[self._next].synchronize()
        return self._arrays[self._next]

    def send(self, size: int) -> None:
        """Copy the first `size` elements of the buffer that `array` returned last, in stream order."""
        slot = self._next
        self.target[:size].copy_(self._pinned[slot][:size], non_blocking=True)
        self._copied[slot].record()
        self._next = (slot + 1) % STAGING_RING
