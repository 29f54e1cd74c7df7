"""The executor for steps on a CPU. compiled_decoder.py computes all of them; CPUDecode decodes one sequence in float32.

Calling a small operation takes longer than its arithmetic, because reading the weights evicts the call's code and data
from the caches. So the small operations of CPUDecode use numpy, whose calls are cheaper than torch's, and write to
reused buffers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend
from engine.attention.grouped import backends_of
from engine.attention.kv_pool import KVPool
from engine.attention.torch_backend import TorchAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.model.decoder import Decoder, DenseMLP
from engine.model.linear import ByteWeight, Matrix, linear
from engine.model.traits import lacking
from engine.progress import Progress
from engine.worker.cpu.compiled_decoder import CompiledDecoder
from engine.worker.eager import Eager
from engine.worker.inputs import Draws
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.runner import Executor

MOST_TOKENS = 48  # in larger steps arithmetic dominates call overhead


class CPUSteps(Executor):
    """Runs steps of float32 models with dense MLPs. Draws the same tokens as Eager, but faster. The kernels of
    CompiledDecoder are faster than CPUDecode, but they need llvmlite and a processor that they support."""

    def __init__(self, loaded: LoadedModel, on_progress: Progress | None = None) -> None:
        self._loaded, self._batch = loaded, loaded.batch
        model, kind, size = loaded.model, loaded.quantization, loaded.block_size
        self._compiled: CompiledDecoder | None = None
        self._prompts: Eager | None = None
        self._decode: CPUDecode | None = None
        if loaded.dtype == loaded.kv_dtype == torch.float32:
            if not CompiledDecoder.why_not(model.config, kind, size):
                self._compiled = CompiledDecoder(model, loaded.pool, kind, size, loaded.max_model_len)
                self._prompts = Eager(loaded, model=self._compiled)
            elif CPUDecode.supports(model):
                self._decode = CPUDecode(model, loaded.pool)
        self._attention = loaded.attention

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Run a step. Returns None for models without support, and for steps in which Eager is as fast."""
        if self._compiled is None and (self._decode is None or plan.num_tokens > 1):
            return None
        if plan.num_decoding < len(plan.rows) or plan.num_tokens > MOST_TOKENS:
            if self._compiled is None or self._prompts is None or plan.num_tokens > self._compiled.most_rows:
                return None
            return self._prompts.launch(plan, grammars)
        started = time.perf_counter()
        self._batch.apply(plan)
        logits, draws = self.decode(plan)
        drawn = self._loaded.sample(draws, logits, grammars)
        return self._loaded.launched(plan, draws, drawn, {}, started, None)

    def decode(self, plan: StepPlan) -> tuple[torch.Tensor, Draws]:
        """Returns the logits [T, V] and the draws of a plan that only decodes. Each draft token is computed as if it
        were another sequence."""
        batch = self._batch
        size, tokens, rows, positions = batch.block_size, plan.token_ids, plan.rows, plan.starts
        entries, lengths = batch.indices[: len(rows)], plan.starts + plan.q_lens
        columns = -(-int(lengths.max()) // size)
        tables = [table[rows, :columns] for table in batch.host_tables]
        if plan.num_drafted:
            before = np.cumsum(plan.q_lens) - lengths
            entries = np.repeat(entries, plan.q_lens)
            rows, positions = rows[entries], np.arange(len(tokens)) - before[entries]
            tables, lengths = [table[entries] for table in tables], positions + 1
        slots = batch.slots(rows, positions)
        if (tokens < 0).any():
            tokens = np.where(tokens < 0, batch.last_token.numpy()[rows], tokens)
        if self._compiled is not None:
            logits = self._compiled.step(tokens, positions, slots, tables)
        else:
            assert self._decode is not None
            for attention, table in zip(backends_of(self._attention), tables, strict=True):
                assert isinstance(attention, TorchAttention), "a CPU has no other attention backend"
                attention.plan_arrays(table, lengths, batch.indices, 1)
            logits = self._decode.logits(tokens, positions, slots, self._attention)
        device_rows, device_positions = (torch.from_numpy(part.astype(np.int64)) for part in (rows, lengths))
        return logits, Draws(entries, rows, lengths, device_rows, device_positions)


class CPUDecode:
    """Runs decode steps of one sequence, of a Decoder with dense MLPs, in float32 and on a CPU.

    Its buffers are torch tensors, whose names end in an underscore, and numpy arrays of the same memory."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        config = decoder.config
        heads, kv_heads, dim, inner = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
        self._decoder, self._pool = decoder, pool
        self._caches = [
            (keys.numpy().reshape(-1, kv_heads, dim), values.numpy().reshape(-1, kv_heads, dim))
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._norms = [layer.input_norm.numpy() for layer in decoder.layers] + [decoder.norm.numpy()]
        self._post_norms = [layer.post_norm.numpy() for layer in decoder.layers]
        self._qk_norms = [None if layer.qk_norm is None else layer.qk_norm.numpy() for layer in decoder.layers]
        self._embed, self._table = _lookup(decoder.embedding), decoder.rope_tables[0].numpy()

        def pair(*shape: int) -> tuple[torch.Tensor, np.ndarray]:
            tensor = torch.empty(shape)
            return tensor, tensor.numpy()

        self._residual_, self._residual = pair(config.hidden_size)
        self._x_, self._x = pair(config.hidden_size)
        qkv_, qkv = pair(heads + 2 * kv_heads, dim)
        self._qkv_, self._qk, self._v = qkv_.view(-1), qkv[: heads + kv_heads], qkv[heads + kv_heads :]
        self._halves = self._qk.reshape(-1, 2, dim // 2)
        rotated_, rotated = pair(heads + kv_heads, dim)
        self._q_, self._k, self._rotated = rotated_[None, :heads], rotated[heads:], rotated.reshape(self._halves.shape)
        self._scratch = np.empty_like(self._rotated)
        self._gate_up_, gate_up = pair(2 * inner)
        self._gate_, self._gate, self._up = self._gate_up_[:inner], gate_up[:inner], gate_up[inner:]

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Returns True if the class can run the model with float32 activations and keys."""
        if lacking(decoder.config, "cpu_decode"):
            return False
        return isinstance(decoder.layers[0].qkv, (torch.Tensor, ByteWeight))

    def logits(
        self, tokens: np.ndarray, positions: np.ndarray, slots: list[np.ndarray], attention: AttentionBackend
    ) -> torch.Tensor:
        """Returns the same logits [1, V] as Decoder.forward and Decoder.logits. tokens, positions: [1]. slots [1]: of
        each cache group. Stores the token's keys and values. Before the call, `attention` must be planned."""
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        self._residual[:] = self._embed(tokens[0])
        cos, sin = np.split(self._table[positions[0]], 2)
        cos, sin = np.stack((cos, cos)), np.stack((-sin, sin))
        for i, layer in enumerate(decoder.layers):
            keys, values = self._caches[i]
            self._norm(self._norms[i], eps)
            _multiply(layer.qkv, layer.qkv_bias, self._x_, self._qkv_)
            self._rotate(self._qk_norms[i], eps, cos, sin)
            where = slots[decoder.group_of[i]]
            keys[where], values[where] = self._k, self._v
            attended = attention.run(i, self._q_, self._pool.keys[i], self._pool.values[i])
            _add_product(self._residual_, layer.output, layer.output_bias, attended.view(-1))
            self._norm(self._post_norms[i], eps)
            mlp = layer.mlp
            assert isinstance(mlp, DenseMLP)
            _multiply(mlp.gate_up, mlp.gate_up_bias, self._x_, self._gate_up_)
            F.silu(self._gate_, inplace=True)
            self._gate *= self._up
            _add_product(self._residual_, mlp.down, mlp.down_bias, self._gate_)
        self._norm(self._norms[-1], eps)
        return linear(self._x_[None], decoder.head)

    def _norm(self, weight: np.ndarray, eps: float) -> None:
        """x = the RMSNorm of the residual."""
        residual, x = self._residual, self._x
        np.multiply(residual, 1 / math.sqrt(float(np.dot(residual, residual)) / len(x) + eps), out=x)
        np.multiply(x, weight, out=x)

    def _rotate(self, weight: np.ndarray | None, eps: float, cos: np.ndarray, sin: np.ndarray) -> None:
        """Normalise queries and keys if there is a weight [heads, D], and rotate them by their position (RoPE). cos and
        sin [2, D / 2]; the sines of the first half are negated."""
        if weight is not None:
            square = np.einsum("hd,hd->h", self._qk, self._qk)
            square /= weight.shape[1]
            square += eps
            np.divide(self._qk, np.sqrt(square, out=square)[:, None], out=self._qk)
            np.multiply(self._qk, weight, out=self._qk)
        np.multiply(self._halves, cos, out=self._rotated)
        self._rotated += np.multiply(self._halves[:, ::-1], sin, out=self._scratch)


def _lookup(embedding: Matrix) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function: an id -> its row [H] of the embedding."""
    if not isinstance(embedding, ByteWeight):
        return embedding.numpy().__getitem__
    return lambda id: embedding.rows(torch.as_tensor(id)).numpy()


def _multiply(weight: Matrix, bias: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = weight [N, K] · x [K] + bias."""
    if isinstance(weight, ByteWeight):
        weight.product(x[None], out[None])
    else:
        torch.mv(weight, x, out=out)
    if bias is not None:
        out += bias


def _add_product(total: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, x: torch.Tensor) -> None:
    """total += weight [N, K] · x [K] + bias."""
    if isinstance(weight, ByteWeight):
        total += weight.product(x[None])[0]
    else:
        total.addmv_(weight, x)
    if bias is not None:
        total += bias
