"""Defines the options that several commands share: names, defaults and help texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from engine.config import MOST, EngineConfig
from engine.errors import EngineError
from minitui.cli.models import complete_model
from minitui.sampling import OPTIONS


def valid_text(value: str | None) -> str | None:
    """Returns the argument with a "?" for each byte that is not UTF-8. Python passes these bytes as lone surrogates,
    which no tokenizer accepts."""
    return value and value.encode("utf-8", "replace").decode()


Model = Annotated[
    str | None,
    typer.Option(
        help="A directory, a GGUF file, or a model's name in the local Hugging Face cache or on the hub, with "
        "@REVISION if needed. Default: the bundled model.",
        autocompletion=complete_model,
    ),
]
System = Annotated[str | None, typer.Option(help="System prompt; '' for none.", callback=valid_text)]
Record = Annotated[Path | None, typer.Option(help="Write a recording of the engine to this file, for minitui replay.")]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        envvar="MINITUI_ALLOWED_HOST",
        help="A name in the Host header besides localhost, for a proxy or a container; *.example.org allows all names "
        "below it. With API keys, minitui serve allows every name.",
    ),
]
Key = Annotated[
    str, typer.Option(help="The server's API key. The environment variable is safer.", envvar="MINITUI_KEY")
]


def _looks(
    fps: Annotated[
        int | None, typer.Option(min=1, max=60, help="Frames per second; choose fewer on a slow connection.")
    ] = None,
    theme: Annotated[str | None, typer.Option(help="dark, light or projector.")] = None,
    ascii: Annotated[bool | None, typer.Option("--ascii/--unicode", help="Draw with ASCII characters only.")] = None,
) -> None: ...


def _opening(
    web: Annotated[
        bool,
        typer.Option("--web", help="Open in a browser. Each tab is an application of its own, unless --mirror is set."),
    ] = False,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="With --web: all tabs show your application; only your tab accepts input.")
    ] = False,
    web_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of --web. Default: 8001.")] = None,
    web_host: Annotated[
        str | None,
        typer.Option(help="Address of --web. Default: 127.0.0.1. With --mirror, 0.0.0.0 lets other machines watch."),
    ] = None,
    allowed_host: AllowedHost = None,
    class_link: Annotated[
        str | None,
        typer.Option(
            help="With --mirror: the phones' address is /NAME-TOKEN. The token stays the same as long as the file of "
            "this class exists.",
            metavar="NAME",
        ),
    ] = None,
    record: Record = None,
) -> None: ...


ENGINE = {  # option -> its help; the types and the defaults are those of EngineConfig
    "dummy_weights": "Use random weights: the model needs only config.json and a tokenizer. The answers are nonsense.",
    "kv_blocks": "KV blocks in the pool. A small pool (64) fills quickly.",
    "block_size": "Tokens in a KV block.",
    "window_blocks": "Blocks in the pool of a sliding window, for models that have full attention, too.",
    "state_slots": "Recurrent states in memory, for models that have them.",
    "checkpoint_interval": "A long prompt keeps a checkpoint of its recurrent state after this many tokens.",
    "max_num_seqs": "Maximum number of running requests.",
    "max_num_batched_tokens": "Token budget of a step.",
    "max_gap_ms": "Target for the time between two tokens of an answer: while answers run, a step computes as many "
        "prompt tokens as fit into it, as measured. Default: the whole token budget.",
    "max_model_len": "Maximum tokens of prompt and answer together.",
    "dtype": "auto, float32, bfloat16, float16 or float64.",
    "quantization": "auto; none: weights in --dtype; bf16: 16-bit weights on a CPU, half the memory of float32; int8: "
        "8-bit weights on a CPU, a quarter; int4: 4-bit weights, a sixth, or on a GPU a third; fp8: 8-bit weights on a "
        "GPU, half the memory; checkpoint: 8-bit numbers on a GPU, as a quantised checkpoint stores them. On a CPU, "
        "auto takes bf16 if the checkpoint has it, int8 if nothing else fits into memory, and int4 if int8 does not "
        "fit either; 4-bit and 8-bit integers of a quantised checkpoint stay as they are. On a GPU, auto takes "
        "checkpoint or int4 if a quantised checkpoint can be computed as it is stored, and fp8 for others that do not "
        "fit into memory.",
    "no_keep_weights": "Do not keep weights that were rounded for a CPU on disk: later starts take as long as the "
        "first.",
    "device": "auto, cpu, cuda or cuda:N.",
    "tensor_parallel_size": "Split the model over this many ranks: GPUs, or processes on the CPU.",
    "attention_backend": "auto, torch, triton or flash; or one for prefill and one for decode: flash,triton. On a GPU, "
        "auto means triton, with flash for prefill if FlashAttention is installed.",
    "kv_cache_dtype": "auto, or fp8: 8-bit keys and values. The pool holds twice as many tokens.",
    "enforce_eager": "Do not use CUDA graphs.",
    "graphs_at_start": "Capture all CUDA graphs before the first request, for benchmarks. Default: while no request "
        "runs.",
    "gpu_memory_utilization": "Share of the device's memory to use.",
    "scheduling_policy": "Order of waiting requests. fcfs: first come, first served. longest-prefix: the longest "
        "cached prefix first, with a limit on overtaking; helps if many prompts share long prefixes and the pool is "
        "small. priority: the lowest number in a request's field priority first; the highest is preempted first. "
        "static: a new batch starts when the whole previous batch has finished.",
    "eviction_policy": "Which cached text is evicted first. lru: the least recently used. fifo: the oldest.",
    "no_prefix_caching": "Compute every prompt from its first token; reuse no prefix.",
    "speculation": "off; prompt-lookup, or prompt-lookup:K for drafts of up to K tokens. Drafts are copied from the "
        "request's own text and checked in one step. The answers stay the same; repetitive text needs fewer steps.",
}
FIELDS = {  # options that EngineConfig has under another name
    "kv_blocks": "num_blocks", "no_prefix_caching": "enable_prefix_caching", "no_keep_weights": "keep_weights",
}
LEAST = {"state_slots": 2}  # of the other whole numbers: 1
DType = Annotated[str, typer.Option(help=ENGINE["dtype"])]
Device = Annotated[str, typer.Option(help=ENGINE["device"])]
KvBlocks = Annotated[int | None, typer.Option(min=1, help=ENGINE["kv_blocks"])]


def _engine_option(name: str) -> inspect.Parameter:
    field = FIELDS.get(name, name)
    kind, default = get_type_hints(EngineConfig)[field], getattr(EngineConfig, field)
    flags = () if kind is not bool else (f"--{name.replace('_', '-')}",)
    least = LEAST.get(name, 1) if field in MOST else None
    option = typer.Option(*flags, help=ENGINE[name], min=least)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option],
        default=False if name.startswith("no_") else default,
    )


def _parameters(declared: Callable[..., None], without: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    hints = get_type_hints(declared, include_extras=True)
    return [
        parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(declared).parameters.items()
        if name not in without
    ]


SAMPLING = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None,
        annotation=Annotated[option.types[0] | None, typer.Option(help=option.help)],
    ) for name, option in OPTIONS.items()
]
GROUPS = {
    "sampling": SAMPLING, "looks": _parameters(_looks), "opening": _parameters(_opening),
    "engine": [_engine_option(name) for name in ENGINE],
}


def with_options(*groups: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds groups of options after the command's own options. The command receives each group
    as one dictionary."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {group: {option.name: given.pop(option.name) for option in GROUPS[group]} for group in groups}
            command(**given, **chosen)

        parameters = [*_parameters(command, groups), *(option for group in groups for option in GROUPS[group])]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in parameters}
        return run

    return decorate


def chosen_options(engine: dict[str, Any]) -> list[str]:
    """Returns the engine options that differ from their defaults, as the user types them: ["--kv-blocks"]."""
    changed = [option.name for option in GROUPS["engine"] if engine[option.name] != option.default]
    return [f"--{name.replace('_', '-')}" for name in changed]


def engine_config(model: str, **options: Any) -> EngineConfig:
    """Returns the EngineConfig for the engine options of the command line. Raises EngineError for an invalid option."""
    if "speculation" in options:
        text = options["speculation"]
        options["speculation"], _, tokens = text.partition(":")
        if tokens and not tokens.isdecimal():
            raise EngineError(f"speculation is {text!r}: a number must follow the colon, as in prompt-lookup:8")
        if tokens:
            options["speculative_tokens"] = int(tokens)
    for name in FIELDS.keys() & options:
        value = options.pop(name)
        options[FIELDS[name]] = not value if name.startswith("no_") else value
    return EngineConfig(model=model, **options)
