"""Makes the uninitialised parameters of a decoder: matrices, which may be rounded numbers, and weights of norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.linear import ByteWeight, Matrix
from engine.model.slots import Slot

Quantised = type[ByteWeight] | None  # the class of rounded matrices; None: matrices are plain tensors
Kept = Mapping[str, Quantised]  # by name of a tensor: the class that holds its 8-bit numbers as they are; None: none


@dataclass(frozen=True)
class Matrices:
    """Makes uninitialised matrices of a decoder: tensors of `dtype`, or rounded numbers."""

    dtype: torch.dtype
    device: torch.device
    quantised: Quantised
    kept: Kept

    def empty(self, rows: int, columns: int, prefix: str = "", names: Iterable[str] = ()) -> Matrix:
        """Returns a parameter [rows, columns] for the tensors of these names. All of them are kept, or none is."""
        kind = self.kept_kind(prefix, names) or self.quantised
        if kind is not None and kind.holds(rows, columns):
            return kind.empty(rows, columns, self.device)
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)

    def kept_kind(self, prefix: str, names: Iterable[str]) -> Quantised:
        """Returns the class that holds all tensors of these names as they are stored; None if there is none."""
        kinds = {self.kept.get(f"{prefix}{name}.weight") for name in names}
        return kinds.pop() if len(kinds) == 1 else None


def norm_weight(config: ModelConfig, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised norm weight [size]; for LayerNorm, weight and bias [2, size]."""
    wide = torch.promote_types(dtype, torch.float32) if config.wide_norms else dtype
    return torch.empty((2, size) if config.layer_norm else (size,), dtype=wide, device=device)


def norm_slots(name: str, weight: torch.Tensor | None) -> Iterator[Slot]:
    """Yields the slots of a norm weight of the hidden size; none if the model does not have this norm."""
    if weight is not None:
        for leaf, view in zip(("weight", "bias"), weight.view(-1, weight.shape[-1]), strict=False):
            yield Slot(f"{name}.{leaf}", view)
