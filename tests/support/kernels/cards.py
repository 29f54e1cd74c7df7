"""Cards that are not there: what kernels must know of them, and how another card runs the kernels compiled for them."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels import card
from engine.kernels.card import Card

KIB = 1024
CARDS = {
    "A100": Card((8, 0), 163 * KIB), "RTX 3090": Card((8, 6), 99 * KIB), "RTX 4090": Card((8, 9), 99 * KIB),
    "H200": Card((9, 0), 227 * KIB), "B200": Card((10, 0), 227 * KIB), "RTX 5090": Card((12, 0), 99 * KIB),
}


def pretend(name: str, patch: Any) -> None:
    """Make the engine and Triton take this GPU for the card `name`. `patch`: a MonkeyPatch.

    Call it before the kernels are imported. Triton makes its intermediate code for that card (without tensor
    descriptors below 9.0, with that card's instructions for tensor cores, without e4m3 below 8.9), and ptxas assembles
    it for this GPU. Hopper has the instructions of Ampere, Ada and 12.0, but not those of B200.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    driver.active.get_current_target()  # from now on, Triton knows this GPU: ptxas assembles for it
    wanted = CARDS[name]._replace(processors=card.card().processors)
    major, minor = wanted.capability
    patch.setattr(card, "card", lambda: wanted)
    card.overlap.cache_clear()
    patch.setattr(knobs.runtime, "override_arch", f"sm{major}{minor}")
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: wanted.capability)
