"""A faster import of torch, which is most of the start of an engine process."""

from __future__ import annotations

import gc
import sys


def import_torch() -> None:
    """Import torch without garbage collections, and exclude its objects from later ones.

    A full collection visits every object of torch: often during the import, and later between steps.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
