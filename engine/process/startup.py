"""What makes a process of the engine ready sooner: importing torch is most of its start."""

from __future__ import annotations

import gc
import sys


def import_torch() -> None:
    """Import torch while the garbage collector rests, which passes by all that stands afterwards.

    A full collection looks at every function of torch: many times during the import, and later between two steps.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
