"""`minitui bench --url`: plans a run, sends each request at its time, measures the answers and prints the report."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from engine.errors import EngineDead, EngineError, InvalidRequest
from minitui.visible import json_text

TEXT_FIELDS = ("content", "reasoning_content", "tool_calls")  # fields of a chat delta that count as text
PERCENTILES = (50, 90, 99)
WORDS = (
    "block", "cache", "token", "prefix", "tree", "queue", "batch", "step", "prompt", "answer", "page", "table",
    "decode", "prefill", "head", "layer", "request", "share", "evict", "admit", "stream", "model", "weight", "draw",
)  # fmt: skip
MOONCAKE_BLOCK = 512  # tokens for each hash id
HELP = """Measure an OpenAI-compatible server under load.

\b
  minitui bench --url http://127.0.0.1:8000 --rate 8 --requests 200    Poisson arrivals
  minitui bench --url ... --shared-words 400 --groups 4                four shared system prompts
  minitui bench --url ... --trace day.jsonl --speed 2                  replay a trace twice as fast

Each request is sent at its planned time, even if earlier requests are still running (open loop). So the queue of a slow
server grows, as with real users.

A trace is a JSONL file with one request per line. A line is an object with "t" (seconds), optionally "max_tokens", and
the text: "prompt", "messages" or "words" (a number of random words). Random words can follow a prefix that several
requests share: "prefix" is its name, "prefix_words" its length. Mooncake traces work too. Their lines have "timestamp"
(ms), "input_length", "output_length" and "hash_ids", one id for each 512 tokens; equal ids get equal text.
"""
async def measure(options: LoadOptions) -> dict[str, Any]:
    """Plans and sends the requests; returns the figures. Raises EngineError if the run cannot start."""
    from minitui.sources.http import normalise

    url = normalise(options.url)
    model = options.model or await first_model(url, options.key)
    if options.trace is not None:
        try:
            lines = options.trace.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may contain U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{options.trace} cannot be read: {error}", "trace") from error
        plan = replay(lines, options, model)
    else:
        plan = poisson(options, model)
    outcomes = await run_load(url, options.key, plan, options.timeout, None if options.json else sys.stderr)
    limits = Limits(options.ttft_ms, options.tpot_ms, options.e2e_ms)
    return {"url": url, "model": model, "rate": options.rate, **summarise(outcomes, limits)}


async def first_model(url: str, key: str) -> str:
    """Returns the first model that the server lists."""
    from minitui.sources.http import check, httpx, load_json, open_client, unreachable

    async with open_client(url, key) as client:
        try:
            listed = load_json((await check(await client.get("/v1/models"))).content)
            return str(listed["data"][0]["id"])
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(url, error) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{url}/v1/models lists no model: choose one with --model") from error


def load(options: LoadOptions) -> None:
    """Sends the requests and prints the report."""
    for name in ("rate", "speed", "timeout"):
        if not getattr(options, name) > 0:
            raise InvalidRequest(f"--{name} is {getattr(options, name)}: it must be above 0", name)
    figures = asyncio.run(measure(options))
    if options.json:
        print(json_text({**figures, "rate": str(figures["rate"])}, indent=2))
    else:
        print("\n".join(report(figures)))


@dataclass(kw_only=True)
class LoadOptions:
    """The options of `minitui bench --url`."""

    url: Annotated[str, typer.Option(help="Address of the server: http://127.0.0.1:8000.")]
    key: Annotated[str, typer.Option(help="The server's API key.", envvar="MINITUI_KEY")] = ""
    model: Annotated[str, typer.Option(help="Model to use. Default: the first model that the server lists.")] = ""
    rate: Annotated[float, typer.Option(help="Average requests per second; inf: all at once.")] = 4.0
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100
    prompt_words: Annotated[int, typer.Option(help="Random words in each prompt.")] = 40
    shared_words: Annotated[
        int, typer.Option(help="Words before the random words; all requests of a group share them.")
    ] = 0
    groups: Annotated[int, typer.Option(help="Number of groups of requests.")] = 1
    output_tokens: Annotated[int, typer.Option(help="max_tokens of each request.")] = 64
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: the same answers each time.")] = 0.0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Make every answer max_tokens long; vLLM and minitui support this.")
    ] = False
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions instead of /v1/completions.")] = False
    trace: Annotated[Path | None, typer.Option(help="Replay this JSONL file instead of random requests.")] = None
    speed: Annotated[float, typer.Option(help="With --trace: replay this many times as fast.")] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of arrival times and random words.")] = 0
    timeout: Annotated[float, typer.Option(help="Abort a request after this many seconds without data.")] = 600.0
    ttft_ms: Annotated[float | None, typer.Option(help="Goodput: limit of the time to the first token, in ms.")] = None
    tpot_ms: Annotated[float | None, typer.Option(help="Goodput: limit of the time per output token, in ms.")] = None
    e2e_ms: Annotated[float | None, typer.Option(help="Goodput: limit of the time of the whole answer, in ms.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


@dataclass
class Planned:
    """A request, to be sent `at` seconds after the start. `chat`: send it to /v1/chat/completions."""

    at: float
    body: dict[str, Any]
    chat: bool


def words(count: int, source: random.Random) -> str:
    """Returns `count` random words."""
    return " ".join(source.choices(WORDS, k=count))


def poisson(options: LoadOptions, model: str) -> list[Planned]:
    """Returns random requests. The gaps between their planned times are exponentially distributed."""
    source = random.Random(options.seed)
    prefixes = [words(options.shared_words, source) for _ in range(max(1, options.groups))]
    at, plan = 0.0, []
    for _ in range(options.requests):
        text = f"{source.choice(prefixes)} {words(options.prompt_words, source)}".strip()
        plan.append(_planned(at, {"prompt": text, "max_tokens": options.output_tokens}, options, model))
        if math.isfinite(options.rate):
            at += source.expovariate(options.rate)
    return plan


def replay(lines: Iterable[str], options: LoadOptions, model: str) -> list[Planned]:
    """Returns the requests of a trace. Raises InvalidRequest, with the line number, for an invalid line."""
    source = random.Random(options.seed)
    prefixes: dict[str, str] = {}
    plan = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "hash_ids" in entry:
                entry = _of_mooncake(entry, options.seed)
            at = float(entry["t"]) / options.speed
            if "prompt" not in entry and "messages" not in entry:
                prefix = str(entry.get("prefix", ""))
                if prefix and prefix not in prefixes:
                    length = int(entry.get("prefix_words", 64))
                    prefixes[prefix] = words(length, random.Random(f"{options.seed} {prefix}"))
                entry["prompt"] = f"{prefixes.get(prefix, '')} {words(int(entry['words']), source)}".strip()
            body = {key: entry[key] for key in ("prompt", "messages") if key in entry}
            body["max_tokens"] = int(entry.get("max_tokens", options.output_tokens))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{options.trace}, line {number}: {type(error).__name__} {error}; a line must be a JSON object with t "
                "and one of prompt, messages and words; or with timestamp, input_length, output_length and hash_ids",
                "trace",
            ) from error  # fmt: skip
        plan.append(_planned(at, body, options, model))
    if not plan:
        raise InvalidRequest(f"{options.trace} contains no requests", "trace")
    return sorted(plan, key=lambda planned: planned.at)


def _of_mooncake(entry: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns a line of a Mooncake trace in our format. Equal ids give equal text, with one word for each token."""
    blocks = [words(MOONCAKE_BLOCK, random.Random(f"{seed} {block}")) for block in entry["hash_ids"]]
    text = " ".join(" ".join(blocks).split()[: int(entry["input_length"])])
    return {"t": float(entry["timestamp"]) / 1e3, "prompt": text, "max_tokens": int(entry["output_length"])}


def _planned(at: float, body: dict[str, Any], options: LoadOptions, model: str) -> Planned:
    chat = options.chat or "messages" in body
    if chat and "prompt" in body:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    body |= {"model": model, "stream": True, "temperature": options.temperature}
    body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    return Planned(at, body, chat)


@dataclass
class Outcome:
    """The result of a request.

    `sent`: seconds after the start. `first` and `total`: seconds after `sent`. `error`: empty for an answered request.
    """

    sent: float
    first: float = 0.0
    total: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    error: str = ""
    detail: str = ""

    @property
    def per_token(self) -> float | None:
        """Average seconds between two tokens; None for answers of one token."""
        return (self.total - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass
class Limits:
    """Latency limits in milliseconds; None: no limit. A request within all limits counts for goodput."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        """Returns True if the request was answered within the limits."""
        pairs = ((self.ttft_ms, outcome.first), (self.tpot_ms, outcome.per_token or 0.0), (self.e2e_ms, outcome.total))
        return not outcome.error and all(limit is None or value * 1e3 <= limit for limit, value in pairs)


def summarise(outcomes: Sequence[Outcome], limits: Limits) -> dict[str, Any]:
    """Returns the figures of a run; latencies are in milliseconds."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    seconds = max((outcome.sent + outcome.total for outcome in outcomes), default=0.0)
    good = sum(limits.kept(outcome) for outcome in outcomes)
    per_token = [value for outcome in answered if (value := outcome.per_token) is not None]
    prompt = sum(outcome.prompt_tokens for outcome in answered)
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "not_answered": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "example_of_an_error": next((outcome.detail for outcome in outcomes if outcome.detail), ""),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(answered) / seconds, 3) if seconds else 0.0,
        "goodput_per_s": round(good / seconds, 3) if seconds else 0.0,
        "limits": {name: limit for name, limit in vars(limits).items() if limit is not None},
        "within_limits": good,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": sum(outcome.output_tokens for outcome in answered),
        "output_tokens_per_s": round(sum(o.output_tokens for o in answered) / seconds, 1) if seconds else 0.0,
        "ttft_ms": spread([outcome.first for outcome in answered]),
        "tpot_ms": spread(per_token),
        "e2e_ms": spread([outcome.total for outcome in answered]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns mean, percentiles and maximum in milliseconds; None if there are no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    levels = {f"p{p}": ordered[min(len(ordered) - 1, math.ceil(len(ordered) * p / 100) - 1)] for p in PERCENTILES}
    values = {"mean": sum(ordered) / len(ordered), **levels, "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in values.items()}


def report(figures: dict[str, Any]) -> list[str]:
    """Returns the figures as lines of text."""
    limits = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in figures["limits"].items())
    good = f"{figures['goodput_per_s']:.2f} within the limits ({limits}), " if limits else ""
    missed = ", ".join(f"{count} {error}" for error, count in figures["not_answered"].items())
    found, prompt = figures["cached_tokens"], figures["prompt_tokens"]
    cached = "cache use unknown" if found is None else f"{found / max(1, prompt):.0%} of prompt tokens from the cache"
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered in {figures['seconds']:.1f} s"
        + (f"; {missed}" if missed else ""),
        f"{figures['requests_per_s']:.2f} requests/s, {good}"
        f"{figures['output_tokens_per_s']:,.0f} output tokens/s, {cached}",
    ]
    if figures["example_of_an_error"]:
        lines.append(f"example of an error: {figures['example_of_an_error']}")
    lines.append(f"{'ms':24}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES) + f"{'max':>10}")
    for key, name in (("ttft_ms", "first token"), ("tpot_ms", "per output token"), ("e2e_ms", "end to end")):
        values = figures[key]
        lines.append(f"{name:24}" + ("".join(f"{v:10,.1f}" for v in values.values()) if values else f"{'unknown':>10}"))
    return lines


async def send(client: Any, planned: Planned, began: float) -> Outcome:
    """Sends one request and reads its answer."""
    from minitui.sources.bounds import ANSWER
    from minitui.sources.http import check, httpx, parse, server_events

    outcome = Outcome(time.perf_counter() - began)
    started = time.perf_counter()
    pieces, ended = 0, False
    path = "/v1/chat/completions" if planned.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=planned.body, extensions=ANSWER.extension()) as response:
            if response.status_code == 429:
                outcome.error = "refused (429)"
            await check(response)
            async for _, data in server_events(response):
                if data == "[DONE]":
                    ended = True
                    break
                chunk = parse(data)
                _count_usage(outcome, chunk.get("usage") or {})
                for choice in chunk.get("choices", ()):
                    text = choice.get("text") or any((choice.get("delta") or {}).get(key) for key in TEXT_FIELDS)
                    if text or choice.get("finish_reason"):
                        outcome.first = outcome.first or time.perf_counter() - started
                    pieces += bool(text)
                    ended = ended or bool(choice.get("finish_reason"))  # after this, some servers send no [DONE]
        if not ended:
            outcome.error, outcome.detail = "cut off", "the answer ended without a finish_reason"
    except EngineDead as error:
        outcome.error, outcome.detail = "not available", str(error)
    except EngineError as error:
        outcome.error, outcome.detail = outcome.error or "error", str(error)
    except (TypeError, AttributeError, ValueError) as error:  # JSON with another structure
        outcome.error, outcome.detail = "no answer", f"this is not an OpenAI-compatible server ({error})"
    except (httpx.HTTPError, OSError) as error:
        outcome.error, outcome.detail = type(error).__name__, str(error)
    finally:
        outcome.total = time.perf_counter() - started
        outcome.output_tokens = outcome.output_tokens or pieces  # without usage, each piece counts as a token
    return outcome


def _count_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    from minitui.sources.remote_checks import count

    outcome.prompt_tokens = count(usage.get("prompt_tokens")) or outcome.prompt_tokens
    outcome.output_tokens = count(usage.get("completion_tokens")) or outcome.output_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome.cached_tokens = outcome.cached_tokens if count(cached) is None else cached


async def run_load(
    url: str, key: str, plan: Sequence[Planned], timeout_s: float, progress: TextIO | None = None
) -> list[Outcome]:
    """Sends each request at its planned time; returns the outcomes in the order of the plan."""
    from minitui.sources.http import open_client

    done: list[Outcome] = []
    began = time.perf_counter()

    async def one(planned: Planned) -> Outcome:
        await asyncio.sleep(max(0.0, planned.at - (time.perf_counter() - began)))
        # One client per request: one client with hundreds of connections would be slower than the server.
        async with open_client(url, key) as client:
            client.timeout = timeout_s
            outcome = await send(client, planned, began)
        done.append(outcome)
        return outcome

    tasks = [asyncio.create_task(one(planned)) for planned in plan]
    reporting = asyncio.create_task(_report_progress(progress, plan, done, began)) if progress else None
    try:
        return await asyncio.gather(*tasks)
    finally:
        if reporting is not None:
            reporting.cancel()
        for task in tasks:
            task.cancel()


async def _report_progress(out: TextIO, plan: Sequence[Planned], done: list[Outcome], began: float) -> None:
    while True:
        await asyncio.sleep(1.0)
        now = time.perf_counter() - began
        due = sum(planned.at <= now for planned in plan)
        failed = sum(bool(outcome.error) for outcome in done)
        line = f"{now:5.0f} s  {due} of {len(plan)} sent, {len(done)} finished, {failed} failed"
        print(line, file=out, flush=True)
