"""Captures CUDA graphs. All graphs share one memory pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.progress import Progress
from engine.worker.loaded import LoadedModel

logger = logging.getLogger("engine")

# One capture: its name, the dict that keeps the graph, the key in that dict, and the function to capture.
Work = tuple[str, dict[Any, torch.cuda.CUDAGraph], Any, Callable[[], None]]


def capture_all(loaded: LoadedModel, work: list[Work], on_progress: Progress | None) -> None:
    """Capture the graphs in the order of `work`, and note the time and memory used. Every rank must use the same order.

    Large graphs should come first: smaller graphs then reuse their memory.
    """
    started = time.perf_counter()
    device = loaded.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_reserved(device)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    # NCCL's own thread queries events during the capture, which mode "global" forbids.
    mode = "global" if loaded.group.size == 1 else "thread_local"
    for done, (name, graphs, key, run) in enumerate(work):
        if on_progress is not None:
            text = f"capturing CUDA graphs: {name}"
            on_progress({"stage": "graphs", "done": done, "total": len(work), "text": text})
        graphs[key] = _capture(run, pool, stream, mode)
    loaded.group.take_time()  # discards the time measured in collectives so far: it belongs to no step
    torch.cuda.synchronize(device)
    seconds, nbytes = time.perf_counter() - started, torch.cuda.memory_reserved(device) - before
    note = f"{len(work)} CUDA graphs captured in {seconds:.1f} s, {nbytes / 1e6:,.0f} MB"
    loaded.memory.notes.append(note)
    logger.info(note)


def _capture(run: Callable[[], None], pool: Any, stream: torch.cuda.Stream, mode: str) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        run()  # compiles kernels and lets cuBLAS choose kernels: both are forbidden during a capture
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    torch.cuda.synchronize(stream.device)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        run()
    return graph
