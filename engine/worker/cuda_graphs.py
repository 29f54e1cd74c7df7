"""The runner of a GPU: fused kernels, and CUDA graphs for the steps that are short enough for launches to matter.

What is captured, each at a ladder of sizes and replayed with padding up to the next one:

    decode   one token per sequence, by number of sequences: from the numbers sent by the host to the logits
    extend   chunks of few sequences, by number of tokens (the first token of a cached prompt lives here)
    sample   by number of sequences, in three forms: all greedy | with noise | with noise and truncation

Everything a graph reads lies at a fixed address. The host writes only pinned staging buffers, each guarded by the
event of the copy out of it; the device's state (block table, last token, settings) changes in stream order alone. So
a step may be launched while the one before it runs. Steps that fit no graph take the way of engine/worker/runner.py.

Where several ranks share the model (engine/parallel/), their collectives are captured with the rest. Every rank
captures the same graphs in the same order, and takes the one that the plan asks for. Each draws from its own piece of
the vocabulary and the best of all pieces is elected; with truncation, which needs the whole, the logits are gathered
and all ranks draw the same. So what was drawn is everywhere, and the host tells nobody.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.attention.triton_backend import TritonAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan, StepResult
from engine.kernels.batch_state import HEADER, prepare
from engine.kernels.moe import forms
from engine.kernels.prefill_attention import BLOCK_M, num_splits
from engine.kernels.row_settings import NUM_SETTINGS
from engine.kernels.sample import SampleWorkspace, draw
from engine.model.group import Spent
from engine.progress import Progress
from engine.worker import fused_ops
from engine.worker.fused_decode import DecodeLayers
from engine.worker.inputs import Inputs
from engine.worker.launch import Launched, listed_load
from engine.worker.runner import Runner
from engine.worker.sampler import Wants

logger = logging.getLogger("engine")

RING = 4  # staging buffers: more than steps that can be in flight
CHANGES = 1024  # changes to the block table that travel with a decode step; more go ahead of it
GRAPH_BYTES = 1 << 30  # kept free of KV cache for the graphs' own memory
EXTEND_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072)
WARM_UP_TOKENS = (1, 24, 100, 256, 700, 1024, 2047)
# What it takes the host to launch one layer kernel by kernel. Of Qwen3-30B-A3B a chunk of 100 / 400 / 700 tokens behind
# 1,024 cached takes 7.5 / 10.8 / 14 ms as a graph, and 20 ms kernel by kernel.
LAUNCH_SECONDS = 2e-4
MATMUL_RATE = 5e14  # operations per second at which a step becomes longer than its launches, and padding costs more
EXTEND_SEQUENCES = 8
# To be captured: its name, where its graph is kept, under which key, and what it runs.
Work = tuple[str, dict[Any, torch.cuda.CUDAGraph], Any, Callable[[], None]]
DRAWABLE = Wants.NOISE | Wants.TOP_K | Wants.TOP_P | Wants.MIN_P  # what the sampling kernels know


@dataclass(slots=True)
class Drawing:
    """A step whose tokens are on their way to a pinned buffer. `wait` blocks until they are there."""

    entries: int
    outcome: np.ndarray  # int64 [entries], a view of pinned memory: drawn ids, -1 - id if bad
    samples: np.ndarray | None  # bool [entries]; None: all sample
    begin: torch.cuda.Event
    end: torch.cuda.Event
    spent: Spent | None = None  # in collectives
    expert_load: tuple[list[int], torch.Tensor] | None = None  # layers; int64 [layers, E], pinned and good after `end`

    def wait(self) -> StepResult:
        """The step's outcome, on the host."""
        self.end.synchronize()
        ids = self.outcome.tolist()
        result = StepResult(ids, device_ms=self.begin.elapsed_time(self.end))
        if self.spent is not None:
            result.comm = self.spent.ranks, self.spent.ms
        if self.samples is not None:
            drawn = self.samples.tolist()
            result.ids = ids = [token if is_drawn else -1 for token, is_drawn in zip(ids, drawn, strict=True)]
            result.bad = [i for i, is_drawn in enumerate(drawn) if is_drawn and ids[i] < 0]
        elif ids and min(ids) < 0:
            result.bad = [i for i, token in enumerate(ids) if token < 0]
        for i in result.bad:
            ids[i] = -1 - ids[i]
        if self.expert_load is not None:
            result.expert_load = listed_load(*self.expert_load)
        return result


class Staging:
    """Host arrays to one fixed device buffer, through pinned buffers that are not rewritten while they are read."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.target = torch.zeros(size, dtype=dtype, device=device)
        self._pinned = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(RING)]
        self._arrays = [buffer.numpy() for buffer in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(RING)]
        self._next = 0

    def array(self) -> np.ndarray:
        """The next staging buffer, free to be written; `send` it."""
        self._copied[self._next].synchronize()
        return self._arrays[self._next]

    def send(self, size: int) -> None:
        """Copy the first `size` elements of the buffer last asked for, in stream order."""
        slot = self._next
        self.target[:size].copy_(self._pinned[slot][:size], non_blocking=True)
        self._copied[slot].record()
        self._next = (slot + 1) % RING


class GraphRunner(Runner):
    """Runner with Triton kernels and, unless `enforce_eager`, CUDA graphs. The same tokens, sooner."""

    ops = fused_ops
    attention: TritonAttention

    def _prepare(self, on_progress: Progress | None) -> None:
        self._joined = -1  # the last step whose joins have been applied
        self._settings_version = -1  # of the sampler's settings, as the graphs have them
        self._outcome_slot = 0
        self.graph_seconds, self.graph_bytes, self.num_graphs = 0.0, 0, 0
        self._decode: dict[int, torch.cuda.CUDAGraph] = {}
        self._extend: dict[int, torch.cuda.CUDAGraph] = {}
        self._sample: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.attention.flash_from = self._launch_bound()  # below, the host's time counts, of which it takes more
        if not self.config.enforce_eager:
            self._make_buffers()
            self._capture_all(on_progress)
        self.attention.warm_up(self.pool, self.dtype)
        self._warm_up_forms(on_progress)
        # What exists by now stays: without this, collections that walk it all stop a step for 60 ms now and then.
        gc.collect()
        gc.freeze()

    # ---- a step

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Launched | Drawing:  # type: ignore[override]
        """Enqueue a step: by a graph if one is large enough, else kernel by kernel."""
        n, tokens = len(plan.rows), plan.num_tokens
        with torch.inference_mode():  # before anything of the rows is set: what is made in here can be changed only so
            if self._decode and plan.num_decodes == n and n <= self.max_rows:
                return self._launch_decode(plan, grammars)
            if self._extend and not plan.num_drafted and n <= EXTEND_SEQUENCES and tokens <= self._extend_sizes[-1]:
                self._join(plan)
                if not self.sampler.asked(plan.rows) & ~DRAWABLE and not plan.prompt_targets:
                    return self._launch_extend(plan)
            return super().launch(plan, grammars)

    def apply(self, plan: StepPlan) -> None:
        """The plan's changes to the persistent rows, on the host and (sent by themselves) on the device."""
        self._join(plan)
        self._change_table(plan)

    def _launch_decode(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Launched | Drawing:
        started = time.perf_counter()
        n, changes = len(plan.rows), len(plan.table_rows)
        begin = self._mark()
        self._join(plan)
        if changes <= CHANGES:  # they travel with the step
            self._host_table[plan.table_rows, plan.table_columns] = plan.table_blocks
        else:
            self._change_table(plan)
            changes = 0
        size = self.max_rows
        sent = self._decode_input.array()
        sent[0], sent[1] = n, changes
        at = HEADER
        for part in (plan.rows, plan.starts, plan.token_ids):
            sent[at : at + n] = part
            at += size
        if changes:
            for part in (plan.table_rows, plan.table_columns, plan.table_blocks):
                sent[at : at + changes] = part
                at += CHANGES
        self._decode_input.send(at)
        bucket = self._decode_bucket[n]
        self._decode[bucket].replay()
        self.group.replayed(self.shard.num_layers, bucket)
        asked = self.sampler.asked(plan.rows)
        if asked & ~DRAWABLE:
            return self._sample_eagerly(plan, grammars, started, begin)
        return self._draw(bucket, asked, n, None, begin)

    def _launch_extend(self, plan: StepPlan) -> Drawing:
        n, tokens = len(plan.rows), plan.num_tokens
        bucket = next(t for t in self._extend_sizes if t >= tokens)
        begin = self._mark()
        self._change_table(plan)
        ends, seq_lens, token_rows, positions, slots = self.layout(plan)
        sent = self._extend_input.array()
        total = 4 * bucket + 5 * EXTEND_SEQUENCES
        sent[:total] = 0
        sent[:tokens] = plan.token_ids
        sent[bucket : bucket + tokens] = positions
        sent[2 * bucket : 2 * bucket + tokens] = slots
        sent[3 * bucket : 3 * bucket + tokens] = token_rows
        tail = sent[4 * bucket : total].reshape(5, EXTEND_SEQUENCES)
        tail[0, :n] = plan.rows
        tail[1, :n], tail[1, n:] = ends, tokens  # where each sequence ends; those of the padding are empty
        tail[2, :n] = seq_lens
        tail[3, :n] = ends - 1
        tail[4, :n] = np.where(plan.samples, seq_lens, 0)  # 0: draws nothing
        self._extend_input.send(total)
        self._extend[bucket].replay()
        self.group.replayed(self.shard.num_layers, bucket)
        return self._draw(EXTEND_SEQUENCES, self.sampler.asked(plan.rows), n, plan.samples, begin)

    def _draw(self, bucket: int, asked: int, n: int, samples: np.ndarray | None, begin: torch.cuda.Event) -> Drawing:
        """Replay the sampling graph that is enough for `asked`, and send what it drew on its way."""
        if asked:
            self._send_settings()
        form = 2 if asked & ~Wants.NOISE else 1 if asked else 0
        self._sample[bucket, form].replay()
        self.group.redrew(bucket, gathered=form > 1)
        slot = self._outcome_slot
        self._outcome_slot = (slot + 1) % RING
        self._outcome_host[slot][:n].copy_(self._outcome[:n], non_blocking=True)
        everything = samples is None or bool(samples.all())
        load = self._take_expert_load()
        return Drawing(
            n, self._outcome_arrays[slot][:n], None if everything else samples, begin, self._mark(), self.group.take(),
            load,
        )  # fmt: skip

    def _sample_eagerly(
        self, plan: StepPlan, grammars: Mapping[int, Grammar], started: float, begin: torch.cuda.Event
    ) -> Launched:
        """Rows with penalties, masks or logprobs: the decode graph's logits, then the sampler of
        engine/worker/sampler.py."""
        n = len(plan.rows)
        entries, positions = np.arange(n), plan.starts.astype(np.int64) + 1
        rows, lengths = self._rows[:n].long(), self._lengths[:n].long()
        inputs = Inputs(
            token_ids=self._tokens[:n], meta=None, samples=entries, rows=plan.rows,
            positions=positions, device_rows=rows, device_positions=lengths, sampled_hidden=None, prompt_hidden={},
        )  # fmt: skip
        drawn = self.sample(inputs, self.group.gather(self._logits[:n]).float(), grammars)
        self.last_token.index_copy_(0, rows, drawn.ids)
        return self._finish(plan, inputs, drawn, {}, started, begin)

    def _join(self, plan: StepPlan) -> None:
        """Sampling settings of the requests that begin with this plan, once."""
        if plan.joins and self._joined != plan.step:
            self._joined = plan.step
            for settings in plan.joins:
                self.sampler.set_row(settings)

    def _send_settings(self) -> None:
        """Bring the rows' sampling settings to where the graphs read them, if any has changed."""
        version = self.sampler.version
        if version == self._settings_version:
            return
        self._settings_version = version
        sent = self._settings_input.array()
        settings, keys, top_k = self.sampler.host_settings()
        cells, rows = self._settings.numel(), self.max_rows
        sent[:cells] = settings.reshape(-1).view(np.int32)
        sent[cells : cells + 2 * rows] = keys.reshape(-1)
        sent[cells + 2 * rows :] = top_k
        self._settings_input.send(len(sent))

    # ---- capture

    def _make_buffers(self) -> None:
        rows, device = self.max_rows, self.device
        self._decode_input = Staging(HEADER + 3 * rows + 3 * CHANGES, torch.int32, device)
        vocab, drawn = self.model_config.vocab_size, self._most_draws()
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.zeros(drawn, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(drawn, dtype=torch.int32, device=device)
        self._logits = torch.zeros(drawn, self.shard.vocab_size, dtype=self.dtype, device=device)
        self._settings_input = Staging(rows * (NUM_SETTINGS + 3), torch.int32, device)
        cells = rows * NUM_SETTINGS
        at = self._settings_input.target
        self._settings = at[:cells].view(torch.float32).view(rows, NUM_SETTINGS)
        self._keys, self._top_k = at[cells : cells + 2 * rows].view(rows, 2), at[cells + 2 * rows :]
        self._outcome = torch.zeros(drawn, dtype=torch.int64, device=device)
        self._outcome_host = [torch.zeros(drawn, dtype=torch.int64, pin_memory=True) for _ in range(RING)]
        self._outcome_arrays = [buffer.numpy() for buffer in self._outcome_host]
        self._scores = torch.zeros(drawn, dtype=torch.float32, device=device)
        self._sampling = SampleWorkspace(drawn, vocab, device)
        self._layers = DecodeLayers(self.model, self.attention, self.pool, self.block_table, self.group)
        worthwhile = max(64, self._launch_bound())
        limit = self.group.least(min(self.max_num_batched_tokens, self.max_model_len, worthwhile))
        self._extend_sizes = [t for t in EXTEND_TOKENS if t <= limit] if rows >= EXTEND_SEQUENCES else []
        largest = self._extend_sizes[-1] if self._extend_sizes else 0
        self._extend_input = Staging(4 * largest + 5 * EXTEND_SEQUENCES, torch.int64, device)

    def _launch_bound(self) -> int:
        """Steps of fewer tokens take the host longer to launch than the device to compute."""
        layer = self.model.nbytes_per_token / self.dtype.itemsize / self.model_config.num_layers
        return int(LAUNCH_SECONDS * MATMUL_RATE / (2 * layer))

    def _warm_up_forms(self, on_progress: Progress | None) -> None:
        """Steps of every form that has not been captured, so that nobody waits while one is compiled: the first prompt
        of each of seven sizes took a mixture of experts 0.3 to 1.3 s, where it takes 0.01 to 0.14."""
        most, experts = self.max_num_batched_tokens, self.model_config.experts
        sizes = {min(size, most) for size in WARM_UP_TOKENS}
        if experts is not None:
            sizes.update(forms(most, self.model_config.hidden_size, experts.count, experts.per_token))
        for done, tokens in enumerate(sorted(sizes)):
            if on_progress is not None:
                text = f"preparing steps of {tokens:,} tokens"
                on_progress({"stage": "forms", "done": done, "total": len(sizes), "text": text})
            self._warm_up(tokens)

    def _capture_all(self, on_progress: Progress | None) -> None:
        """Largest first: the smaller ones then live in the memory of the larger."""
        started = time.perf_counter()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)
        work = self._work()
        for done, (what, graphs, key, run) in enumerate(work):
            if on_progress is not None:
                text = f"capturing CUDA graphs: {what}"
                on_progress({"stage": "graphs", "done": done, "total": len(work), "text": text})
            graphs[key] = self._capture(run)
        self.group.take()  # what was spent on the way here belongs to no step
        torch.cuda.synchronize(self.device)
        self.graph_seconds = time.perf_counter() - started
        self.graph_bytes = torch.cuda.memory_reserved(self.device) - before
        self.num_graphs = len(work)
        note = f"{len(work)} CUDA graphs captured in {self.graph_seconds:.1f} s, {self.graph_bytes / 1e6:,.0f} MB"
        self.memory.notes.append(note)
        logger.info(note)

    def _work(self) -> list[Work]:
        """All that is to be captured, in that order."""
        sizes = ladder(self.max_rows)
        self._decode_bucket = {n: next(b for b in sizes if b >= n) for n in range(1, self.max_rows + 1)}
        work: list[Work] = []
        for t in reversed(self._extend_sizes):
            work.append((f"extend {t}", self._extend, t, partial(self._run_extend, t)))
        for n in reversed(sizes):
            work.append((f"decode {n}", self._decode, n, partial(self._run_decode, n)))
        return work + self._sampling_work(sizes)

    def _sampling_work(self, sizes: Iterable[int]) -> list[Work]:
        return [
            (f"sample {n}", self._sample, (n, form), partial(self._run_sample, n, form))
            for n in sorted(sizes, reverse=True)
            for form in range(3)
        ]

    def _most_draws(self) -> int:
        """As many tokens may be drawn in a step that is captured."""
        return max(self.max_rows, EXTEND_SEQUENCES)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes cuBLAS choose its own, which must not happen during capture
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        mode = "global" if self.group.size == 1 else "thread_local"  # NCCL's own thread asks about events meanwhile
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._stream, capture_error_mode=mode):
            run()
        return graph

    def _run_decode(self, n: int) -> None:
        prepare(
            self._decode_input.target, self.block_table, self.last_token, self._tokens, self._rows, self._lengths, n,
            self.max_rows, CHANGES,
        )  # fmt: skip
        live = self._decode_input.target[:1]
        self._layers.logits(self._tokens[:n], self._rows[:n], self._lengths[:n], live, self._logits[:n])

    def _run_extend(self, tokens: int) -> None:
        sent, n = self._extend_input.target, EXTEND_SEQUENCES
        ids, positions, slots, token_rows = sent[: 4 * tokens].view(4, tokens)
        rows, ends, seq_lens, logit_rows, draws = sent[4 * tokens : 4 * tokens + 5 * n].view(5, n)
        self._rows[:n].copy_(rows)
        self._lengths[:n].copy_(draws)
        bounds = torch.zeros(n + 1, dtype=torch.int32, device=self.device)
        bounds[1:].copy_(ends)
        used = (seq_lens > 0).sum(0, keepdim=True).to(torch.int32)
        meta = ForwardMeta(
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=bounds,
            seq_lens=seq_lens.to(torch.int32),
            block_table=self.block_table.index_select(0, rows),
            max_q_len=tokens,
            max_seq_len=self.max_model_len,
            num_decodes=0,
            logit_rows=logit_rows,
            live=bounds[n:],
            live_rows=used,
        )
        ids = torch.where(ids < 0, self.last_token.index_select(0, token_rows), ids)
        # Few of the sequences are there: programs are counted by tokens, not by what the graph has room for.
        tiles = -(-tokens * self.attention.group // BLOCK_M)
        self.attention.plan(meta, padded=True, splits=num_splits(tiles, self.shard.num_kv_heads))
        self._layers.logits_of_chunks(ids, meta, self._logits[:n])

    def _run_sample(self, n: int, form: int) -> None:
        rows, lengths, outcome, scores = self._rows[:n], self._lengths[:n], self._outcome[:n], self._scores[:n]
        first, end = self.group.piece
        apart = end > first and form < 2
        logits = self._logits[:n, : end - first] if apart else self.group.gather(self._logits[:n])
        draw(
            logits, rows, lengths, self._settings, self._top_k, self._keys, outcome, self.last_token, self._sampling,
            noisy=form > 0, truncated=form > 1, piece=(first, scores) if apart else None,
        )  # fmt: skip
        if apart:
            self.group.elect(scores, outcome, rows, lengths, self.last_token)

    def close(self) -> None:
        """Give the graphs back: collectives in them keep their group alive."""
        for graphs in (self._decode, self._extend, self._sample):
            graphs.clear()
        super().close()

    def _measure_blocks(self, per_block: int) -> int:
        blocks = super()._measure_blocks(per_block)
        return blocks if self.config.enforce_eager else max(1, blocks - -(-GRAPH_BYTES // per_block))


def ladder(most: int) -> list[int]:
    """Batch sizes captured, ascending, the largest `most`: padding costs least where a step is cheapest."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, most + 32, 32)]
    return sorted({min(size, most) for size in sizes if size <= most} | {most})
