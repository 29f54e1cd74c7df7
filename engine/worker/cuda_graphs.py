"""CUDA graphs for host-bound steps: steps that take longer to launch than to compute.

Each form of step is captured in several sizes. A step is padded to the next captured size, and the graph of that
size is replayed. The forms:

    decode   one token per sequence; the size is the number of sequences
    extend   chunks of few sequences; a chunk has only one token if the rest of its prompt is cached; the size is the
             number of tokens
    verify   a few tokens per sequence, some of them drafts; only with speculation (engine/worker/verify_graphs.py)
    sample   from logits to tokens (engine/worker/sampling_graphs.py)

All inputs of a graph have fixed addresses. The host writes only to pinned staging buffers, and reuses a buffer only
after the copy from it has finished. The device's state (block table, last token, settings) changes only in stream
order. So the host may launch a step while the previous step runs. Steps that fit no graph are launched kernel by kernel
(engine/worker/eager.py).

If several ranks share the model (engine/parallel/), their collectives are captured too. Every rank captures the same
graphs in the same order, and the plan alone decides which graph a rank replays.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.attention.triton_backend import TritonAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.kernels.batch_state import HEADER, prepare
from engine.kernels.moe import forms
from engine.kernels.prefill_attention import BLOCK_M, num_splits
from engine.progress import Progress
from engine.worker.capture import Work, capture_all
from engine.worker.fused_decode import DecodeLayers
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.sampling_graphs import DRAWABLE, SamplingGraphs
from engine.worker.step_graphs import StepGraphs
from engine.worker.upload import Staging
from engine.worker.verify_graphs import VerifyGraphs, verify_sizes

CHANGES = 1024  # block table changes that fit into the input of a decode step; more changes are sent before the step
EXTEND_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072)
WARM_UP_TOKENS = (1, 24, 100, 256, 700, 1024, 2047)
# The host's time to launch one layer kernel by kernel. For Qwen3-30B-A3B, a chunk of 700 tokens after 1,024 cached
# tokens takes 14 ms as a graph and 20 ms kernel by kernel.
LAUNCH_SECONDS = 2e-4
MATMUL_RATE = 5e14  # operations per second of a step that is GPU-bound
EXTEND_SEQUENCES = 8


class CudaGraphs:
    """Captures all graphs at the start, unless `enforce_eager`, and replays the graph that fits a step."""

    def __init__(self, loaded: LoadedModel, on_progress: Progress | None) -> None:
        attention = loaded.attention
        assert isinstance(attention, TritonAttention), "engine/build.py chooses CUDA graphs only with TritonAttention"
        self.parts: list[StepGraphs] = []
        self._sampling: SamplingGraphs | None = None
        self.num_graphs = 0
        # Smaller steps do not use flash attention: they are host-bound, and flash needs more of the host's time.
        attention.flash_from = launch_bound(loaded)
        if not loaded.config.enforce_eager:
            self._capture(loaded, attention, on_progress)
        attention.warm_up(loaded.pool, loaded.dtype)
        warm_up_forms(loaded, on_progress)
        # Later garbage collections skip the objects that exist now: visiting them delays a step by 60 ms.
        gc.collect()
        gc.freeze()

    def _capture(self, loaded: LoadedModel, attention: TritonAttention, on_progress: Progress | None) -> None:
        rows = loaded.batch.max_rows
        drafts = verify_sizes(loaded) if loaded.config.speculation != "off" else ()
        sampling = SamplingGraphs(loaded, max(rows, EXTEND_SEQUENCES, *drafts))
        layers = DecodeLayers(loaded.model, attention, loaded.pool, loaded.batch.table, loaded.group)
        decode = DecodeGraphs(loaded, layers, sampling)
        extend = ExtendGraphs(loaded, attention, layers, sampling)
        work: list[Work] = []
        self._sampling, self.parts = sampling, [decode, extend]
        if drafts:
            verify = VerifyGraphs(loaded, attention, layers, sampling)
            self.parts.insert(0, verify)
            work += verify.work()
        sizes = ladder(rows)
        work += extend.work() + decode.work() + sampling.work(sizes) + sampling.work(set(drafts) - set(sizes))
        self.num_graphs = len(work)
        capture_all(loaded, work, on_progress)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Replay a graph that fits the step, and return the launched step; None if no graph fits."""
        for part in self.parts:
            launched = part.launch(plan, grammars)
            if launched is not None:
                return launched
        return None

    def close(self) -> None:
        """Free the graphs."""
        for part in self.parts:
            part.close()
        if self._sampling is not None:
            self._sampling.close()


class DecodeGraphs(StepGraphs):
    """Steps in which every sequence decodes one token."""

    form = "decode"

    def __init__(self, loaded: LoadedModel, layers: DecodeLayers, sampling: SamplingGraphs) -> None:
        rows = loaded.batch.max_rows
        super().__init__(loaded, layers, sampling, ladder(rows))
        self._bucket = {n: next(b for b in self._sizes if b >= n) for n in range(1, rows + 1)}
        self._input = Staging(HEADER + 3 * rows + 3 * CHANGES, torch.int32, loaded.device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=loaded.device)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        n = len(plan.rows)
        if plan.num_decodes != n or n > self._batch.max_rows:
            return None
        started, begin = time.perf_counter(), self._loaded.mark()
        self._batch.join(plan)
        self._send(plan)
        bucket = self._bucket[n]
        self._replay(bucket)
        asked, entries = self._batch.sampler.asked(plan.rows), self._batch.indices[:n]
        if asked & ~DRAWABLE:
            positions = plan.starts.astype(np.int64) + 1
            return self._sample_eagerly(plan, grammars, entries, positions, slice(n), started, begin)
        return self._sampling.draw(plan, asked, bucket, n, None, entries, begin)

    def _send(self, plan: StepPlan) -> None:
        n, changes = len(plan.rows), len(plan.table_rows)
        if changes <= CHANGES:  # the changes fit into the step's input
            self._batch.change_host_table(plan)
        else:
            self._batch.change_table(plan)
            changes = 0
        sent = self._input.array()
        sent[0], sent[1] = n, changes
        at = HEADER
        for part in (plan.rows, plan.starts, plan.token_ids):
            sent[at : at + n] = part
            at += self._batch.max_rows
        if changes:
            for part in (plan.table_rows, plan.table_columns, plan.table_blocks):
                sent[at : at + changes] = part
                at += CHANGES
        self._input.send(at)

    def _run(self, n: int) -> None:
        batch, sampling = self._batch, self._sampling
        prepare(
            self._input.target, batch.table, batch.last_token, self._tokens, sampling.rows, sampling.lengths, n,
            batch.max_rows, CHANGES,
        )  # fmt: skip
        live = self._input.target[:1]
        self._layers.logits(self._tokens[:n], sampling.rows[:n], sampling.lengths[:n], live, sampling.logits[:n])


class ExtendGraphs(StepGraphs):
    """Steps with chunks of at most EXTEND_SEQUENCES sequences."""

    form = "extend"

    def __init__(
        self, loaded: LoadedModel, attention: TritonAttention, layers: DecodeLayers, sampling: SamplingGraphs
    ) -> None:
        most_useful = max(64, launch_bound(loaded))
        limit = loaded.group.least(min(loaded.max_num_batched_tokens, loaded.max_model_len, most_useful))
        enough_rows = loaded.batch.max_rows >= EXTEND_SEQUENCES
        super().__init__(loaded, layers, sampling, [t for t in EXTEND_TOKENS if t <= limit] if enough_rows else [])
        self._attention = attention
        self._input = Staging(4 * max(self._sizes, default=0) + 5 * EXTEND_SEQUENCES, torch.int64, loaded.device)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        n, tokens = len(plan.rows), plan.num_tokens
        if not self._sizes or plan.num_drafted or n > EXTEND_SEQUENCES or tokens > self._sizes[-1]:
            return None
        self._batch.join(plan)
        asked = self._batch.sampler.asked(plan.rows)
        if plan.prompt_targets or asked & ~DRAWABLE:
            return None
        bucket = next(t for t in self._sizes if t >= tokens)
        begin = self._loaded.mark()
        self._batch.change_table(plan)
        self._send(plan, bucket)
        self._replay(bucket)
        every = bool(plan.samples.all())
        entries = self._batch.indices[:n] if every else np.flatnonzero(plan.samples)
        return self._sampling.draw(plan, asked, EXTEND_SEQUENCES, n, None if every else entries, entries, begin)

    def _send(self, plan: StepPlan, bucket: int) -> None:
        n, tokens = len(plan.rows), plan.num_tokens
        ends, seq_lens, token_rows, positions, slots = self._batch.layout(plan)
        sent = self._input.array()
        total = 4 * bucket + 5 * EXTEND_SEQUENCES
        sent[:total] = 0
        sent[:tokens] = plan.token_ids
        sent[bucket : bucket + tokens] = positions
        sent[2 * bucket : 2 * bucket + tokens] = slots
        sent[3 * bucket : 3 * bucket + tokens] = token_rows
        tail = sent[4 * bucket : total].reshape(5, EXTEND_SEQUENCES)
        tail[0, :n] = plan.rows
        tail[1, :n], tail[1, n:] = ends, tokens  # the end of each sequence; padding sequences are empty
        tail[2, :n] = seq_lens
        tail[3, :n] = ends - 1
        tail[4, :n] = np.where(plan.samples, seq_lens, 0)  # 0: draws nothing
        self._input.send(total)

    def _run(self, tokens: int) -> None:
        sent, n = self._input.target, EXTEND_SEQUENCES
        ids, positions, slots, token_rows = sent[: 4 * tokens].view(4, tokens)
        rows, ends, seq_lens, logit_rows, draws = sent[4 * tokens : 4 * tokens + 5 * n].view(5, n)
        self._sampling.rows[:n].copy_(rows)
        self._sampling.lengths[:n].copy_(draws)
        bounds = torch.zeros(n + 1, dtype=torch.int32, device=self._loaded.device)
        bounds[1:].copy_(ends)
        used = (seq_lens > 0).sum(0, keepdim=True).to(torch.int32)
        meta = ForwardMeta(
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=bounds,
            seq_lens=seq_lens.to(torch.int32),
            block_table=self._batch.table.index_select(0, rows),
            max_q_len=tokens,
            max_seq_len=self._loaded.max_model_len,
            num_decodes=0,
            logit_rows=logit_rows,
            live=bounds[n:],
            live_rows=used,
        )
        ids = torch.where(ids < 0, self._batch.last_token.index_select(0, token_rows), ids)
        # Most of the graph's sequences are padding, so the number of splits depends on the tokens, not the sequences.
        tiles = -(-tokens * self._attention.group // BLOCK_M)
        self._attention.plan(meta, padded=True, splits=num_splits(tiles, self._loaded.shard.num_kv_heads))
        self._layers.logits_of_chunks(ids, meta, self._sampling.logits[:n])


def launch_bound(loaded: LoadedModel) -> int:
    """Returns the number of tokens below which a step takes longer to launch than to compute."""
    layer = loaded.model.nbytes_per_token / loaded.dtype.itemsize / loaded.model_config.num_layers
    return int(LAUNCH_SECONDS * MATMUL_RATE / (2 * layer))


def warm_up_forms(loaded: LoadedModel, on_progress: Progress | None) -> None:
    """Run steps of several sizes without graphs, so that their kernels are compiled before the first request.

    Without this, a mixture of experts took up to 1.3 s for the first prompt of each size, instead of 0.14 s.
    """
    most, experts = loaded.max_num_batched_tokens, loaded.model_config.experts
    sizes = {min(size, most) for size in WARM_UP_TOKENS}
    if experts is not None:
        sizes.update(forms(most, loaded.model_config.hidden_size, experts.count, experts.per_token))
    for done, tokens in enumerate(sorted(sizes)):
        if on_progress is not None:
            text = f"preparing steps of {tokens:,} tokens"
            on_progress({"stage": "forms", "done": done, "total": len(sizes), "text": text})
        loaded.warm_up(tokens)


def ladder(most: int) -> list[int]:
    """Returns the batch sizes to capture, ascending, up to `most`.

    Small sizes are closer to each other, because padding slows small batches most.
    """
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, most + 32, 32)]
    return sorted({min(size, most) for size in sizes if size <= most} | {most})
