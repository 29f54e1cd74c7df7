"""Measures the limits of this machine with random data: copying memory, reading memory, multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

NUMBERS, CPU_NUMBERS = 1 << 29, 1 << 26  # float32 numbers to copy and read: many times the size of the caches
REPEATS = 10
SUSTAINED_SECONDS = 1.5


@dataclass(frozen=True)
class Limits:
    """The limits in bytes per second (a copied byte counts twice: read and written) and operations per second."""

    copy: float
    read: float
    matmul: float
    dtype: str
    sustained: float | None = None  # on a GPU: matmul over 1.5 s, when power and heat lower the clock

    def lines(self) -> list[str]:
        return [
            f"copy    {self.copy / 1e9:10,.0f} GB/s  (read + written)",
            f"read    {self.read / 1e9:10,.0f} GB/s",
            f"matmul  {self.matmul / 1e9:10,.0f} GFLOP/s  ({self.dtype})",
            *([f"        {self.sustained / 1e9:10,.0f} GFLOP/s  sustained"] if self.sustained else []),
        ]


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measures each limit as the median of several runs, but `sustained` in one long run."""
    copy, read = _memory(device, NUMBERS if device.type == "cuda" else CPU_NUMBERS)
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.empty(n, n, device=device).normal_().to(dtype) for _ in range(2))
    if dtype == torch.int8:
        product: Callable[[], object] = partial(torch._int_mm, a, b.t())
    else:
        c = torch.empty(n, n, device=device, dtype=torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype)
        product = partial(torch.mm, a, b, out=c)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=c.dtype, out=c)
    once = _seconds(product, device)
    matmul, sustained = 2 * n**3 / once, None
    if device.type == "cuda":
        times = max(1, int(SUSTAINED_SECONDS / once))
        sustained = 2 * n**3 * times / _seconds(lambda: [product() for _ in range(times)], device, 1, 0)
    # Sometimes a copy reads faster than a reduction: the limit is the higher of the two rates.
    return Limits(copy, max(read, copy / 2), matmul, str(dtype).removeprefix("torch."), sustained)


def cpu_read_speed() -> float:
    """Returns how many bytes of memory the CPU reads per second."""
    copy, read = _memory(torch.device("cpu"), CPU_NUMBERS)
    return max(read, copy / 2)


def _memory(device: torch.device, count: int) -> tuple[float, float]:
    """Returns the bytes per second of copying and of reading `count` float32 numbers. Frees the buffers on return."""
    source = torch.empty(count, device=device).normal_()
    target = torch.empty_like(source)
    rows = source.view(-1, 1 << 20)
    copy = _seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / copy, source.nbytes / _seconds(lambda: rows.sum(1), device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS, warm_up: int = 3) -> float:
    for _ in range(warm_up):
        run()
    if device.type == "cuda":
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return median(times)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)
