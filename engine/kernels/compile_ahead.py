"""Compiles Triton kernels in several threads, before their first launch.

Triton compiles a kernel when it is launched for the first time, in the thread that launches it. The passes of the
compiler release Python's lock, and ptxas is a process of its own, so threads compile side by side (MEASURED.md).

Triton keeps compiled kernels on disk, by a hash of their source, their options, the card and the compiler's version. No
kernel is tuned at the start: the forms are tables. A kernel whose files are damaged is compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import build
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

SWITCH_S = 5e-4  # Python's lock changes hands after so long: steps run between the threads that compile

logger = logging.getLogger("engine")


class CompileAhead(AsyncCompileMode):
    """Until `close`, kernels of the thread that made this are compiled by others. A launch waits for its kernel."""

    raw_futures: list[Future[Any]]  # one for each kernel

    def __init__(self) -> None:
        cores, device = len(os.sched_getaffinity(0)), torch.cuda.current_device()
        self._threads = ThreadPoolExecutor(max(1, cores - 1), "kernels", torch.cuda.set_device, (device,))
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, self._interval))
        build._load_module_from_path = load_alone
        super().__init__(self._threads, ignore_errors=True)  # a launch raises them again
        self.__enter__()

    def submit(self, key: str, compile: Callable[[], Any], *others: Any) -> Any:
        """Triton's call for a kernel that is not compiled yet."""
        return super().submit(key, partial(_compiled, key, compile), *others)

    def gather(self, run: Callable[[], object]) -> None:
        """Call `run` without launching its kernels: those that are not compiled yet are compiled from now on. Their
        outputs keep whatever was in memory, so no operation in `run` may take a tensor's values as indices."""
        for each in list(self.future_kernels.values()):
            if each.future.done():
                each.result(ignore_errors=True)  # now Triton knows the kernel, which saves 1 ms at each launch
        launch = KernelInterface.__getitem__
        KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.run, grid=grid, warmup=True)
        try:
            run()
        finally:
            KernelInterface.__getitem__ = launch

    def progress(self, patience: float = 0.0) -> tuple[int, int]:
        """Returns how many kernels are compiled, and how many there are. Waits up to `patience` seconds for the next
        one."""
        pending = [future for future in self.raw_futures if not future.done()]
        if pending and patience:
            wait(pending, patience, "FIRST_COMPLETED")
            pending = [future for future in pending if not future.done()]
        return len(self.raw_futures) - len(pending), len(self.raw_futures)

    def close(self) -> None:
        """Let Triton compile as usual again. Kernels that no thread has begun are compiled when they are launched."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.raw_futures = [future for future in self.raw_futures if future.done() and not future.cancelled()]
        self.__exit__(None, None, None)
        sys.setswitchinterval(self._interval)


def compiler() -> CompileAhead | None:
    """Returns what compiles this thread's kernels ahead; None: another engine of this thread has one already."""
    return CompileAhead() if active_mode.get() is None else None


_loading = threading.Lock()
_load = build._load_module_from_path


def load_alone(name: str, path: str) -> Any:
    """Returns what the extension module in a file contains.

    All launchers of Triton 3.6 are modules of one name. When Python loads a file again, it changes the last module of
    this name, which another thread may be about to use: that thread's kernel then got the launcher of another kernel.
    """
    with _loading:
        return SimpleNamespace(**vars(_load(name, path)))


def _compiled(key: str, compile: Callable[[], Any]) -> Any:
    """Returns a kernel on the device. If the files that Triton kept are damaged, it is compiled again."""
    try:
        return _on_device(compile())
    except OutOfResources:
        raise
    except Exception as error:
        kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir
        logger.warning("a kernel is compiled again: %s in %s (%s)", type(error).__name__, kept, error)
        shutil.rmtree(kept, ignore_errors=True)
        return _on_device(compile())


def _on_device(kernel: Any) -> Any:
    if len(kernel.kernel) < (size := elf_size(kernel.kernel)):  # the driver would read past the end, and crash
        raise ValueError(f"the binary has {len(kernel.kernel):,} of {size:,} bytes")
    kernel.run  # noqa: B018 (it builds the launcher, with a C compiler if it is new, and loads the kernel)
    return kernel


def elf_size(binary: bytes) -> int:
    """Returns how many bytes an ELF file needs to hold its tables of segments and sections (the last parts of what
    ptxas writes)."""
    header = struct.Struct("<32x QQ 6x HHHH")  # where the tables begin, then size and number of their entries
    if len(binary) < header.size:
        return header.size
    segments, sections, segment_size, segment_count, section_size, section_count = header.unpack_from(binary)
    return max(segments + segment_size * segment_count, sections + section_size * section_count)
