"""Calls of the kernels for one matrix: its product with activations, and its rounding to 4-bit numbers.

CompiledDecoder (engine/worker/cpu/compiled_decoder.py) calls the kernels of all layers at once instead.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.cpu.features import features
from engine.kernels.cpu.four_bits import PART
from engine.kernels.cpu.library import FIELDS, linear_kernels
from engine.kernels.cpu.product import PREPARE, Before, scratch_floats

ROWS_AT_ONCE = 256  # of activations: this limits the scratch memory, and the rounded rows stay in the cache


def four_bit_product(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor, offsets: torch.Tensor | None,
    shift: int, out: torch.Tensor,
) -> None:
    """Write x [R, K] · weightᵀ to out [R, N]. The weight is stored as engine/model/four_bits.py says."""
    name = "int4" if offsets is None else "int4_offsets"
    more = groups.data_ptr(), 0 if offsets is None else offsets.data_ptr(), shift
    _product(name, x, values.data_ptr(), scale.data_ptr(), out, *more)


def bf16_product(x: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write x [R, K] · weightᵀ to out [R, N]. The weight is stored as engine/model/linear.py says."""
    _product("bf16_pairs", x, values.data_ptr(), 0, out)


def _product(name: str, x: torch.Tensor, values: int, scale: int, out: torch.Tensor, *more: int) -> None:
    """Round some rows of x at a time, then multiply them. values, scale, more: fields of the call."""
    rounded = torch.empty(scratch_floats(min(len(x), ROWS_AT_ONCE), x.shape[1]))
    no_bias = torch.zeros(out.shape[1])
    calls = []
    for rows, result in zip(x.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True):
        for source, before in (rows, Before.NOTHING), (rounded, Before.READY):
            calls.append((
                values, scale, source.data_ptr(), 0, no_bias.data_ptr(), result.data_ptr(), rounded.data_ptr(),
                x.shape[1], out.shape[1], len(rows), 0, before, 0, *more,
            ))
    fields = np.zeros((len(calls), FIELDS), dtype=np.int64)
    fields[:, : len(calls[0])] = calls
    compiled = linear_kernels(name, features())
    functions = np.array([compiled.address(each) for each in (name + PREPARE, name)] * (len(calls) // 2))
    compiled.run(functions, fields, torch.get_num_threads())


def round_to_four_bits(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Round x [N, K], float32, to `values`, stored as engine/model/four_bits.py says; write `scales` [N, groups]."""
    rows, columns = x.shape
    calls = np.zeros((1, FIELDS), dtype=np.int64)
    length = columns // scales.shape[1] // PART
    calls[0, :6] = x.data_ptr(), values.data_ptr(), scales.data_ptr(), columns, rows, length
    compiled = linear_kernels("int4", features())
    compiled.run(np.array([compiled.address("rounding")], dtype=np.int64), calls, torch.get_num_threads())
