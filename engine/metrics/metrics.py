"""Defines the metrics of /metrics. They have vLLM's names, so vLLM's dashboards also work for this server.

Metrics that vLLM does not have begin with "minitui_".

Most metrics are computed from the engine's records, so they include requests whose client has disconnected. answer.py
reports the generated tokens and, for each request, its n, its max_tokens and the length of its longest sample.

BlockTimes measures how long KV blocks stay in the cache.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby

from engine.info import EngineInfo
from engine.metrics.prometheus import Counter, Gauge, Histogram, Info, Metric, page
from engine.trace.kind import Reader, Record
from engine.trace.records import CLEARED
from engine.trace.state import State
from engine.trace.views import ACTIVE, CACHED, SHARED, RequestView
from engine.trace.waste import waste_of

LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
RESIDENCY = (*(m * 10**e for e in (-3, -2, -1, 0) for m in (1, 2, 5)), 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
SAMPLES = (1, 2, 5, 10, 20)
COMPUTED, FOUND = "local_compute", "local_cache_hit"
REASONS = ("stop", "length", "abort", "error")


class Metrics(Reader):
    """All metrics. `observe` updates them from the engine's records."""

    def __init__(self) -> None:
        self.running = Gauge("vllm:num_requests_running", "Requests in the running batch.")
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests waiting to be admitted.")
        self.waiting_for = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason: no room (capacity) or a paused engine (deferred).", "reason",
        )
        self.awake = Gauge("vllm:engine_sleep_state", "1 for the present state, else 0; absent without an engine.",
                           "sleep_state")
        self.usage = Gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that requests use, 0 to 1.")
        self.cached = Gauge("minitui_kv_cache_cached_ratio", "Share of KV blocks that are cached but unused, 0 to 1.")
        self.side_usage = Gauge(
            "minitui_side_cache_usage_ratio", "Share of a side group's pages or slots that requests use.", "group"
        )
        self.side_cached = Gauge(
            "minitui_side_cache_cached_ratio", "Share of a side group's pages or slots that are cached but unused.",
            "group",
        )
        self.unused = Gauge("minitui_kv_cache_unused_slots", "Slots of the requests' blocks that hold no token.")
        self.again = Gauge(
            "minitui_tokens_computed_again", "Tokens computed more than once since the engine began, by cause.", "cause"
        )
        self.cache_config = Info("vllm:cache_config_info", "The configuration of the KV cache.")
        self.old_usage = Gauge("vllm:gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.")
        self.old_queries = Counter("vllm:gpu_prefix_cache_queries_total", "Older name of prefix_cache_queries_total.")
        self.old_hits = Counter("vllm:gpu_prefix_cache_hits_total", "Older name of prefix_cache_hits_total.")
        self.swapped = Gauge("vllm:num_requests_swapped", "0: requests are never swapped to the host's memory.")
        self.lora = Info("vllm:lora_requests_info", "The LoRA adapters in use: none.")
        self.lora.set(max_lora=0, running_lora_adapters="", waiting_lora_adapters="")
        self.preemptions = Counter(
            "vllm:num_preemptions_total", "Requests put back into the queue, for lack of blocks or after a failed step."
        )
        self.queries = Counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
        self.hits = Counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.prompt_tokens = Counter("vllm:prompt_tokens_total", "Prompt tokens of requests that generated a token.")
        self.prompt_cached = Counter("vllm:prompt_tokens_cached_total", "Prompt tokens taken from the prefix cache.")
        self.sources = Counter(
            "vllm:prompt_tokens_by_source_total", "Prompt tokens by the source of their KV.", "source",
            (COMPUTED, FOUND),
        )
        self.generated = Counter("vllm:generation_tokens_total", "Generated tokens.")
        self.drafts = Counter("vllm:spec_decode_num_drafts_total", "Drafts verified; at most one per request and step.")
        self.draft_tokens = Counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified.")
        self.accepted_tokens = Counter("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens accepted.")
        self.accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens accepted, by position in the draft.",
            "position",
        )
        self.success = Counter(
            "vllm:request_success_total", "Requests that finished, by reason.", "finished_reason", REASONS
        )
        self.refused = Counter(
            "minitui_requests_refused_total", "HTTP answers with a status of 400 and above, by status.", "status",
            ("400", "429", "503"),
        )
        self.lost = Counter("minitui_records_lost_total", "Engine records lost because they came too fast.")
        self.restarts = Counter("minitui_engine_restarts_total", "Restarts of the engine process.")
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "Seconds until the first token.", LATENCY)
        self.tpot = Histogram(
            "vllm:time_per_output_token_seconds", "Mean seconds between tokens of a request.", PER_TOKEN
        )
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean seconds between tokens of a request.", PER_TOKEN
        )
        self.inter_token = Histogram("vllm:inter_token_latency_seconds", "Seconds between two tokens.", PER_TOKEN)
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "Seconds from submission to the end.", LATENCY)
        self.queued = Histogram("vllm:request_queue_time_seconds", "Seconds from submission to admission.", LATENCY)
        self.prefill = Histogram("vllm:request_prefill_time_seconds", "Seconds of a request's prefill.", LATENCY)
        self.decode = Histogram("vllm:request_decode_time_seconds", "Seconds of a request's decode.", LATENCY)
        self.inference = Histogram("vllm:request_inference_time_seconds", "Seconds from admission to the end.", LATENCY)
        self.request_prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_output = Histogram("vllm:request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.request_computed = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not in the cache.", TOKENS
        )
        self.request_longest = Histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of the longest sample of a request.", TOKENS
        )
        self.params_n = Histogram("vllm:request_params_n", "The n of a request.", SAMPLES)
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", "The max_tokens of a request.", TOKENS)
        self.iteration = Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", TOKENS)
        self.block_lifetime = Histogram(
            "vllm:kv_block_lifetime_seconds", "Seconds from a KV block's allocation to its eviction.", RESIDENCY
        )
        self.block_idle = Histogram(
            "vllm:kv_block_idle_before_evict_seconds",
            "Seconds from the end of the last request that held a KV block to the block's eviction.", RESIDENCY,
        )
        self.block_reuse_gap = Histogram(
            "vllm:kv_block_reuse_gap_seconds", "Seconds between two requests' uses of a cached KV block.", RESIDENCY
        )
        self._block_times = BlockTimes(self.block_lifetime, self.block_idle, self.block_reuse_gap)
        self._first_at: dict[int, float] = {}
        self._resumed: set[int] = set()  # preempted requests: their cache hits on resumption are not counted

    def engine_began(self, info: EngineInfo) -> None:
        """Forget the requests of the previous engine, and describe the KV cache of the new one."""
        self._first_at.clear()
        self._resumed.clear()
        self._block_times.forget()
        self.cache_config.set(
            block_size=info.block_size or None, num_gpu_blocks=info.num_blocks or None,
            enable_prefix_caching=info.prefix_caching,
        )

    def records_lost(self) -> None:
        """Forget the times of the blocks: lost records may have evicted and allocated blocks."""
        self._block_times.forget()

    def refusal(self, status: int) -> None:
        self.refused.add(label_value=str(status))

    def ended(self, samples: int, max_tokens: int | None, longest: int) -> None:
        """Count a request that has ended. `longest`: the number of tokens in its longest sample."""
        self.params_n.observe(samples)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)
        self.request_longest.observe(longest)

    def observe(self, record: Record, state: State) -> None:
        """Count one record; `state` is the state before the record."""
        self._state = state
        self._block_times.observe(record, state)
        self.read(record)

    def on_step(self, tokens: int) -> None:
        self.iteration.observe(tokens)

    def on_match(self, request: int, tokens: int) -> None:
        if request not in self._resumed:
            self.hits.add(tokens)
            self.old_hits.add(tokens)

    def on_admit(self, request: int) -> None:
        if request not in self._resumed:
            self.queries.add(self._state.requests[request].prompt_tokens)
            self.old_queries.add(self._state.requests[request].prompt_tokens)

    def on_accept(self, drafts: list[tuple[int, int, int]]) -> None:
        for _, drafted, accepted in drafts:
            self.drafts.add()
            self.draft_tokens.add(drafted)
            self.accepted_tokens.add(accepted)
            for place in range(accepted):
                self.accepted_at.add(label_value=str(place))

    def on_first(self, t: float, request: int, queue_ms: float, prefill_ms: float) -> None:
        self.ttft.observe((queue_ms + prefill_ms) / 1e3)
        self.queued.observe(queue_ms / 1e3)
        self.prefill.observe(prefill_ms / 1e3)
        view = self._state.requests.get(request)
        if view is not None:  # None if the request ended with its first token
            self._first_at[request] = t
            self._prompt_done(view)

    def on_preempt(self, request: int) -> None:
        self.preemptions.add()
        self._resumed.add(request)

    on_requeue = on_preempt

    def on_finish(self, t: float, request: int, reason: str, output_tokens: int) -> None:
        view = self._state.requests[request]
        self.success.add(label_value="error" if reason.startswith("error") else reason)
        self.request_prompt.observe(view.prompt_tokens)
        self.request_output.observe(output_tokens)
        if view.submitted:  # 0 if the request was submitted before the first snapshot
            self.e2e.observe(t - view.submitted)
        self._resumed.discard(request)
        first = self._first_at.pop(request, None)
        if output_tokens and view.admitted:
            self.inference.observe(t - view.admitted)
        if first is None:
            if output_tokens:
                self._prompt_done(view)
        else:
            self.decode.observe(t - first)
            if output_tokens > 1:
                between = (t - first) / (output_tokens - 1)
                self.tpot.observe(between)
                self.per_token.observe(between)
                self.inter_token.observe(between, output_tokens - 1)

    def _prompt_done(self, request: RequestView) -> None:
        """Count a prompt when its request gets the first token: by then, all of the prompt has been computed."""
        found = request.cached_tokens
        self.prompt_tokens.add(request.prompt_tokens)
        self.prompt_cached.add(found)
        self.sources.add(found, FOUND)
        self.sources.add(request.prompt_tokens - found, COMPUTED)
        self.request_computed.observe(request.prompt_tokens - found)

    def measure(self, state: State | None) -> None:
        """Set the gauges from the state. Without an engine, `state` is None, and the gauges are reset."""
        if state is None:
            for gauge in vars(self).values():
                if isinstance(gauge, Gauge):
                    gauge.reset()
            return
        waiting = len(state.queue)
        self.running.set(len(state.requests) - waiting)
        self.waiting.set(waiting)
        held = state.gate != "open"
        self.waiting_for.set(0 if held else waiting, "capacity")
        self.waiting_for.set(waiting if held else 0, "deferred")
        for name in ("awake", "weights_offloaded", "discard_all"):  # minitui is never in the last two states
            self.awake.set(name == "awake", name)
        total = max(1, state.num_blocks - 1)
        for gauge in (self.usage, self.old_usage):
            gauge.set((state.counts[ACTIVE] + state.counts[SHARED]) / total)
        self.cached.set(state.counts[CACHED] / total)
        for pool in state.groups:
            _, active, shared, cached = pool.counts
            self.side_usage.set((active + shared) / pool.total, pool.group.name)
            self.side_cached.set(cached / pool.total, pool.group.name)
        waste = waste_of(state)
        self.unused.set(waste.unused_slots)
        for cause, tokens in asdict(waste.again).items() if waste.again is not None else ():
            self.again.set(tokens, cause)

    def page(self, model: str) -> str:
        metrics = [value for value in vars(self).values() if isinstance(value, Metric)]
        return page(metrics, (("model_name", model), ("engine", "0")))


class BlockTimes(Reader):
    """The times of each block's allocation, of its last use and of its last release; NaN if unknown.

    `lifetime` and `idle` get a value for each block that is evicted for lack of room, `reuse_gap` for each block that a
    request takes from the cache. vLLM measures a sample of the blocks; here, all are measured. vLLM counts a block as
    idle from its last use on; here, a block is idle only while no request holds it.
    """

    def __init__(self, lifetime: Histogram, idle: Histogram, reuse_gap: Histogram) -> None:
        self._lifetime, self._idle, self._reuse_gap = lifetime, idle, reuse_gap
        self.forget()

    def forget(self) -> None:
        """Forget all times: records were lost, or a new engine began."""
        self._allocated, self._used, self._released = array("d"), array("d"), array("d")

    def observe(self, record: Record, state: State) -> None:
        """Note the times of a record; `state` is the state before the record."""
        self._state = state
        if not self._allocated:
            for times in (self._allocated, self._used, self._released):
                times.extend([math.nan] * state.num_blocks)
        self.read(record)

    def on_alloc(self, t: float, blocks: list[int]) -> None:
        for block in blocks:
            self._allocated[block] = self._used[block] = t

    def on_hold(self, t: float, request: int, node: int) -> None:
        held = self._state.requests[request].node
        for view in self._state.path(node):
            if view.id == held:
                break  # the request holds this node and its ancestors already
            _count(self._reuse_gap, self._used, view.blocks, t)
            for block in view.blocks:
                self._used[block] = t

    def on_finish(self, t: float, request: int) -> None:
        for block in self._state.requests[request].table:
            self._released[block] = t

    on_preempt = on_requeue = on_finish

    def on_evict(self, t: float, node: int, blocks: int, reason: str) -> None:
        if reason != CLEARED:
            evicted = self._state.nodes[node].blocks[-blocks:]
            _count(self._lifetime, self._allocated, evicted, t)
            _count(self._idle, self._released, evicted, t)


def _count(histogram: Histogram, times: array[float], blocks: Iterable[int], t: float) -> None:
    """Count the time from each block's known `times` until `t`. Neighbours often have the same time: one addition."""
    for began, same in groupby(times[block] for block in blocks):
        if not math.isnan(began):
            histogram.observe(t - began, sum(1 for _ in same))
