"""How a server is: its Prometheus page, asked for again and again, and what it tells under the names of several makers.

What a server does not tell is None, never zero. A server that cannot be reached is asked more and more seldom.
"""

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
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # between two tries to reach a server that is away
PATIENCE_S = 6.0  # for an answer; a server that takes longer counts as away
MAX_PAGE = 4 << 20
KEPT = 120  # vitals
NOTHING = "its /metrics has no name that is known here"


@dataclass
class Vitals:
    """What a server tells of itself; None is unknown. Shares are from 0 to 1, counters since its start."""

    running: float | None = None
    waiting: float | None = None
    cache_use: float | None = None
    hit_rate: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    tokens_per_s: float | None = None
    ttft_mean_s: float | None = None

    def describe(self) -> str:
        """One line for people."""

        def share(value: float | None) -> str:
            return "unknown" if value is None else f"{value:.0%}"

        def count(value: float | None) -> str:
            return "unknown" if value is None else f"{value:,.0f}"

        first = "unknown" if self.ttft_mean_s is None else duration(self.ttft_mean_s * 1e3)
        return (
            f"running {count(self.running)}  waiting {count(self.waiting)}  KV in use {share(self.cache_use)}  "
            f"prefix hits {share(self.hit_rate)}  {count(self.tokens_per_s)} tok/s  first token {first}"
        )


# The names under which servers tell the same: vLLM's (old and new), SGLang's.
NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "cache_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "hit_rate": ("sglang:cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "tokens_per_s": ("sglang:gen_throughput", "vllm:avg_generation_throughput_toks_per_s"),
}
AVERAGED = {"cache_use", "hit_rate"}  # over several engines of one server; the others add up
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
ONE_ENGINE = {"tp_rank", "pp_rank", "moe_ep_rank"}  # SGLang's ranks of one engine each tell what all of them do
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_samples(text: str) -> dict[str, list[float]]:
    """The values under each of the names WANTED, one for each engine."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if not found or found[1] not in WANTED:
            continue
        labels = dict(_LABEL.findall(found[2] or ""))
        if labels.get("priority"):
            continue  # SGLang repeats its requests by priority; all of them stand under an empty one
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):  # a server that knows nothing yet says NaN
            engine = tuple(sorted((name, of) for name, of in labels.items() if name not in ONE_ENGINE))
            of_name = samples.setdefault(found[1], {})
            of_name[engine] = max(value, of_name.get(engine, value))
    return {name: list(values.values()) for name, values in samples.items()}


def read_page(text: str, before: Vitals | None = None, seconds: float = 0.0) -> Vitals:
    """Vitals of a Prometheus page. With those of `seconds` before, the rate of tokens since."""
    samples = read_samples(text)
    vitals = Vitals()
    for field, names in NAMES.items():
        for name in names:
            if name in samples:
                values = samples[name]
                setattr(vitals, field, sum(values) / (len(values) if field in AVERAGED else 1))
                break
    for hits, queries in HITS:
        if hits in samples and sum(samples.get(queries, ())) > 0:
            vitals.hit_rate = sum(samples[hits]) / sum(samples[queries])
            break
    for name in FIRST:
        if sum(samples.get(f"{name}_count", ())) > 0:
            vitals.ttft_mean_s = sum(samples[f"{name}_sum"]) / sum(samples[f"{name}_count"])
            break
    drawn, drawn_before = vitals.output_tokens, before.output_tokens if before is not None else None
    if vitals.tokens_per_s is None and drawn is not None and drawn_before is not None and seconds > 0:
        vitals.tokens_per_s = max(0.0, (drawn - drawn_before) / seconds)
    return vitals


class Pulse:
    """Asks one server how it is. `vitals`: what its page told last; `trouble`: a sentence while it cannot be used."""

    def __init__(self, http: httpx.AsyncClient, ready: str = "") -> None:
        """`ready`: a path that answers 503 while the server takes no requests, if it has one."""
        self.vitals = Vitals()
        self.history: deque[Vitals] = deque(maxlen=KEPT)  # one for each time that it was asked
        self.trouble = ""
        self.mute = ""  # a sentence if its page tells nothing
        self.again_at = 0.0  # when it is asked again, of time.monotonic
        self.away = asyncio.Event()  # set while it does not answer
        self.beats = 0  # times that it has answered
        self.on_return: Callable[[], None] = lambda: None  # called when it answers again after it was away
        self._http, self._ready = http, ready
        self._seen = time.monotonic()
        self._failures = 0
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.ask()
            self.history.append(self.vitals)
            wait = POLL_S
            if self._failures:
                wait = BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1] * random.uniform(0.8, 1.2)
            self.again_at = time.monotonic() + wait
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._hurry.wait()

    def doubt(self, reason: str) -> None:
        """A request has just found it away: it is, until it answers. It is asked at once."""
        self.trouble, self.vitals = reason, Vitals()
        self.away.set()
        self._hurry.set()

    async def ask(self) -> None:
        """Once; sets `vitals` and `trouble`."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                trouble = await self._not_ready()
                page = await self._http.get("/metrics")
        except (httpx.HTTPError, OSError) as error:
            slow = isinstance(error, TimeoutError)
            self.trouble = f"it does not answer within {PATIENCE_S:g} s" if slow else reason_of(error)
            self.vitals = Vitals()
            self._failures += 1
            self.away.set()
            return
        was_away, now = bool(self._failures), time.monotonic()
        usable = page.status_code == 200 and len(page.content) < MAX_PAGE
        self.vitals = read_page(page.text, self.vitals, now - self._seen) if usable else Vitals()
        self.mute = "" if self.vitals != Vitals() else NOTHING if usable else f"its /metrics answers {page.status_code}"
        self._seen, self._failures = now, 0
        self.trouble = trouble
        self.away.clear()
        self.beats += 1
        if was_away:
            self.on_return()

    async def _not_ready(self) -> str:
        """Why it takes no requests; empty if it does, or does not tell."""
        if not self._ready:
            return ""
        response = await self._http.get(self._ready)
        if response.status_code != 503:
            return ""
        try:
            return str(load_json(response.content)["status"])[:400]
        except (EngineError, KeyError, TypeError):
            return "not ready"
