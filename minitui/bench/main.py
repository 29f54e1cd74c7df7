"""The command: measure the machine, then the engine on it, and print what share of the machine it uses.

    minitui bench                     on a GPU the shapes of Qwen3-0.6B and 8B, random weights; else the bundled model
    minitui bench --model DIR         a checkpoint (with --dummy-weights a directory that holds only config.json)
    minitui bench --shape 8B --json   one shape, as JSON
    minitui bench --url ADDRESS       load on a server; with --help behind it, its own options
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.progress import Status
from minitui.visible import json_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(arguments)
    with Status(sys.stderr) as status:
        status({"text": "measuring the machine …"})
        report = _with_model(options, say_nothing if options.json else partial(_say, status))
    if options.json:
        print(json_text(report, indent=2))
    return 0


def _with_model(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """The machine's limits, and each model beside them."""
    import torch

    from minitui.bench.limits import measure_limits

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    if not on_gpu:  # the machine's limits are those of what the engine may use
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    fp8 = torch.float8_e4m3fn if options.quantization == "fp8" else torch.bfloat16
    limits = measure_limits(torch.device("cuda" if on_gpu else "cpu"), fp8 if on_gpu else torch.float32)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    say(name, *limits.lines(), sep="\n")
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "limits": vars(limits), "models": {}}
    with tempfile.TemporaryDirectory(prefix="minitui-bench-") as folder:
        for shape, model, dummy in models(options, Path(folder), on_gpu):
            # Rows of their own: nobody else's numbers, which are of 16-bit caches, stand beside them.
            label = f"{shape}, fp8 KV cache" if options.kv_cache_dtype == "fp8" else shape
            say(f"\n{label}")
            report["models"][label] = _measure(label, model, dummy, options, limits, on_gpu, say)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    return report


def engine_options(options: argparse.Namespace, dummy: bool, on_gpu: bool, max_context: int) -> dict[str, Any]:
    """The fields of the EngineConfig that everything here is measured with."""
    chosen: dict[str, Any] = {
        "dummy_weights": dummy, "load_tokenizer": False, "device": options.device,
        "enforce_eager": options.enforce_eager, "overlap": options.overlap,
        "attention_backend": options.attention_backend, "kv_cache_dtype": options.kv_cache_dtype,
        "cpu_threads": options.threads,
        "quantization": options.quantization, "tensor_parallel_size": options.tensor_parallel_size,
    }  # fmt: skip
    if on_gpu:
        chosen["max_num_batched_tokens"] = options.max_num_batched_tokens
        chosen["max_model_len"] = min(8192, max_context)
    return chosen


def _say(status: Status, *lines: object, sep: str = " ") -> None:
    """Print, and tell who waits for the next line that it is being measured."""
    status.clear()
    print(*lines, sep=sep, flush=True)
    status({"text": "measuring …"})


def say_nothing(*lines: object, sep: str = " ") -> None:
    """In place of print where only JSON is wanted."""


def models(options: argparse.Namespace, folder: Path, on_gpu: bool) -> Iterator[tuple[str, str, bool]]:
    """(label, model, random weights?) of each model that is to be measured."""
    from minitui.bench.shapes import MEASURED, write_config

    if options.model:
        yield Path(options.model).name, options.model, options.dummy_weights
    elif options.shape or on_gpu:
        for size in options.shape or MEASURED:
            yield size, str(write_config(size, folder)), True
    else:
        from minitui import tutor

        yield "the bundled model", str(tutor.model_dir()), False


def _measure(
    label: str, model: str, dummy: bool, options: argparse.Namespace, limits: Any, on_gpu: bool, say: Any
) -> dict[str, Any]:
    import torch

    from engine.hub.resolve import resolve_model
    from engine.llm import LLM
    from engine.model.hf_config import read_model_config
    from minitui.bench.cpu import cpu_rows
    from minitui.bench.gpu import H200, GpuRows
    from minitui.bench.shapes import Work
    from minitui.bench.speculation import CPU_REPLY, CPU_STREAMS, REPLY, STREAMS, speculation_rows, timed
    from minitui.bench.watching import watching

    directory = resolve_model(model, weights=not dummy, tokenizer=False)
    config = read_model_config(directory)
    load = partial(LLM, str(directory), **engine_options(options, dummy, on_gpu, config.max_context))
    llm = load()
    info = llm.info
    notes = [*info["notes"], *llm.engine.runner.memory.notes]  # type: ignore[attr-defined]
    quantised = info["quantization"] != "none"
    used = info["active_parameters"]
    active = f" ({used / 1e9:.2f} for a token)" if used < info["parameters"] else ""
    say(
        f"{info['parameters'] / 1e9:.2f} billion parameters{active} "
        f"in {info['quantization' if quantised else 'dtype']}, attention {info['attention']}, KV cache in "
        f"{info['kv_cache_dtype']}, "
        f"{info['num_blocks']:,} blocks of {info['block_size']} tokens, overlap {'on' if info['overlap'] else 'off'}, "
        f"ready in {info['load_seconds']:.1f} s",
        *notes, sep="\n",
    )  # fmt: skip
    itemsize, small = getattr(torch, info["dtype"]).itemsize, info["kv_cache_dtype"] == "fp8"
    work = Work.of(config, 1 if small else itemsize, weight_itemsize=1 if quantised else itemsize)
    if on_gpu:
        references = H200.get(label, {}) if "H200" in torch.cuda.get_device_name() else {}
        found = GpuRows(llm, work, limits, references).all()
    else:
        found = cpu_rows(llm, work, limits, directory, not options.no_compare)
    rows = []
    for row in found:
        say(row.line())
        rows.append(row.as_dict())
    result: dict[str, Any] = {"info": info, "notes": notes, "rows": rows}
    if not options.no_watching:
        result["watching"], lines = watching(llm, 64 if on_gpu else 4, pairs=options.pairs)
        say(*lines, sep="\n")
    if options.no_speculation:
        llm.engine.check()
        llm.close()
        return result
    streams, reply = (STREAMS, REPLY) if on_gpu else (CPU_STREAMS, CPU_REPLY)
    plain = {n: timed(llm, n, reply) for n in streams}
    llm.engine.check()
    llm.close()
    del llm, found  # their memory is that of the next
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    llm = load(speculation="prompt-lookup")
    for n in streams:
        for row in speculation_rows(plain[n], timed(llm, n, reply)):
            say(row.line())
            rows.append(row.as_dict())
    llm.engine.check()
    llm.close()
    return result


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    from minitui.bench.shapes import SIZES

    made = argparse.ArgumentParser(
        prog="minitui bench", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__,
        epilog="with --url ADDRESS: load on a server that runs already; minitui bench --url ADDRESS --help tells more",
    )  # fmt: skip
    made.add_argument("--model", help="directory or name of a checkpoint; default: as above")
    made.add_argument("--dummy-weights", action="store_true", help="random weights: only config.json is read")
    made.add_argument("--shape", action="append", choices=list(SIZES), help="a built-in shape; may be repeated")
    made.add_argument("--device", default="auto", help="auto, cpu or cuda")
    made.add_argument(
        "--quantization", default="none", choices=["none", "int8", "fp8"], help="int8: on a CPU; fp8: on a GPU"
    )
    made.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share the model")
    made.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    made.add_argument("--overlap", default="auto", choices=["auto", "on", "off"])
    made.add_argument("--attention-backend", default="auto", help="as in minitui chat: flash,triton")
    made.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"], help="fp8: 8-bit KV cache")
    made.add_argument("--max-num-batched-tokens", type=int, default=16_384, help="token budget of a step, on a GPU")
    made.add_argument("--threads", type=int, help="on a CPU; default: one fewer than there are cores")
    made.add_argument("--no-compare", action="store_true", help="on a CPU: do not measure transformers")
    made.add_argument("--no-watching", action="store_true", help="skip what watching costs")
    made.add_argument("--no-speculation", action="store_true", help="skip what drafts gain and cost")
    made.add_argument("--pairs", type=int, default=8, help="runs each with records off and on, and attached")
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


def run() -> None:
    """For `python -m minitui.bench`, where typer is not installed."""
    try:
        sys.exit(main())
    except EngineError as error:
        sys.exit(f"minitui bench: {error}")
