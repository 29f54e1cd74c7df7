"""Polls the Prometheus page of a server, and reads the server's state from it. The pages of vLLM, SGLang and minitui
are understood. A value that the page lacks is None, never zero. A server that cannot be reached is polled at growing
intervals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineError
from minitui.sources.http import httpx, load_json, reason_of
from minitui.text import duration

POLL_S = 2.0
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between attempts to reach an unreachable server
PATIENCE_S = 6.0  # seconds; a server that takes longer to answer counts as unreachable
MAX_PAGE = 4 << 20
KEPT = 120  # polls in the history
NO_KNOWN_NAME = "its /metrics page has no metric that minitui knows"


@dataclass
class ServerMetrics:
    """The values of one page; None: unknown. Shares range from 0 to 1; token counts begin at the server's start."""

    running: float | None = None
    waiting: float | None = None
    cache_use: float | None = None
    hit_rate: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    tokens_per_s: float | None = None
    ttft_mean_s: float | None = None

    def describe(self) -> str:
        """Returns the metrics as one line of text."""

        def share(value: float | None) -> str:
            return "unknown" if value is None else f"{value:.0%}"

        def count(value: float | None) -> str:
            return "unknown" if value is None else f"{value:,.0f}"

        first = "unknown" if self.ttft_mean_s is None else duration(self.ttft_mean_s * 1e3)
        return (
            f"running {count(self.running)}  waiting {count(self.waiting)}  KV in use {share(self.cache_use)}  "
            f"prefix hits {share(self.hit_rate)}  {count(self.tokens_per_s)} tok/s  first token {first}"
        )


# The names of each value: vLLM's (new and old) and SGLang's.
NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "cache_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "hit_rate": ("sglang:cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "tokens_per_s": ("sglang:gen_throughput", "vllm:avg_generation_throughput_toks_per_s"),
}
AVERAGED = {"cache_use", "hit_rate"}  # the mean over the engines of a server; other values are added up
HITS = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)
FIRST = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
WANTED = (
    {name for names in NAMES.values() for name in names}
    | {name for pair in HITS for name in pair}
    | {f"{name}_{part}" for name in FIRST for part in ("sum", "count")}
)
RANKS = {"tp_rank", "pp_rank", "moe_ep_rank"}  # SGLang labels: each rank of an engine reports the engine's values
REPEATED = {"sglang:num_running_reqs", "sglang:num_queue_reqs"}  # a total, and a line for each priority
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')


def read_samples(text: str, engine: int | None = None) -> dict[str, list[float]]:
    """Returns the values of each name in WANTED, one for each engine. Lines that cannot be read are skipped. `engine`:
    only this data parallel rank of vLLM; None: all of them."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if not found or found[1] not in WANTED:
            continue
        labels = dict(_LABEL.findall(found[2] or ""))
        if labels.get("priority") and found[1] in REPEATED:
            continue  # the line of the total has an empty priority
        if engine is not None and labels.get("engine") != str(engine):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):  # NaN: the server has no value yet
            source = tuple(sorted((label, text) for label, text in labels.items() if label not in RANKS))
            by_engine = samples.setdefault(found[1], {})
            by_engine[source] = max(value, by_engine.get(source, value))
    return {name: list(values.values()) for name, values in samples.items()}


def read_page(
    text: str, before: ServerMetrics | None = None, seconds: float = 0.0, engine: int | None = None
) -> ServerMetrics:
    """Returns the metrics of a Prometheus page. `engine`: see `read_samples`. If the page lacks tokens_per_s, the rate
    is computed from `before`, the metrics of `seconds` earlier."""
    samples = read_samples(text, engine)
    metrics = ServerMetrics()
    for field, names in NAMES.items():
        for name in names:
            if name in samples:
                values = samples[name]
                setattr(metrics, field, sum(values) / (len(values) if field in AVERAGED else 1))
                break
    for hits, queries in HITS:
        if hits in samples and sum(samples.get(queries, ())) > 0:
            metrics.hit_rate = sum(samples[hits]) / sum(samples[queries])
            break
    for name in FIRST:
        if sum(samples.get(f"{name}_count", ())) > 0:
            metrics.ttft_mean_s = sum(samples[f"{name}_sum"]) / sum(samples[f"{name}_count"])
            break
    tokens, tokens_before = metrics.output_tokens, before.output_tokens if before is not None else None
    if metrics.tokens_per_s is None and tokens is not None and tokens_before is not None and seconds > 0:
        metrics.tokens_per_s = max(0.0, (tokens - tokens_before) / seconds)
    return metrics


def trouble_of(error: Exception) -> str:
    """Returns in a few words why a server did not answer."""
    return f"it does not answer within {PATIENCE_S:g} s" if isinstance(error, TimeoutError) else reason_of(error)


def wait_after(failures: int) -> float:
    """Returns the seconds until the next attempt, after this many failed attempts in a row."""
    return BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] * random.uniform(0.8, 1.2)


class MetricsPoller:
    """Polls one server. `metrics`: the last page's values; `trouble`: why the server is unusable; empty if usable."""

    def __init__(self, http: httpx.AsyncClient, ready: str = "", engine: int | None = None) -> None:
        """`ready`: a path that answers 503 while the server takes no requests; empty: there is no such path. `engine`:
        read the values of this data parallel rank of vLLM; None: of the whole server."""
        self.metrics = ServerMetrics()
        self.history: deque[ServerMetrics] = deque(maxlen=KEPT)  # one for each poll
        self.trouble = ""
        self.no_metrics = ""  # why the page has no known metrics, as a sentence; empty if it has some
        self.retry_at = 0.0  # the time of the next poll, as time.monotonic()
        self.unreachable = asyncio.Event()  # set while the server does not answer
        self.answers = 0  # polls that were answered
        self.on_return: Callable[[], None] = lambda: None  # called when the server answers again
        self.engine = engine
        self._http, self._ready = http, ready
        self._answered_at = time.monotonic()
        self._failures = 0
        self._poll_now = asyncio.Event()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.ask()
            self.history.append(self.metrics)
            wait = wait_after(self._failures) if self._failures else POLL_S
            self.retry_at = time.monotonic() + wait
            self._poll_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._poll_now.wait()

    def report_failure(self, reason: str) -> None:
        """Poll at once, because a request did not reach the server. `unreachable` is set until a poll is answered."""
        self.trouble, self.metrics = reason, ServerMetrics()
        self.unreachable.set()
        self._poll_now.set()

    async def ask(self) -> None:
        """Poll once, and set `metrics` and `trouble`."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                trouble = await self._not_ready()
                page = await self._http.get("/metrics")
        except (httpx.HTTPError, OSError) as error:
            self.trouble = trouble_of(error)
            self.metrics = ServerMetrics()
            self._failures += 1
            self.unreachable.set()
            return
        was_unreachable, now = bool(self._failures), time.monotonic()
        usable = page.status_code == 200 and len(page.content) < MAX_PAGE
        seconds = now - self._answered_at
        self.metrics = read_page(page.text, self.metrics, seconds, self.engine) if usable else ServerMetrics()
        if self.metrics != ServerMetrics():
            self.no_metrics = ""
        else:
            self.no_metrics = NO_KNOWN_NAME if usable else f"its /metrics answers {page.status_code}"
        self._answered_at, self._failures = now, 0
        self.trouble = trouble
        self.unreachable.clear()
        self.answers += 1
        if was_unreachable:
            self.on_return()

    async def _not_ready(self) -> str:
        """Returns why the server takes no requests; empty if it takes them or if `ready` is empty."""
        if not self._ready:
            return ""
        response = await self._http.get(self._ready)
        if response.status_code != 503:
            return ""
        try:
            return str(load_json(response.content)["status"])[:400]
        except (EngineError, KeyError, TypeError):
            return "not ready"
