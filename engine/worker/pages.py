"""Memory of a CPU in large pages. Needs no torch.

A decode step reads all weights, so the processor needs the address of every page. Pages of 2 MiB instead of 4 KiB make
one row faster (engine/kernels/MEASURED.md).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np


def large_pages(size: int) -> np.ndarray:
    """Returns `size` bytes, in large pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return np.empty(size, dtype=np.uint8)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel was built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=size)
