"""The engine's options on the command line: names, defaults and help in one place, for every command that runs one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.config import EngineConfig

DType = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
KvBlocks = Annotated[int | None, typer.Option(min=1, help="KV blocks in the pool. A small one (64) fills as you look.")]


def _options(
    dummy_weights: Annotated[
        bool,
        typer.Option("--dummy-weights", help="Random weights: only config.json is read. For looking, not for talking."),
    ] = False,
    kv_blocks: KvBlocks = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 16,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of a step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of prompt and answer together.")] = None,
    dtype: DType = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="none; int8, 8-bit weights on a CPU: a quarter of the memory, 2-3 times the speed; fp8, 8-bit weights "
            "on a GPU: half the memory."
        ),
    ] = "none",
    device: Device = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks to cut the model over: as many GPUs, or processes on the CPU.")
    ] = 1,
    attention_backend: Annotated[
        str,
        typer.Option(
            help="auto (on a GPU Triton, with FlashAttention for prompts if it is installed), torch, triton or flash; "
            "or two, for prefill and decode: flash,triton."
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, or fp8: 8-bit keys and values: twice as many tokens, and decode reads half.")
    ] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the device's memory to use.")] = 0.9,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            help="Who of those who wait runs next: fcfs, first come first served; longest-prefix, who finds most of "
            "the prompt in the tree (pays when many share long prefixes and the pool is short; nobody is overtaken "
            "for ever); static, nobody until the whole batch has ended."
        ),
    ] = "fcfs",
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its first token.")
    ] = False,
    speculation: Annotated[
        str,
        typer.Option(
            help="off; prompt-lookup, or prompt-lookup:K for drafts of up to K tokens: guess what follows from the "
            "request's own text and check it in one step. The same answers, in fewer steps where text repeats."
        ),
    ] = "off",
) -> None:
    """What engine_config takes, as typer reads it."""


PARAMETERS = [
    parameter.replace(annotation=get_type_hints(_options, include_extras=True)[name], kind=parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(_options).parameters.items()
]


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the engine's options after its own; it gets them as a dictionary, `engine`."""

    @wraps(command)
    def run(**given: Any) -> None:
        engine = {parameter.name: given.pop(parameter.name) for parameter in PARAMETERS}
        command(**given, engine=engine)

    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "engine"
    ]
    run.__signature__ = inspect.Signature([*own, *PARAMETERS])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *PARAMETERS)}
    return run


def chosen_options(engine: dict[str, Any]) -> list[str]:
    """Those of the engine's options that do not stand at their defaults, as they are typed."""
    return [f"--{p.name.replace('_', '-')}" for p in PARAMETERS if engine[p.name] != p.default]


def engine_config(model: str, **options: Any) -> EngineConfig:
    """An EngineConfig from options of the command line; EngineError says which of them cannot be."""
    from engine.config import EngineConfig

    if "speculation" in options:
        text = options["speculation"]
        options["speculation"], _, tokens = text.partition(":")
        if tokens and not tokens.isdecimal():
            raise EngineError(f"speculation is {text!r}: after the colon stands a number, as in prompt-lookup:8")
        if tokens:
            options["speculative_tokens"] = int(tokens)
    if "kv_blocks" in options:
        options["num_blocks"] = options.pop("kv_blocks")
    if "no_prefix_caching" in options:
        options["enable_prefix_caching"] = not options.pop("no_prefix_caching")
    return EngineConfig(model=model, **options)
