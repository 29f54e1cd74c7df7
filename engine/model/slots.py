"""Which part of which tensor of a checkpoint fills which slice of a parameter, and how it is changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.model.config import Packing
from engine.model.linear import BLOCK, ByteWeight, Fp8Blocks, Matrix
from engine.model.packed import Packed, packed

Shapes = Mapping[str, list[int]]  # of all tensors in a checkpoint, by name


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: pieces of equal size along `dim`, which begin at `starts`. `whole`: the size of the whole
    tensor along `dim`."""

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
    transposed: bool = False  # the part is [E, in, out], and the view holds [E, out, in]
    packed: Packed | None = None  # the tensors in which a quantised matrix is stored

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor in the checkpoint; of a quantised matrix, before its quantisation."""
        shape = list(self.stored or (self.view.shape[1:] if self.repeated else self.view.shape))
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.whole
        return shape

    def take(self, tensor: Any, block: tuple[int, ...] = ()) -> torch.Tensor:
        """Returns the part of the tensor that fills the view. From a safetensors slice, only this part is read.
        `block`: in each dimension, how many numbers of the matrix have one number in the tensor; (): each has its
        own."""
        if self.cut is None:
            return tensor[:]
        dim = self.cut.dim
        extent = (self.stored or self.view.shape)[dim] // len(self.cut.starts)
        unit = block[dim] if block else 1
        if unit == self.cut.whole:
            return tensor[:]
        spans = [slice(start // unit, (start + extent) // unit) for start in self.cut.starts]
        pieces = [tensor[(slice(None),) * dim + (span,)] for span in spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def at_multiples(self, columns: int) -> bool:
        """Returns True if the part begins and ends at multiples of `columns` columns."""
        if self.cut is None or self.cut.dim == 0 or columns == self.cut.whole:
            return True
        extent = (self.stored or self.view.shape)[self.cut.dim] // len(self.cut.starts)
        return not any(edge % columns for edge in (*self.cut.starts, extent))

    def transpose(self) -> Slot:
        """Returns the slot of experts [E, out, in] for a checkpoint that stores them as [E, in, out]."""
        experts, rows, columns = self.stored or self.view.shape
        cut = None if self.cut is None else replace(self.cut, dim=3 - self.cut.dim)
        return replace(self, cut=cut, stored=(experts, columns, rows), transposed=True)

    def in_order(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the part with its dimensions, and the rows of each head, in the view's order."""
        part = part.transpose(1, 2) if self.transposed else part
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
        values = self.in_order(self.take(tensors[packed.sources[0].suffix].view(torch.uint8)))
        scale = self.take(packed.scales(tensors), packed.block)
        scale = self.in_order(scale) if packed.block[0] == 1 else scale  # the rows of a head are in one block
        self.view.keep(values, scale if self.fold is None else self.fold(scale))
        return True

    @property
    def scalars(self) -> int:
        """The number of values that are read for the view."""
        return (self.view.shape[1:] if self.repeated else self.view.shape).numel()


def in_checkpoint(slot: Slot, shapes: Shapes) -> tuple[Slot, ...]:
    """Returns the slots of the tensors that the checkpoint has for `slot`: itself, transposed, or its parts. Experts
    that are one tensor are published as [E, in, out] (Qwen3-VL-MoE); transformers 5 writes [E, out, in]."""
    if not slot.parts:
        return (slot,)
    if slot.name not in shapes:
        return slot.parts
    other = slot.transpose()
    return (other if shapes[slot.name] == other.shape != slot.shape else slot,)


def kept(pairs: Iterable[tuple[Slot, Slot]], packing: Packing, shapes: Shapes) -> dict[str, type[ByteWeight] | None]:
    """Returns, for each quantised matrix, the class that holds its 8-bit numbers unchanged; None: it is expanded.
    `pairs`: each slot of the decoder, and the slot with the names of the checkpoint. `shapes`: of all tensors in the
    checkpoint. The result has the names in the decoder; experts that are one tensor have the names of the parts."""
    found: dict[str, type[ByteWeight] | None] = {}
    for ours, slot in pairs:
        tensors = {each.name: each for each in in_checkpoint(slot, shapes)}
        for own, part in zip(ours.parts, slot.parts, strict=True) if slot.parts else ((ours, slot),):
            each = tensors.get(slot.name) or tensors[part.name]
            if (stored := packed(packing, each.name, each.shape, shapes)) is not None:
                found[own.name] = stored.kind if _fits(part, stored.kind) else None
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
