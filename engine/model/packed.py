"""Quantised checkpoints: how their matrices are stored, and how they are expanded while the weights are loaded.

A quantised matrix is stored as several tensors. The method is the one in quantization_config; which matrices are
quantised is seen from the names of the tensors.

    fp8                 8-bit floats, one scale per block of (usually) 128 x 128 (DeepSeek, Qwen3-FP8)
    compressed-tensors  8-bit floats or integers with a scale per matrix, row, block or group; 4- and 8-bit integers,
                        packed or one in a byte; 4-bit floats with a scale per 16 (NVFP4) or 32 numbers (MXFP4)
    awq                 4-bit integers, a scale and a zero point per group of inputs (Lin et al. 2023)
    gptq                4- and 8-bit integers, groups of inputs in any order (Frantar et al. 2022)
    mxfp4               4-bit floats, one exponent per 32 numbers; the experts of gpt-oss (OCP microscaling formats)

A matrix is expanded and rounded to the model's type, or to one of our own forms with --quantization. Two kinds are not
expanded, but stored as they are: 4-bit integers whose groups fit our 4-bit form (engine/model/four_bits.py), and 8-bit
numbers that a class of engine/model/linear.py can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch

from engine.fields import LARGEST_NUMBER
from engine.model.config import Packing
from engine.model.linear import BLOCK, ByteWeight, Fp8Blocks, Fp8Weight, Int8Rows

Tensors = Mapping[str, torch.Tensor]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the positive numbers of e2m1
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the 4-bit numbers of columns 0, 1, 2 … are in a 32-bit word
NAN_OF_E4M3 = 0x7F
LARGEST_EXPONENT = 127 + 99  # of MXFP4, which adds 127: 2^99 is below LARGEST_NUMBER
DIVISOR = "weight_global_scale"  # of the scales of NVFP4
FLOATS, INTS = ("F64", "F32", "BF16", "F16"), ("I32",)


@dataclass(frozen=True)
class Source:
    """One of the tensors in which a matrix is stored."""

    suffix: str  # replaces the name's "weight"
    shape: tuple[int, ...]
    types: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True)
class Groups:
    """A matrix [rows, columns] of whole numbers, with a scale and a zero point for each `size` numbers of a row."""

    numbers: torch.Tensor
    scales: torch.Tensor  # float32 [rows, groups]
    zeros: torch.Tensor  # whole numbers [rows, groups]
    size: int

    def dense(self, group: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the matrix in float32. `group`: the group of each column, if they are not in order."""
        columns = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        group = columns // self.size if group is None else group.long()
        return (self.numbers - self.zeros[:, group]) * self.scales[:, group]

    def in_order(self, group: torch.Tensor | None) -> Groups | None:
        """Returns itself; None if `group`, the group of each column, is not consecutive."""
        columns = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        return self if group is None or torch.equal(group.long(), columns // self.size) else None

    def by(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Groups:
        """Returns the rows in another order."""
        return Groups(change(self.numbers), change(self.scales), change(self.zeros), self.size)

    def part(self, take: Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]) -> Groups:
        """Returns some rows, or whole groups of columns. take(tensor, (rows, columns) with a common number)."""
        scales, zeros = (take(each, (1, self.size)) for each in (self.scales, self.zeros))
        return Groups(take(self.numbers, (1, 1)), scales, zeros, self.size)


@dataclass(frozen=True)
class Packed:
    """How a matrix is stored, and the function that expands its tensors (by suffix) to the matrix."""

    sources: tuple[Source, ...]
    expand: Callable[[Tensors], torch.Tensor]
    groups: Callable[[Tensors], Groups | None] | None = None  # of 4-bit numbers; returns None if they are not in order
    # Of 8-bit numbers that need no expansion: the class for them, how many of them in each dimension have a common
    # scale, and a function that returns their scales, such as [rows / block[0], columns / block[1]].
    kind: type[ByteWeight] | None = None
    block: tuple[int, ...] = (1, 1)
    scales: Callable[[Tensors], torch.Tensor] | None = None

    def names(self, name: str) -> dict[str, Source]:
        """Returns the sources by the names of their tensors. `name`: that of the whole matrix."""
        stem = name.removesuffix("weight") if name.endswith("weight") else name
        return {stem + source.suffix: source for source in self.sources}


def fault(tensors: Tensors) -> tuple[str, str] | None:
    """Returns the suffix of a tensor that no matrix has, and what is wrong with it; None if there is none."""
    for suffix, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            wrong = bool(((tensor.view(torch.uint8) & NAN_OF_E4M3) == NAN_OF_E4M3).any())
        elif suffix == DIVISOR:
            wrong = not bool(((tensor.float() >= 1 / LARGEST_NUMBER) & (tensor.float() <= LARGEST_NUMBER)).all())
        elif tensor.is_floating_point():
            wrong = not bool((tensor.float().abs() <= LARGEST_NUMBER).all())
        else:
            exponents = suffix.endswith(("_scales", "_scale")) and tensor.dtype == torch.uint8
            wrong = exponents and bool((tensor > LARGEST_EXPONENT).any())
        if wrong:
            return suffix, f"numbers that are not finite or are above {LARGEST_NUMBER:g}"
        if suffix.endswith("g_idx"):
            groups = len(tensors["scales"]) if suffix == "g_idx" else tensors["weight_scale"].shape[1]
            if not bool(((tensor >= 0) & (tensor < groups)).all()):
                return suffix, f"groups other than 0 to {groups - 1}"
    return None


def packed(packing: Packing, name: str, shape: list[int], held: Container[str]) -> Packed | None:
    """Returns how the matrix `name` of this shape is stored; None if the checkpoint has it as a plain tensor. `held`:
    the names of all tensors in the checkpoint."""
    own = packing.of(name)
    if own is None:
        return None
    packing, stem = own, name.removesuffix("weight")
    if packing.method == "mxfp4":
        return _mxfp4(shape) if f"{name}_blocks" in held else None
    if f"{name}_scale_inv" in held and len(shape) == 3:
        return _fp8_experts(packing, shape)
    if not name.endswith(".weight") or len(shape) != 2:
        return None
    rows, columns = shape
    if packing.method in ("awq", "gptq"):
        if f"{stem}qweight" not in held:
            return None
        return (_awq if packing.method == "awq" else _gptq)(packing, rows, columns, f"{stem}g_idx" in held)
    if f"{stem}weight_packed" in held and packing.floats:
        return _fp4(packing, rows, columns)
    if f"{stem}weight_packed" in held:
        return _int_packed(packing, rows, columns, f"{stem}weight_g_idx" in held)
    scale = next((each for each in ("weight_scale_inv", "weight_scale") if stem + each in held), None)
    return None if scale is None else _scaled(packing, rows, columns, scale)


def _scaled(packing: Packing, rows: int, columns: int, scale: str) -> Packed:
    """Numbers in bytes; a scale for the matrix (1), for each row (rows, 1), for each block or for each group."""
    down, across = packing.block or (rows, columns)
    if packing.strategy in ("channel", "group"):
        down, across = 1, _groups(packing, columns)[1]
    shape = (-(-rows // down), -(-columns // across))

    def expand(tensors: Tensors) -> torch.Tensor:
        zeros = _blocks_wide(tensors["weight_zero_point"].view(shape), (down, across), rows, columns) if zero else 0
        return _scale_blocks(tensors["weight"].float() - zeros, tensors[scale].view(shape), (down, across))

    def groups(tensors: Tensors) -> Groups:
        scales, half = tensors[scale].float().view(shape), 1 << (packing.bits - 1)
        zeros = tensors["weight_zero_point"].int().view(shape) if zero else torch.zeros_like(scales, dtype=torch.int32)
        return Groups(tensors["weight"].int() + half, scales, zeros + half, across)

    def scales(tensors: Tensors) -> torch.Tensor:
        return tensors[scale].float().view(shape).expand(rows if kind is not Fp8Blocks else shape[0], -1)

    kind: type[ByteWeight] | None = None
    zero = not packing.symmetric
    if packing.block is None and packing.strategy != "group" and packing.bits == 8 and not zero:
        kind = Fp8Weight if packing.floats else Int8Rows
    elif packing.floats and packing.block == (BLOCK, BLOCK):
        kind = Fp8Blocks
    stored = (1,) if packing.strategy == "tensor" else shape
    types = ("F8_E4M3",) if packing.floats else ("I8",)
    sources = [Source("weight", (rows, columns), types), Source(scale, stored, FLOATS)]
    if zero:
        sources.append(Source("weight_zero_point", stored, ("I8",)))
    four = groups if packing.bits == 4 and down == 1 else None
    return Packed(tuple(sources), expand, four, kind, packing.block or (1, columns), scales)


def _scale_blocks(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns the float32 matrix [rows, columns] of numbers that have one scale for each block."""
    return numbers.float() * _blocks_wide(scales, block, *numbers.shape)


def _blocks_wide(each: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Returns the float32 matrix [rows, columns] that has one number for each block."""
    return each.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _fp8_experts(packing: Packing, shape: list[int]) -> Packed:
    """The 8-bit floats of a layer's experts as one tensor, in either layout; the scales have the same layout."""
    block = packing.block or (shape[1], shape[2])
    scales = (shape[0], -(-shape[1] // block[0]), -(-shape[2] // block[1]))

    def expand(tensors: Tensors) -> torch.Tensor:
        found = torch.empty(shape)
        for out, numbers, each in zip(found, tensors[""], tensors["_scale_inv"], strict=True):
            out.copy_(_scale_blocks(numbers, each, block))
        return found

    sources = Source("", tuple(shape), ("F8_E4M3",)), Source("_scale_inv", scales, FLOATS)
    kind = Fp8Blocks if block == (BLOCK, BLOCK) else None
    return Packed(sources, expand, kind=kind, block=(1, *block), scales=lambda tensors: tensors["_scale_inv"].float())


def _bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the unsigned numbers [..., n · 32 / bits] in 32-bit words [..., n], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _groups(packing: Packing, columns: int) -> tuple[int, int]:
    """Returns the number of groups of inputs, and the inputs of one group."""
    size = packing.group_size or columns
    return -(-columns // size), size


def _awq(packing: Packing, rows: int, columns: int, order: bool) -> Packed:
    (groups, size), per_word = _groups(packing, columns), 32 // packing.bits

    def numbers(words: torch.Tensor) -> torch.Tensor:
        return _bits(words, packing.bits).unflatten(-1, (-1, per_word))[..., list(AWQ_ORDER)].flatten(-2)

    def found(tensors: Tensors) -> Groups:
        zeros = numbers(tensors["qzeros"]).t()
        return Groups(numbers(tensors["qweight"]).t(), tensors["scales"].float().t(), zeros, size)

    sources = (
        Source("qweight", (columns, rows // per_word), INTS), Source("qzeros", (groups, rows // per_word), INTS),
        Source("scales", (groups, rows), FLOATS),
    )
    return Packed(sources, lambda tensors: found(tensors).dense(), found)


def _gptq(packing: Packing, rows: int, columns: int, order: bool) -> Packed:
    (groups, size), per_word = _groups(packing, columns), 32 // packing.bits

    def stored(tensors: Tensors) -> Groups:
        numbers = _bits(tensors["qweight"].t(), packing.bits)  # [rows, columns]
        zeros = _bits(tensors["qzeros"], packing.bits)  # the first version of the format stores each zero minus 1
        zeros = (zeros + (not packing.version_2)) & ((1 << packing.bits) - 1)
        return Groups(numbers, tensors["scales"].float().t(), zeros.t(), size)

    sources = (
        Source("qweight", (columns // per_word, rows), INTS), Source("qzeros", (groups, rows // per_word), INTS),
        Source("scales", (groups, rows), FLOATS), *([Source("g_idx", (columns,), INTS)] if order else []),
    )
    return _grouped(sources, stored, "g_idx", packing)


def _int_packed(packing: Packing, rows: int, columns: int, order: bool) -> Packed:
    (groups, size), per_word = _groups(packing, columns), 32 // packing.bits
    words, half = -(-columns // per_word), 1 << (packing.bits - 1)

    def found(tensors: Tensors) -> Groups:
        numbers, scales = _bits(tensors["weight_packed"], packing.bits)[:, :columns], tensors["weight_scale"].float()
        zeros = torch.full_like(scales, half, dtype=torch.int32)
        if not packing.symmetric:
            zeros = _bits(tensors["weight_zero_point"].t(), packing.bits).t()[:rows]
        return Groups(numbers, scales, zeros, size)

    sources = [
        Source("weight_packed", (rows, words), INTS), Source("weight_scale", (rows, groups), FLOATS),
        Source("weight_shape", (2,), ("I64", "I32"), required=False),
        *([Source("weight_g_idx", (columns,), INTS)] if order else []),
    ]
    if not packing.symmetric:
        sources.append(Source("weight_zero_point", (-(-rows // per_word), groups), INTS))
    return _grouped(tuple(sources), found, "weight_g_idx", packing)


def _grouped(sources: tuple[Source, ...], found: Callable[[Tensors], Groups], order: str, packing: Packing) -> Packed:
    """Returns how a matrix of groups is stored. The tensor `order`, if there is one, has the group of each column."""

    def expand(tensors: Tensors) -> torch.Tensor:
        return found(tensors).dense(tensors.get(order))

    def in_order(tensors: Tensors) -> Groups | None:
        return found(tensors).in_order(tensors.get(order))

    return Packed(sources, expand, in_order if packing.bits == 4 else None)


def _fp4(packing: Packing, rows: int, columns: int) -> Packed:
    """4-bit floats, two in a byte; the scales are 8-bit floats of which one number divides all, or exponents."""
    (groups, size), nvidia = _groups(packing, columns), packing.strategy == "tensor_group"

    def expand(tensors: Tensors) -> torch.Tensor:
        scales = tensors["weight_scale"]
        wide = scales.float() / tensors[DIVISOR].float() if nvidia else _exponents(scales)
        return _scale_blocks(_fp4_numbers(tensors["weight_packed"]), wide, (1, size))

    scale = Source("weight_scale", (rows, groups), ("F8_E4M3",) if nvidia else ("U8",))
    packed = Source("weight_packed", (rows, columns // 2), ("U8",))
    return Packed((packed, scale, Source(DIVISOR, (1,), FLOATS)) if nvidia else (packed, scale), expand)


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(scales.shape), scales.int() - 127)


def _fp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Returns the float32 numbers of bytes that hold two each, the lower bits first."""
    table = torch.tensor((*FP4, *(-number for number in FP4)), dtype=torch.float32)
    return table[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]


def _mxfp4(shape: list[int]) -> Packed:
    """The experts of gpt-oss [E, in, out]; stored as [E, out, in / 32, 16 bytes], two numbers in a byte."""
    experts, inputs, outputs = shape

    def expand(tensors: Tensors) -> torch.Tensor:
        found = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16)  # holds these numbers exactly
        for out, packed, scales in zip(found, tensors["_blocks"], tensors["_scales"], strict=True):
            numbers = _fp4_numbers(packed)  # [out, in / 32, 32]
            out.copy_((numbers * _exponents(scales)[..., None]).flatten(1))
        return found.transpose(1, 2)

    blocks = (experts, outputs, inputs // 32)
    return Packed((Source("_blocks", (*blocks, 16), ("U8",)), Source("_scales", blocks, ("U8",))), expand)
