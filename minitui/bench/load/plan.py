"""The requests of a run and the times at which they are sent: random, or those of a trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from minitui.bench.load.options import LoadOptions

WORDS = (
    "block", "cache", "token", "prefix", "tree", "queue", "batch", "step", "prompt", "answer", "page", "table",
    "decode", "prefill", "head", "layer", "request", "share", "evict", "admit", "stream", "model", "weight", "draw",
)  # fmt: skip
MOONCAKE_BLOCK = 512  # tokens for each hash id


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
