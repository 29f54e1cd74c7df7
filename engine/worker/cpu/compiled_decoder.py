"""All steps of a model on a CPU, with compiled kernels (engine/kernels/cpu/). Of decodes, all layers are one call.

Computes the same as Decoder.forward and Decoder.logits (engine/model/decoder.py). A layer of a decode has 6 kernels:

    norm + qkv | q/k norm + rope + store | attention | output + residual | norm + gate/up | silu + down + residual

In a step with prompts, another kernel computes the attention of sequences with several tokens. Products that are fast
with any number of rows then take f(x), which is "norm" or "silu" above, from a kernel of its own
(engine/kernels/cpu/grouped.py).
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionBackend, ForwardMeta
from engine.attention.kv_pool import KVPool
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DenseMLP
from engine.model.four_bits import Int4Weight
from engine.model.linear import Bf16Pairs, Matrix, embed
from engine.model.traits import lacking

KERNELS = {  # kind of weights -> kernels for the matrices of the layers, and for the output matrix
    "none": ("float32", "float32"), "bf16": ("bfloat16", "bfloat16"), "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
}
MOST_ROWS = 48  # of a step whose kernels each round all rows in every thread


class Buffers:
    """Activations of at most `rows` rows, and scratch memory of the kernels."""

    def __init__(self, rows: int, decoder: Decoder, threads: int, max_length: int) -> None:
        from engine.kernels.cpu.product import scratch_floats

        config, dim = decoder.config, decoder.config.head_dim
        self.rows = rows
        self.residual = torch.empty(rows, config.hidden_size)
        self.qkv = torch.empty(rows, (config.num_heads + 2 * config.num_kv_heads) * dim)
        self.q = torch.empty(rows, config.num_heads, dim)
        self.attended = torch.empty(rows, config.num_heads * dim)
        self.gate_up = torch.empty(rows, 2 * config.intermediate_size)
        self.positions, self.lengths = (np.zeros(rows, dtype=np.int64) for _ in range(2))
        self.slots = np.zeros((1 + max(decoder.group_of), rows), dtype=np.int64)  # of each cache group
        widest = max(config.hidden_size, config.intermediate_size, config.num_heads * dim)
        few = min(rows, MOST_ROWS)  # kernels that round rows for all threads have scratch memory of their own
        self.each = max(scratch_floats(few, widest), max_length + 16)
        self.scratch = torch.empty(threads, self.each)
        self.rounded = torch.empty(scratch_floats(rows, widest) if rows > MOST_ROWS else 0)


class Calls:
    """The calls of kernels for a decoder, in order. The number of rows is a field of each; 0: a field that changes."""

    def __init__(self, kernels: Any) -> None:
        from engine.kernels.cpu.library import FIELDS

        self._kernels, self._width = kernels, FIELDS
        self._names: list[str] = []
        self._fields: list[list[int]] = []
        self._of_rows: list[int] = []  # which field of each call has the number of rows

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, fields: list[Any], rows: int) -> None:
        self._names.append(name)
        self._fields.append([_number(field) for field in fields])
        self._of_rows.append(rows)

    def finish(self) -> None:
        self.functions = np.array([self._kernels.address(name) for name in self._names], dtype=np.int64)
        self.fields = np.zeros((len(self), self._width), dtype=np.int64)
        for call, fields in zip(self.fields, self._fields, strict=True):
            call[: len(fields)] = fields
        self._at = np.arange(len(self)), np.array(self._of_rows)

    def set_rows(self, rows: int) -> None:
        self.fields[self._at] = rows

    def run(self, first: int, end: int, threads: int) -> None:
        self._kernels.run(self.functions[first:end], self.fields[first:end], threads)


class CompiledDecoder:
    """Runs steps of a Decoder with dense MLPs, float32 activations and a float32 KV cache. `step` runs decodes.
    `forward` and `logits` do what those of the Decoder do, for steps with prompts."""

    def __init__(self, decoder: Decoder, pool: KVPool, quantization: str, block_size: int, max_length: int) -> None:
        from engine.kernels.cpu.library import ANY_ROWS, model_kernels

        self._decoder, self._pool, self._max_length = decoder, pool, max_length
        self._products = _products(quantization, decoder)
        self._kernels = model_kernels(_shapes(decoder.config, self._products, block_size))
        self._threads = torch.get_num_threads()
        self._any_rows = self._products[0] in ANY_ROWS
        self._tile = tokens_in_a_tile(decoder.config)
        self._after = 6 if self._any_rows else 3  # calls of a layer after its attention, in a step with prompts
        widths = decoder.layers[0].qkv.shape[0], decoder.config.mlp_width, decoder.head.shape[0]
        self._no_bias = torch.zeros(max(decoder.config.hidden_size, *widths))
        self._group_of = np.array(decoder.group_of)
        self._windows = [decoder.config.window(i) for i in range(decoder.config.num_layers)]
        self._buffers = Buffers(MOST_ROWS, decoder, self._threads, max_length)
        self._decode_calls = self._calls(self._buffers, False)
        self._prompt_buffers, self._prompt_calls = self._buffers, self._decode_calls
        self._scratch = torch.empty(self._threads, 0)  # for the attention of prompts

    @staticmethod
    def why_not(config: ModelConfig, quantization: str, block_size: int) -> str:
        """Returns why the kernels cannot run a model with float32 activations and keys; empty if they can."""
        if lacks := lacking(config, "compiled"):
            return f"the model has {lacks}"
        if importlib.util.find_spec("llvmlite") is None:
            return "llvmlite is not installed"
        from engine.kernels.cpu.library import why_not

        return why_not(_shapes(config, KERNELS[quantization], block_size))

    @property
    def most_rows(self) -> int:
        """The largest number of rows for which `forward` is faster than the Decoder."""
        if not self._tile:
            return 0
        return sys.maxsize if self._any_rows else MOST_ROWS

    def step(
        self, tokens: np.ndarray, positions: np.ndarray, slots: list[np.ndarray], tables: list[np.ndarray]
    ) -> torch.Tensor:
        """Returns the logits [R, V] of R decodes. tokens, positions: [R]. slots [R], tables [R, C]: of each cache
        group, the slot of each token and the blocks of each sequence. Stores the keys and values of all tokens before
        the attention of any token."""
        rows, buffers, calls = len(tokens), self._buffers, self._decode_calls
        buffers.residual[:rows] = embed(torch.from_numpy(tokens.astype(np.int64)), self._decoder.embedding)
        for array, values in (buffers.positions, positions), (buffers.lengths, positions + 1):
            array[:rows] = values
        for array, values in zip(buffers.slots, slots, strict=True):
            array[:rows] = values
        tables = [np.ascontiguousarray(table, dtype=np.int64) for table in tables]
        logits = torch.empty(rows, self._decoder.head.shape[0])
        calls.set_rows(rows)
        calls.fields[2:-1:6, 3], calls.fields[2:-1:6, 7] = self._of_layers(tables), tables[0].shape[1]
        calls.fields[-1, 2], calls.fields[-1, 5] = buffers.residual.data_ptr(), logits.data_ptr()
        calls.run(0, len(calls), self._threads)
        return logits

    def forward(
        self, token_ids: torch.Tensor, meta: ForwardMeta, attention: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """Returns the final hidden states [s, H] of the tokens in meta.logit_rows (None: all T) before the last norm.
        Stores keys and values. `attention` and `pool` are not used: the kernels know where keys and values are."""
        rows, n = len(token_ids), meta.num_decodes
        b, calls = self._for_rows(rows)
        each = len(calls) // len(self._decoder.layers)  # calls per layer
        b.residual[:rows] = embed(token_ids, self._decoder.embedding)
        b.positions[:rows], b.lengths[:n] = meta.positions.numpy(), meta.seq_lens[:n].numpy()
        tables = []
        for own, array in zip(meta.by_group(), b.slots, strict=True):
            array[:rows] = own.slot_mapping.numpy()
            tables.append(np.ascontiguousarray(own.block_table.numpy(), dtype=np.int64))
        columns, addresses, tiles = tables[0].shape[1], self._of_layers(tables), self._tiles(meta)
        floats = tile_floats(self._decoder.config, meta.max_seq_len)
        if floats > self._scratch.shape[1]:
            self._scratch = torch.empty(self._threads, 2 * floats)
        calls.set_rows(rows)
        at = each - self._after  # in each layer, the first call after its attention
        decodes, chunks = calls.fields[at - 2 :: each], calls.fields[at - 1 :: each]
        decodes[:, 3], decodes[:, 7], decodes[:, 8] = addresses, columns, n
        chunks[:, 3], chunks[:, 4], chunks[:, 10] = addresses, tiles.ctypes.data, self._scratch.shape[1]
        chunks[:, 6:9] = self._scratch.data_ptr(), columns, len(tiles)
        end = len(calls) - self._after
        calls.run(0, end, self._threads)
        if meta.logit_rows is not None:
            rows = len(meta.logit_rows)
            for activations in b.attended, b.residual:
                activations[:rows] = activations.index_select(0, meta.logit_rows)
            calls.set_rows(rows)
        calls.run(end, len(calls), self._threads)
        return b.residual[:rows].clone()

    def _of_layers(self, tables: list[np.ndarray]) -> np.ndarray:
        """Returns the address of each layer's table, that of its cache group."""
        return np.array([table.ctypes.data for table in tables])[self._group_of]

    def _tiles(self, meta: ForwardMeta) -> np.ndarray:
        """Returns the tiles of all sequences that compute several tokens, int64 [T, TILE_FIELDS]."""
        bounds, lengths = meta.cu_seqlens_q.tolist(), meta.seq_lens.tolist()
        tokens, found = self._tile, []
        for i in range(meta.num_decodes, len(lengths)):
            first, end = bounds[i], bounds[i + 1]
            position = lengths[i] - (end - first)
            found += [(at, min(tokens, end - at), i, position + at - first) for at in range(first, end, tokens)]
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [s, V] of what `forward` returned."""
        logits = torch.empty(len(hidden), self._decoder.head.shape[0])
        call = self._decode_calls.fields[-1:].copy()
        for first in range(0, len(hidden), MOST_ROWS):
            part = hidden[first : first + MOST_ROWS]
            call[0, 2], call[0, 5], call[0, 9] = part.data_ptr(), logits[first:].data_ptr(), len(part)
            self._kernels.run(self._decode_calls.functions[-1:], call, self._threads)
        return logits

    def _for_rows(self, rows: int) -> tuple[Buffers, Calls]:
        """Returns buffers for this number of rows, and the calls of all layers, without the output matrix."""
        if self._prompt_calls is self._decode_calls or rows > self._prompt_buffers.rows:
            size = max(MOST_ROWS + 1, 1 << (rows - 1).bit_length()) if self._any_rows else MOST_ROWS
            self._prompt_buffers = Buffers(size, self._decoder, self._threads, self._max_length)
            self._prompt_calls = self._calls(self._prompt_buffers, True)
        return self._prompt_buffers, self._prompt_calls

    def _calls(self, b: Buffers, prompts: bool) -> Calls:
        """Returns the calls of all layers. prompts: of steps that not only decode, and without the output matrix."""
        from engine.kernels.cpu.product import PREPARE, Before

        decoder, pool = self._decoder, self._pool
        calls = Calls(self._kernels)

        def product(
            weight: Matrix, x: torch.Tensor, out: Any, bias: torch.Tensor | None,
            before: Before = Before.NOTHING, norm: Any = 0, add: bool = False,
        ) -> None:
            values, scale = (weight, 0) if isinstance(weight, torch.Tensor) else (weight.values, weight.scale)
            bias = self._no_bias if bias is None else bias
            n, k = weight.shape
            name, scratch = self._products[weight is decoder.head], b.scratch
            more = []
            if isinstance(weight, Int4Weight):
                more = [weight.groups, 0 if weight.offsets is None else weight.offsets, weight.shift]
            if prompts and self._any_rows:
                fields = [values, scale, x, norm, bias, out, b.rounded, k, n, 0, 0, int(before), int(add), *more]
                calls.add(name + PREPARE, fields, 9)
                x, before = b.rounded, Before.READY
            fields = [values, scale, x, norm, bias, out, scratch, k, n, 0, b.each, int(before), int(add), *more]
            calls.add(name, fields, 9)

        for i, layer in enumerate(decoder.layers):
            mlp, keys, values = layer.mlp, pool.keys[i], pool.values[i]
            assert isinstance(mlp, DenseMLP)
            norms = 0 if layer.qk_norm is None else layer.qk_norm
            product(layer.qkv, b.residual, b.qkv, layer.qkv_bias, Before.NORM, layer.input_norm)
            table = decoder.rope_tables[i]
            calls.add("rotate", [b.qkv, norms, table, b.q, keys, values, b.positions,
                                 b.slots[decoder.group_of[i]], 0], 8)
            calls.add("attend", [b.q, keys, values, 0, b.lengths, b.attended, b.scratch, 0, 0, self._windows[i],
                                 b.each], 8)
            if prompts:
                calls.add("attend_tiles", [b.q, keys, values, 0, 0, b.attended, 0, 0, 0, self._windows[i], 0], 8)
            product(layer.output, b.attended, b.residual, layer.output_bias, add=True)
            product(mlp.gate_up, b.residual, b.gate_up, mlp.gate_up_bias, Before.NORM, layer.post_norm)
            product(mlp.down, b.gate_up, b.residual, mlp.down_bias, Before.SILU, add=True)
        if not prompts:
            product(decoder.head, b.residual, 0, None, Before.NORM, decoder.norm)
        calls.finish()
        return calls


def tokens_in_a_tile(config: ModelConfig) -> int:
    """Returns the number of tokens that a tile of the attention of prompts has; 0: there is no such kernel."""
    from engine.kernels.cpu.features import features
    from engine.kernels.cpu.prompt_attention import tokens_per_tile

    return tokens_per_tile(features().lanes, (config.num_heads, config.num_kv_heads))


def tile_floats(config: ModelConfig, length: int) -> int:
    from engine.kernels.cpu.features import features
    from engine.kernels.cpu.prompt_attention import tile_scratch_floats

    return tile_scratch_floats(features().lanes, config.head_dim, length)


def _number(field: Any) -> int:
    """Returns the 64-bit number of a kernel's argument: an address or a whole number."""
    if isinstance(field, torch.Tensor):
        return field.data_ptr()
    return field.ctypes.data if isinstance(field, np.ndarray) else int(field)


def _products(quantization: str, decoder: Decoder) -> tuple[str, str]:
    """Returns the kernels of the matrices of the layers, and of the output matrix."""
    layers, head = KERNELS[quantization]
    first = decoder.layers[0].qkv
    if isinstance(first, Bf16Pairs):
        return "bf16_pairs", "bf16_rows"
    return ("int4_offsets" if isinstance(first, Int4Weight) and first.offsets is not None else layers), head


def _shapes(config: ModelConfig, products: tuple[str, str], block_size: int) -> Any:
    from engine.kernels.cpu.library import KernelShapes

    return KernelShapes(
        weights=tuple(dict.fromkeys(products)),
        columns=(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim),
        heads=(config.num_heads, config.num_kv_heads), head_dim=config.head_dim, block_size=block_size,
        scale=config.scale, eps=config.rms_norm_eps, qk_norm=config.qk_norm,
    )
