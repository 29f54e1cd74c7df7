"""Captures CUDA graphs, one at a time. All graphs share one memory pool."""

from __future__ import annotations

from collections.abc import Callable

import torch

SPARE = 1.25  # the pool's memory, as a multiple of what the largest graph needs: freed pieces do not always fit


class Captures:
    """The memory pool and the stream of the captures. Every rank must capture the same graphs in the same order."""

    def __init__(self, device: torch.device, ranks: int, largest: int) -> None:
        """`largest`: the bytes that the largest graph needs for what it computes; 0: unknown. They are taken now, so a
        later capture cannot run out of memory."""
        self._device = device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        # NCCL's own thread queries events during the capture, which mode "global" forbids.
        self._mode = "global" if ranks == 1 else "thread_local"
        self.reserved = int(largest * SPARE)
        with torch.cuda.stream(self._stream):
            few = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(few, few)  # takes the memory of cuBLAS for this stream, 32 MB
        # A pool keeps its memory as long as one of its graphs exists.
        self._reserve = self._captured(self._take) if largest else None

    def _take(self) -> None:
        torch.empty(self.reserved, dtype=torch.uint8, device=self._device)[:1].zero_()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Call `run` twice, and return a graph of the second call. Both run after what was launched before."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # lets cuBLAS choose kernels, and loads and compiles ours: all forbidden during a capture
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        return self._captured(run)

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Not torch.cuda.graph: that frees all cached memory first, which the next steps would have to allocate."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)
            try:
                run()
            finally:
                graph.capture_end()
        return graph
