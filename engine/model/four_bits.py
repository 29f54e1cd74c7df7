"""Matrices of 4-bit numbers in groups: Int4Weight on a CPU, Int4Tiles on a GPU.

A group is 32 or more consecutive numbers of a row. A number q from 0 to 15 stands for

    row scale · group scale · (q - 8 + group offset)

Group scales and offsets are float16. The row scale is a power of two in float32, so that group scales are neither too
large nor too small for float16. Our own rounding uses groups without offsets, as Q4_0 of llama.cpp does. The
embedding and the output matrix are int8: they are the most sensitive, and the embedding is read by rows.

The kernel for a CPU (engine/kernels/cpu/four_bits.py) computes float32 activations, 16 rows of the matrix at a time, so
16 rows are stored together: 64 bytes have 8 numbers of each row. The first 4 numbers are the low halves of 4 bytes, the
next 4 are the high halves. The order for a GPU is in engine/kernels/four_bits.py.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch

from engine.kernels.four_bit_rounding import round_groups
from engine.model.config import Packing
from engine.model.linear import ByteWeight, GpuWeight, Int8Rows, Int8Weight
from engine.model.packed import Groups

ROWS, GROUP = 16, 32  # rows that are stored together; numbers in a group of our own rounding
TILE = 128  # rows that are stored together for a GPU
AT_ONCE, AT_ONCE_ON_GPU = 1 << 20, 1 << 25  # numbers that are rounded at a time


class Int4Weight(ByteWeight):
    """A matrix [N, K], with N a multiple of 16 and K a multiple of the group size. values: bytes [N / 16, K / 8, 64];
    scale [N]; groups and offsets: float16 [N / 16, K / group, 16]."""

    __slots__ = ("groups", "offsets")
    dtype = torch.uint8
    compiled = "int4"
    itemsize = 0.5 + 2 / GROUP
    rows_together: ClassVar[int] = ROWS
    group: ClassVar[int] = GROUP
    largest_group: ClassVar[int] = 1 << 30
    with_offsets: ClassVar[bool] = False

    def __init__(
        self, values: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor, offsets: torch.Tensor | None
    ) -> None:
        super().__init__(values, scale)
        self.groups, self.offsets = groups, offsets

    @classmethod
    def holds(cls, rows: int, columns: int) -> bool:
        return not rows % cls.rows_together and not columns % cls.group

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        groups = (rows // cls.rows_together, columns // cls.group, cls.rows_together)
        return cls(
            torch.empty(cls._packed_shape(rows, columns), dtype=cls.dtype, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(groups, dtype=torch.float16, device=device),
            torch.empty(groups, dtype=torch.float16, device=device) if cls.with_offsets else None,
        )

    @classmethod
    def _packed_shape(cls, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape of `values`."""
        return rows // ROWS, columns // 8, 4 * ROWS

    @classmethod
    def vocabulary(cls) -> type[ByteWeight]:
        return Int8Weight

    @property
    def shift(self) -> int:
        """Returns log2 of the size of a group in parts of 32 numbers: the kernel's rounding of activations."""
        return (self.shape[1] // self.groups.shape[1] // 32).bit_length() - 1

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.scale), self.groups.shape[1] * self.group))

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.values, self.scale, self.groups, self.offsets

    def copy_(self, weight: torch.Tensor) -> None:
        """Round weight [N, K], of any floating type, into this matrix, some rows at a time."""
        from engine.kernels.cpu.linear import round_to_four_bits  # needs llvmlite

        step = max(ROWS, AT_ONCE // weight.shape[1] // ROWS * ROWS)
        for first in range(0, len(weight), step):
            part = weight[first : first + step].float().contiguous()
            scales = part.new_empty(len(part), self.groups.shape[1])
            blocks = slice(first // ROWS, (first + len(part)) // ROWS)
            round_to_four_bits(part, self.values[blocks], scales)
            self._store_scales(first, scales, None)

    def store(self, first: int, numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> None:
        """Store rows from `first` on. numbers: uint8 [n, K]; scales, offsets: [n, K / group], any type."""
        blocks = slice(first // self.rows_together, (first + len(numbers)) // self.rows_together)
        self._pack(numbers, self.values[blocks])
        self._store_scales(first, scales, offsets)

    def _pack(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Write numbers from 0 to 15, uint8 [n, K], to a part of `values`."""
        parts = numbers.view(-1, ROWS, numbers.shape[1] // 8, 2, 4).transpose(1, 2)
        torch.bitwise_or(parts[..., 0, :], parts[..., 1, :] << 4, out=out.view(parts[..., 0, :].shape))

    def _unpacked(self) -> torch.Tensor:
        """Returns the numbers from 0 to 15 [N, K]."""
        low, high = self.values & 15, self.values >> 4
        both = torch.stack([part.unflatten(-1, (ROWS, 4)) for part in (low, high)], -2)  # [N / 16, K / 8, 16, 2, 4]
        return both.transpose(1, 2).reshape(self.shape)

    def _store_scales(self, first: int, scales: torch.Tensor, offsets: torch.Tensor | None) -> None:
        largest = torch.linalg.vector_norm(scales, torch.inf, 1, dtype=torch.float32)
        row = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        row = torch.where((largest > 0) & largest.isfinite(), row, 1.0)
        together = self.rows_together
        rows, blocks = slice(first, first + len(row)), slice(first // together, (first + len(row)) // together)
        self.scale[rows] = row
        shape = -1, together, scales.shape[1]
        self.groups[blocks] = (scales.float() / row[:, None]).view(shape).transpose(1, 2)
        if self.offsets is not None:
            self.offsets[blocks] = 0.0 if offsets is None else offsets.view(shape).transpose(1, 2)

    def take(self, groups: Groups) -> bool:
        """Store a matrix as it is and return True, or return False if its groups do not fit."""
        if groups.size % self.group or groups.numbers.shape[1] % self.group:
            return False
        if self.offsets is None and not bool((groups.zeros == 8).all()):
            return False
        count = self.groups.shape[1]
        scales, zeros = (
            each.repeat_interleave(groups.size // self.group, 1)[:, :count] for each in (groups.scales, groups.zeros)
        )
        self.store(0, groups.numbers.to(torch.uint8).contiguous(), scales.contiguous(), 8 - zeros.contiguous())
        return True

    def dense(self) -> torch.Tensor:
        """Returns the numbers that the matrix stands for, in float64 [N, K]."""
        numbers = self._unpacked().double() - 8
        if self.offsets is not None:
            numbers += self._by_row(self.offsets)
        return numbers * self._by_row(self.groups) * self.scale.double()[:, None]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense()[ids].float()

    def _by_row(self, groups: torch.Tensor) -> torch.Tensor:
        wide = groups.double().transpose(1, 2).flatten(0, 1)
        return wide.repeat_interleave(self.shape[1] // wide.shape[1], 1)

    @classmethod
    def of(cls, packing: Packing) -> type[Int4Weight] | None:
        """Returns the class that takes the 4-bit matrices of a checkpoint as they are; None if there is none."""
        whole = packing.group_size == 0
        if packing.method not in ("awq", "gptq", "compressed-tensors") or packing.bits != 4 or not packing.in_order:
            return None
        if packing.floats or packing.strategy in ("tensor", "block"):
            return None
        largest = GROUP if whole else min(packing.group_size & -packing.group_size, cls.largest_group)  # a power of 2
        if largest < GROUP:
            return None

        class Stored(cls):  # type: ignore[valid-type, misc]
            __slots__ = ()
            group = largest
            with_offsets = packing.method != "compressed-tensors" or not packing.symmetric
            itemsize = 0.5 + (4 if with_offsets else 2) / largest

        return Stored

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        from engine.kernels.cpu.linear import four_bit_product  # needs llvmlite

        out = x.new_empty(len(x), len(self.scale)) if out is None else out
        four_bit_product(x.contiguous(), self.values, self.scale, self.groups, self.offsets, self.shift, out)
        return out


class Int4Tiles(Int4Weight, GpuWeight):
    """A matrix [N, K] for bfloat16 activations on a GPU; N and K are multiples of 128. values: int16 [N / 128, K / 4 P,
    128, P], with P = 32 or 64; groups and offsets: float16 [N / 128, K / group, 128]. engine/kernels/four_bits.py
    explains the order of the numbers."""

    __slots__ = ()
    dtype = torch.int16
    itemsize = 0.5 + 2 / TILE
    rows_together = TILE
    group = TILE
    largest_group = TILE

    @classmethod
    def _packed_shape(cls, rows: int, columns: int) -> tuple[int, ...]:
        width = 64 if cls.group % 64 == 0 and columns % 256 == 0 else 32
        return rows // TILE, columns // (4 * width), TILE, width

    @classmethod
    def holds(cls, rows: int, columns: int) -> bool:
        return not rows % TILE and not columns % TILE

    @classmethod
    def vocabulary(cls) -> type[ByteWeight]:
        return Int8Rows

    def copy_(self, weight: torch.Tensor) -> None:
        weight = weight.flatten(0, -2)
        step = max(TILE, AT_ONCE_ON_GPU // weight.shape[1] // TILE * TILE)
        for first in range(0, len(weight), step):
            part = weight[first : first + step].to(self.device, torch.float32)
            self.store(first, *round_groups(part, self.group), None)

    def _pack(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        width = out.shape[-1]
        parts = numbers.view(-1, TILE, numbers.shape[1] // (4 * width), 4, width).transpose(1, 2)
        first, second, third, fourth = parts.to(torch.int16).unbind(-2)
        out.copy_(first | second << 4 | third << 8 | fourth << 12)

    def _unpacked(self) -> torch.Tensor:
        shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=self.device)[:, None]
        parts = (self.values[..., None, :] >> shifts) & 15  # [N / 128, K / 4 P, 128, 4, P]
        return parts.transpose(1, 2).reshape(self.shape)

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        return self.dense().to(dtype)

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """On a CPU, the product with the expanded matrix specifies the kernels."""
        if x.device.type == "cpu":
            return torch.mm(x, self.wide(x.dtype).t(), out=out)
        from engine.kernels.four_bits import product  # needs triton

        return product(x, self, out)
