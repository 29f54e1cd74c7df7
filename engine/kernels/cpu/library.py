"""Makes the CPU kernels for one model, and runs sequences of their calls."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import llvmlite
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from engine.kernels.cpu.attention import emit_attend, emit_rotate
from engine.kernels.cpu.bf16 import Bf16Form
from engine.kernels.cpu.byte_products import VECTORS
from engine.kernels.cpu.emit import I32, I64, PTR, Kernel
from engine.kernels.cpu.features import Features, features
from engine.kernels.cpu.four_bit_rounding import emit_rounding
from engine.kernels.cpu.four_bits import PART, FourBitForm
from engine.kernels.cpu.grouped import emit_grouped
from engine.kernels.cpu.machine_code import OPENMP, link
from engine.kernels.cpu.product import emit_product
from engine.kernels.cpu.prompt_attention import emit_attend_tiles

LLVM = 22  # the version whose instructions the kernels use
FIELDS = 16  # numbers in the array of one call; a kernel reads the first ones
FOUR_BITS = {"int4": False, "int4_offsets": True}  # kernel -> whether groups have offsets
GROUPED = ("bf16_pairs", *FOUR_BITS)  # kernels for matrices whose rows are stored in groups
ANY_ROWS = (*GROUPED, "int8")  # kernels that are fast with any number of tokens


@dataclass(frozen=True)
class KernelShapes:
    """What the kernels of one model are compiled for."""

    weights: tuple[str, ...]  # of its matrices: of GROUPED, or of emit_product (engine/kernels/cpu/product.py)
    columns: tuple[int, ...]  # the lengths of the rows of its matrices
    heads: tuple[int, int]  # of queries, of keys
    head_dim: int
    block_size: int
    scale: float  # the factor of query · key
    eps: float
    qk_norm: bool


def lacks(weights: Iterable[str]) -> str:
    """Returns what this machine lacks for products with these kinds of matrices; empty if it lacks nothing."""
    if llvm.llvm_version_info[0] != LLVM:  # LLVM ends the process if an instruction has other operands
        return f"llvmlite {llvmlite.__version__} has LLVM {llvm.llvm_version_info[0]}, the kernels need {LLVM}"
    if sys.platform == "win32":
        return "torch on Windows has no OpenMP library of GNU"
    process = ctypes.CDLL(None)
    if missing := [name for name in OPENMP if not hasattr(process, name)]:
        return f"torch's OpenMP library lacks {missing[0]}"
    if found := features().lacking():
        return found
    if {"bf16_pairs", "bf16_rows"} & set(weights) and "avx512bf16" not in features().names:
        return "the processor has no AVX-512 BF16"
    return ""


def why_not(shapes: KernelShapes) -> str:
    """Returns why this machine or these shapes cannot have the kernels; empty if they can."""
    if found := lacks(shapes.weights):
        return found
    if _lanes(shapes, features().lanes) < 4:
        return f"rows of {min(shapes.columns)} numbers, or heads of {shapes.head_dim}, do not fill vectors"
    if "int8" in shapes.weights and math.gcd(16, *shapes.columns) < 16:
        return f"rows of {min(shapes.columns)} bytes do not fill vectors"
    if FOUR_BITS.keys() & set(shapes.weights) and (odd := [each for each in shapes.columns if each % PART]):
        return f"rows of {odd[0]} numbers are not a multiple of {PART}"
    return ""


def _lanes(shapes: KernelShapes, widest: int, *, attention: bool = True) -> int:
    """Returns the numbers in a float vector: at most `widest`, and a divisor of everything that is in vectors."""
    return math.gcd(widest, *shapes.columns, *([shapes.head_dim // 2] if attention else []))


def model_kernels(shapes: KernelShapes) -> Kernels:
    """Compiles the kernels of a model: "rotate", "attend", "attend_tiles", and a product for each kind of weights.
    Models of the same shapes share them: a second engine in the process compiles nothing."""
    return _model_kernels(shapes, features())


@lru_cache(maxsize=8)
def _model_kernels(shapes: KernelShapes, has: Features) -> Kernels:
    return Kernels(partial(emit_model, shapes, has), has.flags, shapes, sorted(has.names), has.x86)


def emit_model(shapes: KernelShapes, has: Features) -> ir.Module:
    """Returns the module of a model's kernels for a processor."""
    module = ir.Module()
    lanes, wide = _lanes(shapes, has.lanes), _lanes(shapes, has.lanes, attention=False)
    for weights in shapes.weights:
        if weights in GROUPED:
            _emit_grouped(module, weights, shapes.eps, has)
        else:
            width = math.gcd(VECTORS[has.dot], *shapes.columns)
            emit_product(module, weights, weights, wide, width, shapes.eps, has)
    heads, dim = shapes.heads, shapes.head_dim
    emit_rotate(module, "rotate", lanes, heads, dim, shapes.eps, shapes.qk_norm)
    emit_attend(module, "attend", lanes, heads, dim, shapes.scale, shapes.block_size)
    emit_attend_tiles(module, "attend_tiles", has.lanes, heads, dim, shapes.scale, shapes.block_size)
    return module


@cache
def linear_kernels(name: str, has: Features) -> Kernels:
    """Compiles a product of GROUPED without a norm before it, for any model; and "rounding" to 4 bits."""

    def emit() -> ir.Module:
        module = ir.Module()
        emit_rounding(module, "rounding")
        _emit_grouped(module, name, 0.0, has)
        return module

    return Kernels(emit, has.flags, name, sorted(has.names), has.x86)


def _emit_grouped(module: ir.Module, name: str, eps: float, has: Features) -> None:
    form = Bf16Form() if name == "bf16_pairs" else FourBitForm(has.dot, FOUR_BITS[name])
    emit_grouped(module, name, form, eps)


class Kernels:
    """Compiled kernels. Keep this object for as long as the kernels run."""

    def __init__(self, emit: Callable[[], ir.Module], flags: str, *contents: object) -> None:
        """`emit`: makes the module of the kernels; `contents`: all that it depends on, besides the code of this folder;
        flags: the processor's features (Features.flags)."""
        self._engine = link(lambda: _with_run(emit()), flags, *contents)
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._engine.get_function_address("run"))

    def address(self, name: str) -> int:
        """Returns the address of a kernel."""
        return self._engine.get_function_address(name)

    def run(self, functions: np.ndarray, calls: np.ndarray, threads: int) -> None:
        """Call kernels one after the other, each in `threads` threads. functions int64 [n]; calls int64 [n, FIELDS]."""
        fields = np.array([functions.ctypes.data, calls.ctypes.data, len(functions), threads], dtype=np.int64)
        self._run(fields.ctypes.data)


def _with_run(module: ir.Module) -> ir.Module:
    """Adds the function that calls kernels in torch's OpenMP threads. They wait for each other after every kernel."""
    b = Kernel(module, "run", 4)
    functions, calls, count, threads = b.fields(functions=PTR, calls=PTR, count=I64, threads=I64)
    with b.loop(I64(0), count) as (i, _):
        fields = b.at(calls, b.mul(i, I64(FIELDS)), I64)
        b.intrinsic("GOMP_parallel", ir.VoidType(), b.read(functions, i, PTR), fields, b.trunc(threads, I32), I32(0))
    b.ret_void()
    return module
