"""The options of `minitui bench --url`, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

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
