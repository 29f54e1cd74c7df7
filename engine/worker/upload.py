"""Small arrays on their way to the device and back: nobody waits, and nothing is overwritten while it is copied."""

from __future__ import annotations

import numpy as np
import torch

RING = 32  # copies that may be on their way at once


class Uploader:
    """`upload(array)` -> the same values as a tensor on the device, copied in the order of the compute stream.

    On a CPU the tensor shares the array's memory. On a GPU the copy goes through a ring of pinned buffers, each
    guarded by an event: a buffer is written again only when the copy out of it is over.
    """

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
    """A pinned copy that is on its way: read it when an event recorded after this call has passed."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
