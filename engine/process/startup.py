"""Prepares an engine process: sets up its log, and makes the import of torch faster."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import logging
import subprocess
import sys
from importlib.abc import MetaPathFinder
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


class _PrimsFirst(MetaPathFinder):
    """Imports torch._prims before torch._dynamo: the other way round, their circular imports fail."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch._dynamo":
            sys.meta_path.remove(self)
            importlib.import_module("torch._prims.rng_prims")


def import_torch() -> None:
    """Import torch without garbage collections, and exclude its objects from later collections. Otherwise each full
    collection would visit every object of torch, during the import and later between steps. A quarter of the import is
    put off: what torch.compile knows of operators. An engine does not use it, but operators of extensions may."""
    if "torch" in sys.modules:
        return
    sys.modules["torch._meta_registrations"] = _ImportedWhenUsed("torch._meta_registrations")
    sys.meta_path.insert(0, _PrimsFirst())
    gc.disable()
    try:
        import torch

        if hasattr(torch._C, "_set_generator_metaclass"):  # torch._prims, which is put off, prepares torch.Generator
            from torch._opaque_base import OpaqueBaseMeta

            torch._C._set_generator_metaclass(OpaqueBaseMeta)
    finally:
        gc.freeze()
        gc.enable()


def hash_triton() -> None:
    """Let another process hash Triton's files, as Triton does in each process before its first kernel: 0.7 s, which
    would delay the import of torch beside it. Without a GPU of NVIDIA this does nothing."""
    if NVIDIA.exists() and importlib.util.find_spec("triton") is not None:
        code = "from triton.runtime.cache import triton_key; print(triton_key())"
        hashed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        if not hashed.returncode:
            from triton.runtime import cache

            cache.triton_key = hashed.stdout.strip  # a function that returns the hash


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
