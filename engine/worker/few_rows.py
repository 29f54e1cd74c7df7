"""Steps of few tokens on a CPU with compiled kernels (engine/kernels/cpu/): all layers in one call.

Computes the same as Decoder.forward and Decoder.logits (engine/model/decoder.py). A layer has 6 kernels:

    norm + qkv | q/k norm + rope + store | attention | output + residual | norm + gate/up | silu + down + residual
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from engine.attention.kv_pool import KVPool
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DenseMLP
from engine.model.four_bits import Int4Weight
from engine.model.linear import Matrix, embed
from engine.model.traits import lacking

KERNELS = {  # kind of weights -> kernels for the matrices of the layers, and for the output matrix
    "none": ("float32", "float32"), "bf16": ("bfloat16", "bfloat16"), "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
}  # fmt: skip
KEPT_SIZES = 8  # buffers are kept for at most this many different numbers of rows


class Buffers:
    """Activations of R rows, and the calls of all kernels on them."""

    def __init__(self, rows: int, decoder: Decoder, threads: int, max_length: int) -> None:
        from engine.kernels.cpu.product import scratch_floats

        config, dim = decoder.config, decoder.config.head_dim
        self.residual = torch.empty(rows, config.hidden_size)
        self.qkv = torch.empty(rows, (config.num_heads + 2 * config.num_kv_heads) * dim)
        self.q = torch.empty(rows, config.num_heads * dim)
        self.attended = torch.empty_like(self.q)
        self.gate_up = torch.empty(rows, 2 * config.intermediate_size)
        self.positions, self.slots, self.lengths = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        widest = max(config.hidden_size, config.intermediate_size, config.num_heads * dim)
        self.each = max(scratch_floats(rows, widest), max_length + 16)
        self.scratch = torch.empty(threads, self.each)
        self.functions = np.zeros(0, dtype=np.int64)
        self.calls = np.zeros((0, 0), dtype=np.int64)


class FewRows:
    """Runs steps of a Decoder with dense MLPs, float32 activations and a float32 KV cache."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, quantization: str, block_size: int, max_length: int
    ) -> None:
        from engine.kernels.cpu.library import model_kernels

        self._decoder, self._pool, self._max_length = decoder, pool, max_length
        self._kernels = model_kernels(_shapes(decoder.config, _products(quantization, decoder), block_size))
        self._threads = torch.get_num_threads()
        self._products = _products(quantization, decoder)
        widths = decoder.layers[0].qkv.shape[0], decoder.config.mlp_width, decoder.head.shape[0]
        self._no_bias = torch.zeros(max(decoder.config.hidden_size, *widths))
        self._windows = [decoder.config.window(i) for i in range(decoder.config.num_layers)]
        self._buffers: dict[int, Buffers] = {}

    @staticmethod
    def why_not(config: ModelConfig, quantization: str, block_size: int) -> str:
        """Returns why the kernels cannot run a model with float32 activations and keys; empty if they can."""
        if lacks := lacking(config, "few_rows"):
            return f"the model has {lacks}"
        if importlib.util.find_spec("llvmlite") is None:
            return "llvmlite is not installed"
        from engine.kernels.cpu.library import why_not

        return why_not(_shapes(config, KERNELS[quantization], block_size))

    def logits(self, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray, tables: np.ndarray) -> torch.Tensor:
        """Returns the logits [R, V] of R tokens. tokens, positions, slots: [R]; tables [R, C]: the blocks of each.

        Stores the keys and values of all tokens before the attention of any token.
        """
        rows = len(tokens)
        buffers = self._buffers.get(rows)
        if buffers is None:
            if len(self._buffers) == KEPT_SIZES:
                self._buffers.pop(next(iter(self._buffers)))
            buffers = self._buffers[rows] = self._prepare(rows)
        buffers.residual.copy_(embed(torch.from_numpy(tokens.astype(np.int64)), self._decoder.embedding))
        buffers.positions[:], buffers.slots[:], buffers.lengths[:] = positions, slots, positions + 1
        tables = np.ascontiguousarray(tables, dtype=np.int64)
        logits = torch.empty(rows, self._decoder.head.shape[0])
        calls = buffers.calls
        calls[2:-1:6, 3], calls[2:-1:6, 7] = tables.ctypes.data, tables.shape[1]
        calls[-1, 5] = logits.data_ptr()
        self._kernels.run(buffers.functions, calls, self._threads)
        return logits

    def _prepare(self, rows: int) -> Buffers:
        """Returns buffers for a number of rows, with the calls of a step. The fields that change are 0."""
        from engine.kernels.cpu.library import FIELDS
        from engine.kernels.cpu.product import Before

        decoder, pool = self._decoder, self._pool
        b = Buffers(rows, decoder, self._threads, self._max_length)
        calls: list[tuple[str, list[Any]]] = []

        def product(
            weight: Matrix, x: torch.Tensor, out: Any, bias: torch.Tensor | None,
            before: Before = Before.NOTHING, norm: Any = 0, add: bool = False,
        ) -> None:  # fmt: skip
            values, scale = (weight, 0) if isinstance(weight, torch.Tensor) else (weight.values, weight.scale)
            bias = self._no_bias if bias is None else bias
            n, k = weight.shape
            fields = [values, scale, x, norm, bias, out, b.scratch, k, n, rows, b.each, int(before), int(add)]
            if isinstance(weight, Int4Weight):
                fields += [weight.groups, 0 if weight.offsets is None else weight.offsets, weight.shift]
            calls.append((self._products[weight is decoder.head], fields))

        for i, layer in enumerate(decoder.layers):
            mlp, keys, values = layer.mlp, pool.keys[i], pool.values[i]
            assert isinstance(mlp, DenseMLP)
            norms = 0 if layer.qk_norm is None else layer.qk_norm
            product(layer.qkv, b.residual, b.qkv, layer.qkv_bias, Before.NORM, layer.input_norm)
            table = decoder.rope_tables[i]
            calls.append(("rotate", [b.qkv, norms, table, b.q, keys, values, b.positions, b.slots, rows]))
            calls.append(("attend", [b.q, keys, values, 0, b.lengths, b.attended, b.scratch, 0, rows,
                                     self._windows[i], b.each]))  # fmt: skip
            product(layer.output, b.attended, b.residual, layer.output_bias, add=True)
            product(mlp.gate_up, b.residual, b.gate_up, mlp.gate_up_bias, Before.NORM, layer.post_norm)
            product(mlp.down, b.gate_up, b.residual, mlp.down_bias, Before.SILU, add=True)
        product(decoder.head, b.residual, 0, None, Before.NORM, decoder.norm)
        b.functions = np.array([self._kernels.address(name) for name, _ in calls], dtype=np.int64)
        b.calls = np.zeros((len(calls), FIELDS), dtype=np.int64)
        for call, (_, fields) in zip(b.calls, calls, strict=True):
            call[: len(fields)] = [_number(field) for field in fields]
        return b


def _number(field: Any) -> int:
    """Returns the 64-bit number of a kernel's argument: an address or a whole number."""
    if isinstance(field, torch.Tensor):
        return field.data_ptr()
    return field.ctypes.data if isinstance(field, np.ndarray) else int(field)


def _products(quantization: str, decoder: Decoder) -> tuple[str, str]:
    """Returns the kernels of the matrices of the layers, and of the output matrix."""
    layers, head = KERNELS[quantization]
    first = decoder.layers[0].qkv
    return ("int4_offsets" if isinstance(first, Int4Weight) and first.offsets is not None else layers), head


def _shapes(config: ModelConfig, products: tuple[str, str], block_size: int) -> Any:
    from engine.kernels.cpu.library import KernelShapes

    return KernelShapes(
        weights=tuple(dict.fromkeys(products)),
        columns=(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim),
        heads=(config.num_heads, config.num_kv_heads), head_dim=config.head_dim, block_size=block_size,
        scale=config.scale, eps=config.rms_norm_eps, qk_norm=config.qk_norm,
    )  # fmt: skip
