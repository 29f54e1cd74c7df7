"""CUDA graphs for host-bound steps: steps that take longer to launch than to compute.

Each form of step is captured in several sizes. A step is padded to the next captured size, and the graph of that
size is replayed. The forms:

    decode   one token per sequence; the size is the number of sequences
    extend   chunks of few prompts, with or without sequences that decode (engine/worker/graphs/extend_graphs.py)
    verify   a few tokens per sequence, some of them drafts; only with speculation (verify_graphs.py)
    sample   from logits to tokens (engine/worker/graphs/sampling_graphs.py)

All inputs of a graph have fixed addresses. The host writes only to pinned staging buffers, and reuses a buffer only
after the copy from it has finished. The device's state (block table, last token, settings) changes only in stream
order. So the host may launch a step while the previous step runs. Steps that fit no graph are launched kernel by kernel
(engine/worker/eager.py), and so are those whose graph is not captured yet: with one rank, an engine process captures
graphs while no request runs (engine/process/loop.py).

If several ranks share the model (engine/parallel/), their collectives are captured too. Every rank captures the same
graphs in the same order before the first step, and the plan alone decides which graph a rank replays.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.attention.base import StateMeta
from engine.attention.grouped import backends_of
from engine.attention.triton_backend import TritonAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan, TableChanges
from engine.groups import paged_groups
from engine.kernels.batch_state import HEADER, prepare
from engine.kernels.decode_attention import PROGRAMS, num_splits
from engine.kernels.moe import bits_of
from engine.kernels.moe_tiles import forms
from engine.model.experts import Experts
from engine.model.four_bits import Int4Tiles
from engine.progress import Progress
from engine.worker.eager import padded
from engine.worker.graphs.capture import Captures
from engine.worker.graphs.extend_graphs import SEQUENCES, ExtendGraphs
from engine.worker.graphs.fused_decode import DecodeLayers
from engine.worker.graphs.sampling_graphs import SamplingGraphs
from engine.worker.graphs.step_graphs import StepGraphs
from engine.worker.graphs.verify_graphs import VerifyGraphs, verify_sizes
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.runner import Executor
from engine.worker.upload import Staging

CHANGES = 1024  # block table changes that fit into the input of a decode step; more changes are sent before the step
WARM_UP_TOKENS = (1, 24, 100, 256, 700, 1024, 2047)
# Rows between two numbers for which products are computed before requests need them, and the largest number. An odd
# number: cuBLAS has other kernels for numbers of rows that 2, 4 or 8 divides.
APART, MOST_ROWS = 33, 8192
# A step that is GPU-bound computes at this share of the rate of one large matrix product.
MATMUL_SHARE = 0.65
MATMUL_SIZE, MATMUL_COUNT = 4096, 8  # the product that is measured, and how often it is computed
LAUNCH_SECONDS = (1e-4, 6e-4)  # the least and the most time to launch a layer that is believed; see launch_seconds
LAUNCH_TRIALS = 4
BUSY = 3  # multiple of that time while requests arrive (engine/kernels/MEASURED.md)
PATIENCE_S = 0.02  # the longest wait for a kernel that another thread compiles; a request may arrive meanwhile

logger = logging.getLogger("engine")


class CudaGraphs(Executor):
    """Replays the graph that fits a step. `prepare` captures the graphs, those that small batches need first."""

    def __init__(self, loaded: LoadedModel, on_progress: Progress | None) -> None:
        attention = [backend for backend in backends_of(loaded.attention) if isinstance(backend, TritonAttention)]
        assert attention, "engine/build.py chooses CUDA graphs only with TritonAttention"
        self._loaded, self._began = loaded, time.perf_counter()
        self.parts: list[StepGraphs] = []
        self._sampling: SamplingGraphs | None = None
        warm_ups: dict[Any, Callable[[], object]] = {}  # steps without graphs: their first run loads kernels
        for backend, group in zip(attention, paged_groups(loaded.shard), strict=True):
            where = loaded.pool, loaded.dtype, group.layers[0]
            warm_ups[backend] = partial(backend.warm_up, *where)
            loaded.compile_ahead(partial(backend.warm_up, *where, most_rows=1))  # the first request needs it
            backend.warm_up_flash(*where)
        # Smaller steps do not use flash attention: they are host-bound, and flash needs more of the host's time.
        seconds = launch_seconds(loaded)
        bound = loaded.group.least(launch_bound(loaded, seconds, matmul_rate(loaded)))
        for backend in attention:
            backend.flash_from = bound
        if not loaded.config.enforce_eager:
            self._make_parts(loaded, bound)
            loaded.graphs["launch_ms"] = round(seconds * loaded.model_config.num_layers * 1e3, 3)
        warm_ups |= {tokens: partial(self._warm_up, tokens) for tokens in forms_of_steps(loaded)}
        graphs = [(part, size) for part in self.parts for size in part.sizes]
        graphs.sort(key=lambda each: each[0].size_of(each[1])[:2])
        self.num_graphs = len(graphs)
        # What is left: runs whose kernels are not compiled yet, then pieces of work; both in this order.
        self._uncompiled: list[Callable[[], object]] = [*warm_ups.values()]
        self._uncompiled += [partial(part.run, size) for part, size in graphs]
        self._largest = 0  # bytes that one of these runs needs
        self._captures: Captures | None = None
        if loaded.compiler is None:
            self._uncompiled.clear()
            graphs.reverse()  # no memory is reserved: large graphs leave theirs to smaller ones
        self._left = {(part, size): partial(self._capture, part, size) for part, size in graphs} | warm_ups
        # For one number of rows in eight, cuBLAS has a kernel whose first launch waits until the device has no work.
        most, indices = loaded.batch.max_rows, loaded.batch.indices
        draws = sorted({len(padded(indices[:n], most)) for n in range(2, most + 1)})
        for rows in (*draws, *range(APART, min(MOST_ROWS, loaded.max_num_batched_tokens) + 1, APART)):
            self._left.setdefault(rows, partial(self._warm_up, rows))

    def _make_parts(self, loaded: LoadedModel, bound: int) -> None:
        rows = loaded.batch.max_rows
        drafts = verify_sizes(loaded) if loaded.config.speculation != "off" else ()
        self._sampling = sampling = SamplingGraphs(loaded, max(rows, SEQUENCES, *drafts))
        layers = DecodeLayers(loaded.model, loaded.attention, loaded.pool, loaded.batch.tables, loaded.group)
        decode, extend = DecodeGraphs(loaded, layers, sampling), ExtendGraphs(loaded, layers, sampling, bound)
        self.parts = [decode, extend]
        if drafts:
            self.parts.insert(0, VerifyGraphs(loaded, layers, sampling))
        reader = layers.attention[0]
        loaded.graphs = {
            "rows": decode.sizes, "decodes": sorted({size.decodes for size in extend.sizes} - {0}),
            "tokens": max((size.tokens for size in extend.sizes), default=0), "prompts": SEQUENCES,
            "splits": [num_splits(n, reader.kv_heads, reader.workspace.longest) for n in decode.sizes],
            "programs": max(1, PROGRAMS // reader.kv_heads),
        }

    def _warm_up(self, tokens: int) -> None:
        loaded = self._loaded
        with loaded.first_layers():
            logits = loaded.warm_up(tokens, loaded.pool)
        if tokens <= loaded.batch.max_rows:
            loaded.batch.sampler.warm_up(logits)
        if loaded.model_config.experts is not None:
            loaded.model.take_expert_load()  # discards the load of the warm-up

    def _capture(self, part: StepGraphs, size: Any) -> None:
        if self._captures is None:
            self._captures = Captures(self._loaded.device, self._loaded.group.size, self._largest)
        part.capture(size, self._captures)

    def prepare(self, wanted: bool = False) -> dict[str, Any] | None:
        compiler = self._loaded.compiler
        if compiler is not None and self._left:
            uncompiled = len(self._uncompiled)
            if uncompiled:
                self._largest = max(self._largest, self._loaded.compile_ahead(self._uncompiled.pop(0)))
            done, total = compiler.progress(0.0 if wanted or uncompiled else PATIENCE_S)
            if uncompiled or done < total:
                return {"stage": "kernels", "done": done, "total": total, "text": f"compiling kernels: {done}/{total}"}
        lacking = [key for part in self.parts if (key := (part, part.wanted)) in self._left]
        if lacking or (self._left and not wanted):
            self._left.pop(lacking[0] if lacking else next(iter(self._left)))()
            if not self._left:
                self._finish()
        if not self._left:
            return None
        done, total = sum(len(part.graphs) for part in self.parts), self.num_graphs
        text = f"capturing CUDA graphs: {done}/{total}" if done < total else "preparing steps of other sizes"
        return {"stage": "graphs", "done": done, "total": total, "text": text}

    def _finish(self) -> None:
        loaded = self._loaded
        if loaded.compiler is not None:
            loaded.compiler.close()
        loaded.group.take_time()  # discards the time measured in collectives so far: it belongs to no step
        if self._captures is not None:
            note = (
                f"{self.num_graphs} CUDA graphs captured, with {self._captures.reserved / 1e6:,.0f} MB reserved. With "
                f"them and the warm-ups, the start took {time.perf_counter() - self._began:.1f} s after the weights"
            )
            loaded.memory.notes.append(note)
            logger.info(note)
        torch.cuda.empty_cache()
        # Later garbage collections skip the objects that exist now: visiting them delays a step by 60 ms.
        gc.collect()
        gc.freeze()

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Replay a graph that fits the step, and return the launched step; None if no graph fits."""
        for part in self.parts:
            launched = part.launch(plan, grammars)
            if launched is not None:
                return launched
        return None

    def close(self) -> None:
        """Free the graphs."""
        if self._left and self._loaded.compiler is not None:
            self._loaded.compiler.close()
        self._left.clear()
        for part in self.parts:
            part.graphs.clear()
        if self._sampling is not None:
            self._sampling.close()


class DecodeGraphs(StepGraphs):
    """Steps in which every sequence decodes one token."""

    form = "decode"

    def __init__(self, loaded: LoadedModel, layers: DecodeLayers, sampling: SamplingGraphs) -> None:
        rows = loaded.batch.max_rows
        super().__init__(loaded, layers, sampling, ladder(rows))
        self._bucket = {n: next(b for b in self.sizes if b >= n) for n in range(1, rows + 1)}
        self._others = 4 * rows if self._has_states else 0  # numbers of the segments of recurrent states
        self._input = Staging(HEADER + 3 * rows + self._others + 3 * CHANGES, torch.int32, loaded.device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=loaded.device)
        # One segment for each token. The segments of padding write no state.
        each = self._batch.indices.astype(np.int32)
        self._segments = np.stack((each[:-1], each[1:], 0 * each[1:], 0 * each[1:]), 1)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        n = len(plan.rows)
        if plan.num_decodes != n or n > self._batch.max_rows or not self._captured(bucket := self._bucket[n]):
            return None
        started, begin = time.perf_counter(), self._loaded.mark()
        self._batch.join(plan)
        self._send(plan)
        self._replay(bucket, bucket)
        return self._draw(plan, grammars, bucket, plan.starts + 1, None, self._batch.indices[:n], started, begin)

    def size_of(self, size: int) -> tuple[int, int, int]:
        return size, size, size

    def _send(self, plan: StepPlan) -> None:
        n, rows, batch = len(plan.rows), self._batch.max_rows, self._batch
        changes = batch.changes(plan)
        if len(changes.rows) <= CHANGES:  # the changes fit into the step's input
            batch.change_host_table(changes)
        else:
            batch.change_table(changes)
            changes = TableChanges(*(part[:0] for part in changes))
        sent = self._input.array()
        sent[0], sent[1] = n, len(changes.rows)
        at = HEADER
        for part in (plan.rows, plan.starts, plan.token_ids):
            sent[at : at + n] = part
            at += rows
        if self._has_states:
            assert plan.segments is not None, "the plan has the segments of the recurrent states"
            segments = sent[at : at + self._others].reshape(-1, 4)
            segments[:n], segments[n:] = plan.segments, self._segments[n:]
            at += self._others
        if m := len(changes.rows):
            for part in changes:
                sent[at : at + m] = part
                at += CHANGES
        self._input.send(at)

    def _run(self, n: int) -> None:
        batch, sampling = self._batch, self._sampling
        prepare(
            self._input.target, batch.table, batch.last_token, self._tokens, sampling.rows, sampling.lengths, n,
            batch.max_rows, CHANGES, self._others,
        )
        live, states = self._input.target[:1], None
        if self._has_states:
            at = HEADER + 3 * batch.max_rows
            segments = self._input.target[at : at + self._others].view(-1, 4)
            states = StateMeta(segments[:n], batch.bounds[: n + 1], None, n)
        self._layers.logits(
            self._tokens[:n], sampling.rows[:n], sampling.lengths[:n], live, sampling.logits[:n], states
        )


def launch_bound(loaded: LoadedModel, seconds: float, rate: float) -> int:
    """Returns the number of tokens below which a step of a busy server takes longer to launch than to compute.
    `seconds`: the time to launch one layer kernel by kernel on a quiet host. `rate`: operations per second of the
    matrix products."""
    # 8-bit numbers are multiplied twice as fast as bfloat16, so their bytes count; 4-bit numbers only take fewer bytes.
    number = Int4Tiles.itemsize if loaded.quantization == "int4" else loaded.dtype.itemsize
    layer = loaded.model.nbytes_per_token / number / loaded.model_config.num_layers
    return int(BUSY * seconds * rate / (2 * layer))


def matmul_rate(loaded: LoadedModel) -> float:
    """Measures the operations per second of the matrix products of a step that is GPU-bound."""
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=loaded.dtype, device=loaded.device)
    torch.mm(a, a)
    torch.cuda.synchronize(loaded.device)
    started = time.perf_counter()
    for _ in range(MATMUL_COUNT):
        torch.mm(a, a)
    torch.cuda.synchronize(loaded.device)
    return MATMUL_SHARE * MATMUL_COUNT * 2 * MATMUL_SIZE**3 / (time.perf_counter() - started)


def launch_seconds(loaded: LoadedModel) -> float:
    """Measures the time that this host needs to launch one layer kernel by kernel. Hosts differ by a factor of three
    (engine/kernels/MEASURED.md)."""
    times = []
    for _ in range(LAUNCH_TRIALS):
        torch.cuda.synchronize(loaded.device)
        started = time.perf_counter()
        loaded.warm_up(1, loaded.pool)
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize(loaded.device)
    least, most = LAUNCH_SECONDS
    return min(max(min(times) / loaded.model_config.num_layers, least), most)


def forms_of_steps(loaded: LoadedModel) -> list[int]:
    """Returns the numbers of tokens of steps that are run before requests need them, without graphs. Without this, a
    mixture of experts took up to 1.3 s for the first prompt of each size, instead of 0.14 s."""
    most, experts = loaded.max_num_batched_tokens, loaded.model_config.experts
    sizes = {min(size, most) for size in WARM_UP_TOKENS}
    if experts is not None:
        mixtures = [layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, Experts)]
        for bits in {bits_of(mlp.gate_up) for mlp in mixtures}:
            shape = most, loaded.model_config.hidden_size, experts.count, experts.per_token
            sizes.update(forms(*shape, bits))
    return sorted(sizes)


def ladder(most: int) -> list[int]:
    """Returns the batch sizes to capture, ascending, up to `most`. Small sizes are closer to each other, because
    padding slows small batches most."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, most + 32, 32)]
    return sorted({min(size, most) for size in sizes if size <= most} | {most})
