"""Calls of the kernels for one matrix of 4-bit numbers: its rounding, and its product with activations.

FewRows (engine/worker/few_rows.py) calls the kernels of all layers at once instead, for few rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from engine.kernels.cpu.four_bits import PART
from engine.kernels.cpu.library import FIELDS, Kernels, four_bit_kernels
from engine.kernels.cpu.product import scratch_floats

ROWS_AT_ONCE = 256  # of activations: this limits the scratch memory, and the rounded rows stay in the cache


def four_bit_product(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor, offsets: torch.Tensor | None,
    shift: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write x [R, K] · weightᵀ to out [R, N]. The weight is stored as engine/model/four_bits.py says."""
    columns, threads = x.shape[1], torch.get_num_threads()
    each = scratch_floats(min(len(x), ROWS_AT_ONCE), columns)
    scratch = torch.empty(threads, each)
    no_bias = torch.zeros(out.shape[1])
    parts = list(zip(x.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True))
    calls = np.zeros((len(parts), FIELDS), dtype=np.int64)
    for call, (rows, result) in zip(calls, parts, strict=True):
        call[:] = (
            values.data_ptr(), scale.data_ptr(), rows.data_ptr(), 0, no_bias.data_ptr(), result.data_ptr(),
            scratch.data_ptr(), columns, len(scale), len(rows), each, 0, 0, groups.data_ptr(),
            0 if offsets is None else offsets.data_ptr(), shift,
        )  # fmt: skip
    name = "int4" if offsets is None else "int4_offsets"
    compiled = kernels(name)
    compiled.run(np.full(len(parts), compiled.address(name), dtype=np.int64), calls, threads)


def round_to_four_bits(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Round x [N, K], float32, to `values`, stored as engine/model/four_bits.py says; write `scales` [N, groups]."""
    rows, columns = x.shape
    calls = np.zeros((1, FIELDS), dtype=np.int64)
    length = columns // scales.shape[1] // PART
    calls[0, :6] = x.data_ptr(), values.data_ptr(), scales.data_ptr(), columns, rows, length
    compiled = kernels("int4")
    compiled.run(np.array([compiled.address("rounding")], dtype=np.int64), calls, torch.get_num_threads())


@cache
def kernels(name: str) -> Kernels:
    return four_bit_kernels(name)
