"""Prepares an engine process: sets up its log, and makes the import of torch faster."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

NVIDIA = Path("/dev/nvidiactl")  # exists if there is a GPU of NVIDIA
COLLECT_AFTER = 20_000  # more objects made than freed; Python's default of 700 is reached in every step


def log_to_stderr() -> None:
    """Write log messages to stderr, which the client directs to a file."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=form, force=True)


class _ImportedWhenUsed(ModuleType):
    """In the place of a module, until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_torch() -> None:
    """Import torch without garbage collections, and exclude its objects from later collections. Otherwise each full
    collection would visit every object of torch, during the import and later between steps. A fifth of the import is
    put off: the shapes of operators for torch.compile, which an engine does not use."""
    if "torch" in sys.modules:
        return
    sys.modules["torch._meta_registrations"] = _ImportedWhenUsed("torch._meta_registrations")
    gc.disable()
    try:
        import torch._prims.rng_prims  # noqa: F401 (torch.Generator needs it, and what is put off imports it)
    finally:
        gc.freeze()
        gc.enable()


def hash_triton() -> None:
    """Let Triton hash its own files, as it does once in a process before its first kernel: 0.7 s, mostly without
    Python's lock. Without a GPU of NVIDIA this does nothing."""
    if NVIDIA.exists() and importlib.util.find_spec("triton") is not None:
        from triton.runtime.cache import triton_key

        triton_key()


def open_gpu(device: str) -> None:
    """Make the context of a GPU of NVIDIA, which torch then finds: without Python's lock, while torch is imported.
    `device`: EngineConfig.device. Torch reports an error better than this function, which ignores it."""
    kind, _, number = device.partition(":")
    if kind in ("auto", "cuda") and NVIDIA.exists():
        with contextlib.suppress(OSError, ValueError):
            cuda = ctypes.CDLL("libcuda.so.1")
            cuda.cuInit(0)
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), int(number or 0))


def fewer_collections() -> None:
    """Collect garbage less often. In a server of 256 streams, collections of young objects took 4 % of the time
    (Qwen3-8B on an H200)."""
    gc.set_threshold(COLLECT_AFTER, 20, 20)
