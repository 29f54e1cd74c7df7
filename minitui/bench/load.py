"""`minitui bench --url`: plans a run, sends each request at its time, measures the answers and prints the report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from engine.errors import EngineDead, EngineError, InvalidRequest
from minitui.bench.load_figures import Outcome, found_rate, report, summarise, trial_line, write
from minitui.goals import goals_of
from minitui.sources.remote_checks import count
from minitui.visible import json_text

TEXT_FIELDS = ("content", "reasoning_content", "tool_calls")  # fields of a chat delta that count as text
GOALS = ("first", "gap", "total")
PRECISION = 1.05  # the search for a rate ends when the rate that misses is at most this times the one that holds
MOST_TRIALS = 24
START_S = 3.0  # until all processes have started
OPEN_S = 1.0  # a client is opened this long before its request
WORDS = (
    "block", "cache", "token", "prefix", "tree", "queue", "batch", "step", "prompt", "answer", "page", "table",
    "decode", "prefill", "head", "layer", "request", "share", "evict", "admit", "stream", "model", "weight", "draw",
)
MOONCAKE_BLOCK = 512  # tokens for each hash id
HELP = """Measure an OpenAI-compatible server under load.

\b
  minitui bench --url http://127.0.0.1:8000 --rate 8 --requests 200    Poisson arrivals
  minitui bench --url ... --shared-words 400 --groups 4                four shared system prompts
  minitui bench --url ... --trace day.jsonl --speed 2                  replay a trace twice as fast
  minitui bench --url ... --slo first=500,gap=50 --find-rate           the highest rate at which 99 % keep these times
  minitui bench --url ... --out new; minitui compare old.json new.json two results side by side

Each request is sent at its planned time, even if earlier requests are still running (open loop). So the queue of a slow
server grows, as with real users. "gaps" are the times between two chunks of an answer; a chunk may have several tokens.

A trace is a JSONL file with one request per line. A line is an object with "t" (seconds), optionally "max_tokens", and
the text: "prompt", "messages" or "words" (a number of random words). Random words can follow a prefix that several
requests share: "prefix" is its name, "prefix_words" its length. Mooncake traces work too. Their lines have "timestamp"
(ms), "input_length", "output_length" and "hash_ids", one id for each 512 tokens; equal ids get equal text.
"""


async def measure(options: LoadOptions, trial: int = 0) -> dict[str, Any]:
    """Plans and sends the requests; returns the figures. Raises EngineError if the run cannot start. `trial` changes
    the random texts: a trial finds nothing of the one before in the cache."""
    from minitui.sources.http import normalise

    goals = goals_of(options.slo, GOALS) if options.slo else {}
    url = normalise(options.url)
    model = options.model or await first_model(url, options.key)
    if options.trace is not None:
        try:
            lines = options.trace.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may contain U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{options.trace} cannot be read: {error}", "trace") from error
        plan = replay(lines, options, model)
    else:
        plan = poisson(replace(options, seed=options.seed + trial), model)
    say = None if options.json else sys.stderr
    outcomes = await run_load(url, options.key, plan, options.timeout, say, options.processes)
    return {"url": url, "model": model, "rate": options.rate, **summarise(outcomes, goals)}


async def find_rate(
    options: LoadOptions, say: Callable[[str], None], measure: Callable[..., Awaitable[dict[str, Any]]] = measure
) -> dict[str, Any]:
    """Returns the highest rate at which the share of requests within the goals is `options.share`, and each trial.
    Doubles or halves the rate until the goals hold at one and are missed at the other, then halves the interval until
    its ends differ by 5 %."""
    holds, missed, trials, rate = 0.0, math.inf, list[dict[str, Any]](), options.rate
    while len(trials) < MOST_TRIALS and missed > holds * PRECISION:
        figures = await measure(replace(options, rate=rate, json=True), len(trials))
        trials.append(figures)
        options = replace(options, model=figures["model"])  # the server is not asked for it again
        good = figures["within_limits"] >= options.share * figures["requests"]
        holds, missed = (rate, missed) if good else (holds, rate)
        say(trial_line(figures, good))
        if good and options.requests < rate:
            break  # all requests came within a second: a higher rate asks no more of the server
        rate = rate * 2 if missed == math.inf else rate / 2 if not holds else math.sqrt(holds * missed)
    return {
        "url": trials[-1]["url"], "model": trials[-1]["model"], "goals_ms": trials[-1]["goals_ms"],
        "share": options.share, "highest_rate": holds or None,
        "lowest_rate_missed": None if math.isinf(missed) else missed,
        "trials": sorted(trials, key=lambda one: one["rate"]),
    }


async def first_model(url: str, key: str) -> str:
    """Returns the first model that the server lists."""
    from minitui.sources.openai import OpenAISource

    source = OpenAISource(url, key)
    try:
        return (await source.list_models())[0]
    finally:
        await source.close()


def load(options: LoadOptions) -> None:
    """Sends the requests, prints the report, and writes it with --out."""
    for name in ("rate", "speed", "timeout"):
        if not getattr(options, name) > 0:
            raise InvalidRequest(f"--{name} is {getattr(options, name)}: it must be above 0", name)
    if options.find_rate and (not options.slo or options.trace is not None or math.isinf(options.rate)):
        raise InvalidRequest(
            "--find-rate looks for the highest rate that keeps --slo, as in --slo first=500,gap=50; it has no --trace, "
            "and --rate, where it begins, must be finite"
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    if options.find_rate:
        figures = asyncio.run(find_rate(options, say))
        lines = [found_rate(figures, options.requests)]
    else:
        figures = asyncio.run(measure(options))
        lines = report(figures)
    data = json_text(figures | ({"rate": str(figures["rate"])} if "rate" in figures else {}), indent=2)
    print(data if options.json else "\n".join(lines))
    if options.out is not None:
        write(options.out, data + "\n", figures)


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
    slo: Annotated[
        str,
        typer.Option(
            help="Goals of each request in ms, for goodput: first (time to first token), gap (mean time between "
            "tokens), total; as in first=500,gap=50."
        ),
    ] = ""
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Look for the highest rate that keeps --slo; begins with --rate.")
    ] = False
    share: Annotated[
        float, typer.Option(min=0.01, max=1, help="With --find-rate: the share of requests that must keep --slo.")
    ] = 0.99
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that send. One can read some 5,000 chunks a second.")
    ] = 1
    out: Annotated[Path | None, typer.Option(help="Also write the result to OUT.json and a chart to OUT.png.")] = None
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
            ) from error
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


async def send(client: Any, planned: Planned, began: float) -> Outcome:
    """Sends one request and reads its answer."""
    from minitui.sources.http import ANSWER, check, httpx, parse, server_events

    outcome = Outcome(time.perf_counter() - began)
    started = last = time.perf_counter()
    ended = False
    path = "/v1/chat/completions" if planned.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=planned.body, extensions=ANSWER) as response:
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
                    now = time.perf_counter()
                    if text or choice.get("finish_reason"):
                        outcome.first = outcome.first or now - started
                    if text:
                        if outcome.chunks:
                            outcome.gaps.append(now - last)
                        outcome.chunks += 1
                        last = now
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
        outcome.output_tokens = outcome.output_tokens or outcome.chunks  # without usage, each chunk counts as a token
    return outcome


def _count_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    outcome.prompt_tokens = count(usage.get("prompt_tokens")) or outcome.prompt_tokens
    outcome.output_tokens = count(usage.get("completion_tokens")) or outcome.output_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome.cached_tokens = outcome.cached_tokens if count(cached) is None else cached


async def run_load(
    url: str, key: str, plan: Sequence[Planned], timeout_s: float, progress: TextIO | None = None, processes: int = 1
) -> list[Outcome]:
    """Sends each request at its planned time; returns the outcomes in the order of the plan. With several processes,
    each sends its share of the plan."""
    context = multiprocessing.get_context("spawn")
    counts = [context.Array("q", 2, lock=False) for _ in range(processes)]  # of each process: finished, failed
    if processes == 1:
        began = time.perf_counter() + OPEN_S
        sending: Awaitable[list[Outcome]] = _send_all(url, key, plan, timeout_s, began, counts[0])
    else:
        began = time.perf_counter() + START_S  # this clock is the same in all processes
        sending = asyncio.to_thread(_in_processes, context, url, key, plan, timeout_s, began, counts)
    reporting = asyncio.create_task(_report_progress(progress, plan, counts, began)) if progress else None
    try:
        return await sending
    finally:
        if reporting is not None:
            reporting.cancel()


async def _send_all(
    url: str, key: str, plan: Sequence[Planned], timeout_s: float, began: float, counts: Any
) -> list[Outcome]:
    from minitui.sources.http import httpx, open_client

    async def until(at: float) -> None:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))

    async def one(planned: Planned) -> Outcome:
        await until(planned.at - OPEN_S)
        # One client per request: one client with hundreds of connections would be slower than the server.
        async with open_client(url, key) as client:
            client.timeout = timeout_s
            await until(planned.at)
            outcome = await send(client, planned, began)
        outcome.late = outcome.sent - planned.at
        counts[0] += 1
        counts[1] += bool(outcome.error)
        return outcome

    with contextlib.suppress(httpx.HTTPError, EngineError, OSError):  # imports what the first request needs
        async with open_client(url, key) as client:
            await client.get("/health", timeout=OPEN_S)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(planned)) for planned in plan]
    return [task.result() for task in tasks]


def _in_processes(
    context: SpawnContext, url: str, key: str, plan: Sequence[Planned], timeout_s: float, began: float, counts: Any
) -> list[Outcome]:
    shares = [(plan[i :: len(counts)], counts[i]) for i in range(len(counts))]
    results: list[Any] = [None] * len(plan)
    pipes = []
    for share, done in shares:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(theirs, url, key, share, timeout_s, began, done), daemon=True)
        process.start()
        theirs.close()
        pipes.append((ours, process))
    for i, (ours, process) in enumerate(pipes):
        try:
            results[i :: len(pipes)] = ours.recv()
        except EOFError:
            raise EngineError(f"process {i + 1} of --processes {len(pipes)} ended before its requests did") from None
        finally:
            process.join()
    return results


def _process(pipe: Any, url: str, key: str, plan: Sequence[Planned], timeout_s: float, began: float, c: Any) -> None:
    pipe.send(asyncio.run(_send_all(url, key, plan, timeout_s, began, c)))


async def _report_progress(out: TextIO, plan: Sequence[Planned], counts: Sequence[Any], began: float) -> None:
    while True:
        await asyncio.sleep(1.0)
        now = time.perf_counter() - began
        if now < 0:
            continue
        due = sum(planned.at <= now for planned in plan)
        finished, failed = sum(count[0] for count in counts), sum(count[1] for count in counts)
        line = f"{now:5.0f} s  {due} of {len(plan)} sent, {finished} finished, {failed} failed"
        print(line, file=out, flush=True)
