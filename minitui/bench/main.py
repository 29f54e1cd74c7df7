"""`minitui bench`: measures the machine's limits and the engine, and prints the reached share of each limit."""

from __future__ import annotations

import gc
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from engine.errors import EngineError
from minitui.progress import Status
from minitui.visible import json_text

HELP = """Measure this machine, and the share of its limits that the engine reaches.

\b
  minitui bench                     on a GPU: Qwen3-0.6B and 8B with random weights; else the bundled model
  minitui bench --model DIR         a checkpoint; with --dummy-weights, DIR needs only config.json
  minitui bench --shape 8B --json   one built-in shape, as JSON
  minitui bench --shape 0.6B --quantization int8     on a CPU, with llama.cpp beside it if it is installed:
                                    pip install llama-cpp-python gguf
  minitui bench --url ADDRESS       measure a server; minitui bench --url ADDRESS --help lists the options
"""


ABOVE = (
    "above 100% of a limit: a model that fits into the caches of the processor is not read from memory, products of "
    "fewer bits are quicker than the limit's, and other programs may have slowed the measurement of the limits"
)


@dataclass(kw_only=True)
class Options:
    """The options of `minitui bench` without --url."""

    model: Annotated[str | None, typer.Option(help="Directory or name of a checkpoint. Default: see above.")] = None
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help="Random weights; reads only config.json.")] = (
        False
    )
    shape: Annotated[list[str] | None, typer.Option(help="Built-in shape: 0.6B to 32B, 30B-A3B; repeatable.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    quantization: Annotated[str, typer.Option(help="auto; none; int4; bf16 or int8 on a CPU; fp8 on a GPU.")] = "auto"
    tensor_parallel_size: Annotated[int, typer.Option(help="Number of ranks that share the model.")] = 1
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Do not use CUDA graphs.")] = False
    overlap: Annotated[str, typer.Option(help="auto, on or off: plan a step while the previous one runs.")] = "auto"
    attention_backend: Annotated[str, typer.Option(help="As in minitui chat, for example flash,triton.")] = "auto"
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8: 8-bit keys and values.")] = "auto"
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step, on a GPU.")] = 16_384
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: one fewer than there are cores.")] = None
    no_compare: Annotated[bool, typer.Option("--no-compare", help="On a CPU: do not measure llama.cpp.")] = False
    pairs: Annotated[int, typer.Option(min=1, help="On a CPU: pairs of runs, of minitui and of llama.cpp.")] = 8
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def bench(context: typer.Context) -> None:
    """Measure the speed of this machine or, with --url, of a server."""
    main(context.args)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command with `arguments` (None: the arguments of this process) and exits."""
    given = sys.argv[1:] if arguments is None else arguments
    if any(one == "--url" or one.startswith("--url=") for one in given):
        from minitui.bench.load import HELP as LOAD_HELP
        from minitui.bench.load import LoadOptions, load

        run(LoadOptions, load, arguments, "minitui bench", LOAD_HELP)
    run(Options, measure, arguments, "minitui bench", HELP)


def measure(options: Options) -> None:
    """Measures and prints the report."""
    from engine.config import EngineConfig
    from minitui.bench.limits import SIZES

    EngineConfig("", **engine_options(options, True, False, 0))  # raises for a bad option, before anything is measured
    if unknown := set(options.shape or ()) - set(SIZES):
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(SIZES)}", param_hint="--shape")
    with Status(sys.stderr) as status:
        status({"text": "measuring the machine …"})
        report = _report(options, say_nothing if options.json else partial(_say, status))
    if options.json:
        print(json_text(report, indent=2))


def _report(options: Options, say: Any) -> dict[str, Any]:
    """Returns the machine's limits and each model's rows, and calls `say` with their lines."""
    import torch

    from engine.worker.cpu.cores import default_threads
    from minitui.bench.limits import measure_limits

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    if not on_gpu:  # measure with as many threads as the engine uses
        torch.set_num_threads(options.threads or default_threads())
    usual = torch.bfloat16 if on_gpu else torch.float32
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(options.quantization, usual)
    limits = measure_limits(torch.device("cuda" if on_gpu else "cpu"), dtype)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    say(name, *limits.lines(), sep="\n")
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "limits": vars(limits), "models": {}}
    with tempfile.TemporaryDirectory(prefix="minitui-bench-") as folder:
        for shape, model, dummy in models(options, Path(folder), on_gpu):
            # The reference figures are for 16-bit caches, so no figure has the label of an 8-bit cache.
            label = f"{shape}, fp8 KV cache" if options.kv_cache_dtype == "fp8" else shape
            say(f"\n{label}")
            report["models"][label] = _measure(label, model, dummy, options, limits, on_gpu, say)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    return report


def engine_options(options: Options, dummy: bool, on_gpu: bool, max_context: int) -> dict[str, Any]:
    """Returns the fields of EngineConfig for all measurements."""
    chosen: dict[str, Any] = {
        "dummy_weights": dummy, "load_tokenizer": False, "device": options.device,
        "enforce_eager": options.enforce_eager, "overlap": options.overlap,
        "attention_backend": options.attention_backend, "kv_cache_dtype": options.kv_cache_dtype,
        "cpu_threads": options.threads,
        "quantization": options.quantization, "tensor_parallel_size": options.tensor_parallel_size,
    }
    if on_gpu:
        chosen["max_num_batched_tokens"] = options.max_num_batched_tokens
        chosen["max_model_len"] = min(8192, max_context)
    return chosen


def _say(status: Status, *lines: object, sep: str = " ") -> None:
    """Prints lines, then shows a status until the next call."""
    status.clear()
    print(*lines, sep=sep, flush=True)
    status({"text": "measuring …"})


def say_nothing(*lines: object, sep: str = " ") -> None:
    """Prints nothing; used if the report is JSON."""


def models(options: Options, folder: Path, on_gpu: bool) -> Iterator[tuple[str, str, bool]]:
    """Yields (label, model, True if its weights are random) for each model to measure."""
    from minitui.bench.limits import MEASURED, write_config

    if options.model:
        yield Path(options.model).name, options.model, options.dummy_weights
    elif options.shape or on_gpu:
        for size in options.shape or MEASURED:
            yield size, str(write_config(size, folder)), True
    else:
        from minitui import tutor

        yield "the bundled model", str(tutor.model_dir()), False


def _measure(
    label: str, model: str, dummy: bool, options: Options, limits: Any, on_gpu: bool, say: Any
) -> dict[str, Any]:
    import torch

    from engine.hub.resolve import resolve_model
    from engine.llm import LLM
    from engine.model.hf.config import read_model_config
    from engine.worker.weights.quantised import itemsizes
    from minitui.bench.cpu import cpu_rows
    from minitui.bench.gpu import H200, GpuRows
    from minitui.bench.limits import Work
    from minitui.bench.llama import LlamaCpp, NotMeasured
    from minitui.bench.rows import said

    directory = resolve_model(model, weights=not dummy, tokenizer=False)
    config = read_model_config(directory)
    llm = LLM(str(directory), **engine_options(options, dummy, on_gpu, config.max_context))
    info = llm.info
    notes = [*info.notes, *llm.engine.runner.loaded.memory.notes]  # type: ignore[attr-defined]
    quantised = info.quantization != "none"
    used = info.active_parameters
    active = f" ({used / 1e9:.2f} active per token)" if used < info.parameters else ""
    say(
        f"{info.parameters / 1e9:.2f} billion parameters{active} "
        f"in {info.quantization if quantised else info.dtype}, attention {info.attention}, KV cache in "
        f"{info.kv_cache_dtype}, "
        f"{info.num_blocks:,} blocks of {info.block_size} tokens, overlap {'on' if info.overlap else 'off'}, "
        f"ready in {info.load_seconds:.1f} s",
        *notes, sep="\n",
    )
    itemsize, small = getattr(torch, info.dtype).itemsize, info.kv_cache_dtype == "fp8"
    weights = itemsizes(info.quantization, getattr(torch, info.dtype))
    work = Work.of(config, 1 if small else itemsize, weights)
    if on_gpu:
        references = H200.get(label, {}) if "H200" in torch.cuda.get_device_name() else {}
        rows = said(GpuRows(llm, work, limits, references).all(), say)
    else:
        with ExitStack() as stack:
            other, note = None, ""
            if not options.no_compare:
                try:
                    other = stack.enter_context(LlamaCpp(config, info.quantization, torch.get_num_threads()))
                    note = f"beside it: {other.name}, {options.pairs} pair{'s' if options.pairs > 1 else ''} of runs"
                except NotMeasured as error:
                    note = str(error)
                say(note)
                notes.append(note)
            rows = said(cpu_rows(llm, work, limits, options.pairs, other), say)
            if any((row["share"] or 0.0) > 1.0 for row in rows):
                say(ABOVE)
                notes.append(ABOVE)
    result: dict[str, Any] = {"info": info.to_json(), "notes": notes, "rows": rows}
    llm.engine.check()
    llm.close()
    return result


def run_alone() -> NoReturn:
    """Runs `python -m minitui.bench`, and prints an EngineError as a sentence."""
    try:
        main()
    except EngineError as error:
        sys.exit(f"minitui bench: {error}")


def run(
    options: type[Any], action: Callable[[Any], None], arguments: Sequence[str] | None, name: str, help: str
) -> NoReturn:
    """Parses `arguments` (None: the arguments of this process), calls `action` with the options, and exits. `options`
    is a dataclass: each field is an option, declared as `Annotated[type, typer.Option(...)]`."""

    def command(**given: Any) -> None:
        action(options(**given))

    hints = get_type_hints(options, include_extras=True)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [field.replace(annotation=hints[name]) for name, field in inspect.signature(options).parameters.items()]
    )
    command.__annotations__ = hints
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.command(help=help)(command)
    app(None if arguments is None else list(arguments), prog_name=name)
    raise SystemExit
