"""Which part of which tensor of a checkpoint fills which slice of a parameter, and how it is changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.config import Packing
from engine.model.linear import BLOCK, ByteWeight, Fp8Blocks, Matrix
from engine.model.packed import Packed, packed


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: pieces of equal size along `dim`, which begin at `starts`.

    `whole`: the size of the whole tensor along `dim`.
    """

    dim: int
    starts: tuple[int, ...]
    whole: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The tensor `name` of the checkpoint, and the slice of a parameter that it fills."""

    name: str
    view: Matrix
    repeated: bool = False  # the checkpoint has one row, which is copied to every row of the view
    parts: tuple[Slot, ...] = ()  # the checkpoint may have these tensors instead of `name`
    cut: Cut | None = None  # the part of the tensor that fills the view (shards.py); None: the whole tensor
    # Change the part before it is copied (checkpoint.py): `order` is that of the rows of each head, `fold` changes the
    # numbers. `stored`: the shape of the part before these changes, if it is not the view's.
    order: torch.Tensor | None = None
    fold: Callable[[torch.Tensor], torch.Tensor] | None = None
    stored: tuple[int, ...] | None = None
    packed: Packed | None = None  # the tensors in which a quantised matrix is stored

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor in the checkpoint; of a quantised matrix, before its quantisation."""
        shape = list(self.stored or (self.view.shape[1:] if self.repeated else self.view.shape))
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.whole
        return shape

    def take(self, tensor: Any, block: tuple[int, int] = (1, 1)) -> torch.Tensor:
        """Returns the part of the tensor that fills the view. From a safetensors slice, only this part is read.

        `block`: the rows and columns of the matrix for which the tensor has one number.
        """
        if self.cut is None:
            return tensor[:]
        dim = self.cut.dim
        extent = (self.stored or self.view.shape)[dim] // len(self.cut.starts)
        unit = block[dim] if dim < len(block) else 1  # the tensors of experts have three dimensions
        if unit == self.cut.whole:
            return tensor[:]
        spans = [slice(start // unit, (start + extent) // unit) for start in self.cut.starts]
        pieces = [tensor[(slice(None),) * dim + (span,)] for span in spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def in_order(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the part with the rows of each head in the slot's order."""
        if self.order is None:
            return part
        return part.unflatten(0, (-1, len(self.order)))[:, self.order].flatten(0, 1)

    def fill(self, part: torch.Tensor) -> None:
        """Copy the part of the checkpoint's tensor to the view."""
        part = self.in_order(part)
        self.view.copy_(part if self.fold is None else self.fold(part))

    def fill_stored(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy the numbers of a quantised matrix to the view as they are stored; False if the view cannot hold them."""
        packed = self.packed
        if packed is None or packed.scales is None or packed.kind is None or not isinstance(self.view, packed.kind):
            return False
        values = self.in_order(self.take(tensors["weight"].view(torch.uint8)))
        scale = self.take(packed.scales(tensors), packed.block)
        scale = self.in_order(scale) if packed.block[0] == 1 else scale  # the rows of a head are in one block
        self.view.keep(values, scale if self.fold is None else self.fold(scale))
        return True

    @property
    def scalars(self) -> int:
        """The number of values that are read for the view."""
        return (self.view.shape[1:] if self.repeated else self.view.shape).numel()


def kept(pairs: Iterable[tuple[Slot, Slot]], packing: Packing, held: set[str]) -> dict[str, type[ByteWeight] | None]:
    """Returns, for each quantised matrix, the class that holds its 8-bit numbers unchanged; None: it is expanded.

    `pairs`: each slot of the decoder, and the slot with the names of the checkpoint. `held`: the names of all tensors
    in the checkpoint. The result has the names in the decoder.
    """
    found: dict[str, type[ByteWeight] | None] = {}
    for ours, slot in pairs:
        for own, each in zip(ours.parts, slot.parts, strict=True) if slot.parts else ((ours, slot),):
            if (stored := packed(packing, each.name, each.shape, held)) is not None:
                found[own.name] = stored.kind if _fits(each, stored.kind) else None
    return found


def _fits(slot: Slot, kind: type[ByteWeight] | None) -> bool:
    """Returns True if the GPU kernels support 8-bit numbers of this class in the shape of the slot's part."""
    if kind is None or len(slot.view.shape) != 2:
        return False
    rows, columns = slot.view.shape
    if kind is not Fp8Blocks:
        return columns % BLOCK == 0 and rows % 16 == 0
    edges = rows, columns, *(slot.cut.starts if slot.cut is not None else ())
    return not any(edge % BLOCK for edge in edges) and (slot.order is None or BLOCK % len(slot.order) == 0)
