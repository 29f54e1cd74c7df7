"""What makes a process of the engine ready sooner: importing torch is most of its start."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from types import ModuleType

# What torch knows in Python of the shapes that its operators give, for torch.compile and for tensors without data: a
# quarter of its import. Here only `dummy_weights` needs it: without, torch makes no generator of random numbers.
_SHAPES = "torch._meta_registrations"
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # what drivers of NVIDIA, Windows' Linux and AMD make


def import_torch() -> None:
    """Import torch; on a machine without a GPU, without the part of it that only a compiler of models needs.

    The garbage collector rests meanwhile and passes by all that stands afterwards: a full collection would look at
    every function of torch, many times during the import and later between two steps.
    """
    if "torch" in sys.modules:
        return
    whole = any(map(os.path.exists, _GPUS))  # packages of kernels for it may compile
    if not whole:
        sys.modules[_SHAPES] = ModuleType(_SHAPES)
    gc.disable()
    try:
        import torch
    finally:
        gc.freeze()
        gc.enable()
        if not whole:
            del sys.modules[_SHAPES]
    if not whole:
        vars(torch).pop(_SHAPES.removeprefix("torch."), None)


def import_shapes() -> None:
    """Import what `import_torch` left out, before somebody makes a torch.Generator."""
    importlib.import_module(_SHAPES)
