"""Matrices of bfloat16 numbers for the processor's products of bfloat16 pairs (AVX-512 BF16).

Activations are rounded to bfloat16, as in a bfloat16 model on a GPU; sums, norms, attention and the residual stay
float32. The embedding and the output matrix are plain rows (Bf16Weight): the embedding is read by rows.

The kernel (engine/kernels/cpu/bf16.py) computes 32 rows at a time, so 32 rows are stored together: 128 bytes have 2
numbers of each row.
"""

from __future__ import annotations

import importlib.util
from typing import Self

import torch

from engine.model.linear import Bf16Weight, ByteWeight

ROWS = 32  # rows that are stored together
AT_ONCE = 1 << 20  # numbers that are put in order at a time: they stay in the processor's cache


class Bf16Pairs(Bf16Weight):
    """A matrix [N, K], with N and K multiples of 32. values: bfloat16 [N / 32, K / 2, 64]; scale [N, 0]."""

    __slots__ = ()

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        values = torch.empty(rows // ROWS, columns // 2, 2 * ROWS, dtype=cls.dtype, device=device)
        return cls(values, torch.empty(rows, 0, device=device))

    @classmethod
    def vocabulary(cls) -> type[ByteWeight]:
        return Bf16Weight

    @staticmethod
    def why_not() -> str:
        """Returns why this machine cannot compute products; empty if it can."""
        if importlib.util.find_spec("llvmlite") is None:
            return "llvmlite is not installed"
        from engine.kernels.cpu.library import lacks

        return lacks(("bf16_pairs",))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.scale), 2 * self.values.shape[1]))

    def copy_(self, weight: torch.Tensor) -> None:
        """Round weight [N, K], of any floating type, and store its numbers in order."""
        pairs = self.values.view(torch.int32)  # [N / 32, K / 2, 32]
        step = max(1, AT_ONCE // weight.shape[1] // ROWS)
        for first in range(0, len(pairs), step):
            rows = weight[first * ROWS : (first + step) * ROWS].bfloat16().contiguous()
            pairs[first : first + step] = rows.view(torch.int32).view(-1, ROWS, pairs.shape[1]).transpose(1, 2)

    def dense(self) -> torch.Tensor:
        """Returns the matrix as bfloat16 [N, K]."""
        return self.values.view(torch.int32).transpose(1, 2).contiguous().view(self.dtype).view(self.shape)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense()[ids].float()

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        from engine.kernels.cpu.linear import bf16_product  # needs llvmlite

        out = x.new_empty(len(x), len(self.scale)) if out is None else out
        bf16_product(x.contiguous(), self.values, out)
        return out
