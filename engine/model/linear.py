"""The model's matrices, as tensors or as 8-bit numbers with a scale per row, and their products with activations.

Matrices of 4-bit numbers are in engine/model/four_bits.py.

Decoding reads every weight in each step, so on a CPU memory bandwidth limits its speed. An int8 matrix has a quarter
of the bytes of a float32 matrix. Compiled kernels (engine/kernels/cpu/product.py) round each row of activations to 8
bits too (W8A8, dynamic, symmetric). Each row of weights and of activations has its own scale, as in LLM.int8()
(Dettmers et al. 2022), but there is no separate path for outliers. torch keeps activations in float32: its sums have
another order in a batch, and its product of 8-bit integers is wrong without VNNI (engine/kernels/MEASURED.md).
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from engine.errors import how_to_install

WIDENED = 1 << 20  # numbers of a matrix that are converted to float32 or rounded at a time
BLOCK = 128  # rows and columns with a common scale in Fp8Blocks
IN_COLUMNS = range(4, 49)  # rows of activations: one to three are twice as fast in rows (MEASURED.md)
LARGE = 1 << 20  # numbers of a matrix that is not in the cache: below it, products in columns are slower
PAIRED_ROWS = 32  # rows that Bf16Pairs stores together
INT8_MAX = 127  # the range is symmetric: −128 is not used


class ByteWeight:
    """A matrix [N, K]: 8-bit numbers [N, K] and a float32 scale per row [N]. Subclasses have other numbers and scales.
    It has the tensor methods that are used when weights are loaded."""

    __slots__ = ("scale", "values")

    dtype: ClassVar[torch.dtype]
    compiled: ClassVar[str] = ""  # the kernel for products on a CPU (engine/kernels/cpu/library.py)
    itemsize: ClassVar[float] = 1  # bytes of a number, with its share of scales that not only its row has

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        """Returns an uninitialised matrix."""
        values = torch.empty(rows, columns, dtype=cls.dtype, device=device)
        return cls(values, torch.empty(rows, dtype=torch.float32, device=device))

    @classmethod
    def vocabulary(cls) -> type[ByteWeight]:
        """Returns the class of the embedding and of the output matrix, if this is the class of the other matrices."""
        return cls

    @classmethod
    def holds(cls, rows: int, columns: int) -> bool:
        """Returns True if there are kernels for a matrix of this shape; otherwise it remains a tensor."""
        return True

    @classmethod
    def why_not(cls) -> str:
        """Returns why this machine cannot compute products; empty if it can."""
        if importlib.util.find_spec("llvmlite") is None:
            return f"llvmlite is not installed ({how_to_install('cpu')})"
        from engine.kernels.cpu.library import lacks

        return lacks((cls.compiled,))

    @staticmethod
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values [n, K] and scale [n] for x [n, K], any float type; values · scale approximates x."""
        raise NotImplementedError

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x · weightᵀ [T, N] for x [T, K], in `out` if given."""
        raise NotImplementedError

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows `ids` [T] as activations [T, K]."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments of the constructor. Each tensor has an entry for the same number of rows."""
        return self.values, self.scale

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def split(self, sizes: list[int]) -> list[Self]:
        """Returns consecutive views; view i has sizes[i] rows."""
        rows = self.shape[0]
        parts = (
            [None] * len(sizes) if tensor is None else tensor.split([size * len(tensor) // rows for size in sizes])
            for tensor in self.tensors
        )
        return [type(self)(*part) for part in zip(*parts, strict=True)]

    def chunk(self, n: int) -> list[Self]:
        """Returns n views with the same number of rows."""
        return self.split([self.shape[0] // n] * n)

    def copy_(self, weight: torch.Tensor) -> None:
        """Round weight [N, K], of any floating type, into this matrix. Its rows may be in groups, as [n, N / n, K]."""
        weight = weight.to(self.device).flatten(0, -2)
        values, self.scale[:] = self.rounded(weight.float() if weight.dtype == torch.float64 else weight)
        self.values.copy_(values)

    def keep(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        """Copy numbers (as bytes, uint8) and scales of a checkpoint."""
        self.values.view(torch.uint8).copy_(values.flatten(0, -2))
        self.scale.copy_(scale.reshape(self.scale.shape))

    def normal_(self, mean: float, std: float, generator: torch.Generator | None = None) -> None:
        """Fill with the normal numbers that a float32 tensor would get, rounded."""
        self.copy_(torch.empty(self.shape, device=self.device).normal_(mean, std, generator=generator))


class GpuWeight(ByteWeight):
    """A matrix for bfloat16 activations on a GPU (engine/kernels/eight_bits.py)."""

    __slots__ = ()

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix [N, K] that the numbers stand for, in `dtype`."""
        return self.values.to(dtype) * self.scale.to(dtype)[:, None]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.values.view(torch.uint8)[ids].view(self.dtype)
        return (values.float() * self.scale[ids, None]).bfloat16()

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """On a CPU, the product with the expanded matrix specifies the kernels."""
        if x.device.type == "cpu":
            return torch.mm(x, self.wide(x.dtype).t(), out=out)
        from engine.kernels.eight_bits import byte_linear  # needs triton

        return byte_linear(x, self, out)


class Int8Rows(GpuWeight):
    """Integers from -127 to 127."""

    __slots__ = ()
    dtype = torch.int8

    @classmethod
    def holds(cls, rows: int, columns: int) -> bool:
        return rows % 16 == 0 and columns % BLOCK == 0

    @staticmethod
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise_rows(x)


class Int8Weight(Int8Rows):
    """The same numbers, for float32 activations on a CPU."""

    __slots__ = ()

    @classmethod
    def holds(cls, rows: int, columns: int) -> bool:
        return True

    def copy_(self, weight: torch.Tensor) -> None:
        """Round weight [N, K], of any floating type, some rows at a time: they stay in the processor's cache."""
        weight = weight.flatten(0, -2)
        step = max(1, WIDENED // weight.shape[1])
        for values, scale, part in zip(
            self.values.split(step), self.scale.split(step), weight.split(step), strict=True
        ):
            values[:], scale[:] = quantise_rows(part.float() if part.dtype == torch.float64 else part)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values[ids] * self.scale[ids, None]

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Does not round x: then a difference of 1e-7 between two orders of sums would become a step of 1 / 127."""
        return widened_product(x, self.values, out).mul_(self.scale)


class Bf16Weight(ByteWeight):
    """bfloat16 numbers without a scale, for activations in float32. Exact for a checkpoint in bfloat16."""

    __slots__ = ()
    dtype = torch.bfloat16
    itemsize = 2

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        return cls(torch.empty(rows, columns, dtype=cls.dtype, device=device), torch.empty(rows, 0, device=device))

    @staticmethod
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.bfloat16(), torch.empty(len(x), 0, device=x.device)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values[ids].float()

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return widened_product(x, self.values, out)


class Bf16Pairs(Bf16Weight):
    """The same numbers, for the processor's products of bfloat16 pairs (AVX-512 BF16). A matrix [N, K], with N and K
    multiples of 32. values: [N / 32, K / 2, 64], 2 numbers of each of 32 rows; scale [N, 0].

    Activations are rounded to bfloat16, as in a bfloat16 model on a GPU; sums, norms, attention and the residual stay
    float32. The embedding, which is read by rows, and the output matrix are plain rows (Bf16Weight)."""

    __slots__ = ()
    compiled = "bf16_pairs"

    @classmethod
    def holds(cls, rows: int, columns: int) -> bool:
        return not rows % PAIRED_ROWS and not columns % PAIRED_ROWS

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        values = torch.empty(rows // PAIRED_ROWS, columns // 2, 2 * PAIRED_ROWS, dtype=cls.dtype, device=device)
        return cls(values, torch.empty(rows, 0, device=device))

    @classmethod
    def vocabulary(cls) -> type[ByteWeight]:
        return Bf16Weight

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.scale), 2 * self.values.shape[1]))

    def copy_(self, weight: torch.Tensor) -> None:
        """Round weight [N, K], of any floating type, and store its numbers in order."""
        pairs = self.values.view(torch.int32)  # [N / 32, K / 2, 32]
        step = max(1, WIDENED // weight.shape[1] // PAIRED_ROWS)
        for first in range(0, len(pairs), step):
            rows = weight[first * PAIRED_ROWS : (first + step) * PAIRED_ROWS].bfloat16().contiguous()
            pairs[first : first + step] = rows.view(torch.int32).view(-1, PAIRED_ROWS, pairs.shape[1]).transpose(1, 2)

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


class Fp8Weight(GpuWeight):
    """e4m3 numbers: 4 bits of exponent, 3 of mantissa."""

    __slots__ = ()
    dtype = torch.float8_e4m3fn

    @staticmethod
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = torch.finfo(torch.float8_e4m3fn).max
        scale = torch.linalg.vector_norm(x, torch.inf, 1, dtype=torch.float32) / largest
        inverse = 1 / scale.clamp_min(torch.finfo(torch.float32).tiny)
        return (x * inverse[:, None]).to(torch.float8_e4m3fn), scale


class Fp8Blocks(GpuWeight):
    """e4m3 numbers [N, K] with a float32 scale per 128 rows and 128 columns [N / 128, K / 128], as in DeepSeek-V3. N
    and K are multiples of 128."""

    __slots__ = ()
    dtype = Fp8Weight.dtype

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        scale = torch.empty(rows // BLOCK, columns // BLOCK, dtype=torch.float32, device=device)
        return cls(torch.empty(rows, columns, dtype=cls.dtype, device=device), scale)

    @staticmethod
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = x.shape
        blocks = x.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
        values, scale = Fp8Weight.rounded(blocks.reshape(-1, BLOCK * BLOCK))
        values = values.view(torch.uint8).view(blocks.shape).transpose(1, 2).reshape(rows, columns)
        return values.view(Fp8Weight.dtype), scale.view(rows // BLOCK, columns // BLOCK)

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        scale = self.scale.to(dtype).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return self.values.to(dtype) * scale

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        scale = self.scale[ids // BLOCK].repeat_interleave(BLOCK, 1)
        return (self.values.view(torch.uint8)[ids].view(self.dtype).float() * scale).bfloat16()


Matrix = Any  # torch.Tensor or ByteWeight; not declared as a union, because GPU kernels accept only tensors


def widened_product(x: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Returns x · valuesᵀ. Widens some rows of the values at a time: they stay in the processor's cache until then."""
    out = x.new_empty(len(x), len(values)) if out is None else out
    step = max(1, WIDENED // values.shape[1])
    for first in range(0, len(values), step):
        part = values[first : first + step].to(x.dtype)
        out[:, first : first + step] = in_columns(x, part) if len(x) in IN_COLUMNS else torch.mm(x, part.t())
    return out


def in_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x · weightᵀ as a transposed tensor: MKL computes this product faster for numbers of rows IN_COLUMNS."""
    return torch.mm(weight, x.t()).t()


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values int8 [n, K] and scale float32 [n] for x [n, K], any float type; values · scale approximates x. If
    a row contains NaN or infinity, its scale and its products are not finite."""
    scale = x.abs().amax(1).float() / INT8_MAX
    inverse = 1 / scale.clamp_min(torch.finfo(torch.float32).tiny)
    return (x * inverse[:, None]).round_().to(torch.int8), scale


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x · weightᵀ + bias [T, N] for x [T, K], weight [N, K], bias [N]."""
    if isinstance(weight, ByteWeight):
        product = weight.product(x)
        return product if bias is None else product + bias
    large = x.dtype == torch.float32 and x.device.type == "cpu" and weight.numel() >= LARGE
    if large and len(x) in IN_COLUMNS:
        product = in_columns(x, weight).contiguous()
        return product if bias is None else product.add_(bias)
    return F.linear(x, weight, bias)


def embed(ids: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Returns the rows `ids` int64 [T] of weight [V, H] as [T, H]."""
    return weight.rows(ids) if isinstance(weight, ByteWeight) else F.embedding(ids, weight)
