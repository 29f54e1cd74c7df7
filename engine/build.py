"""Builds an engine from an EngineConfig. Only this module puts the engine's parts together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.errors import EngineError
from engine.files import eos_ids
from engine.groups import cache_groups
from engine.hub.resolve import resolve_model
from engine.info import EngineInfo
from engine.model.config import ModelConfig
from engine.model.hf.config import read_model_config
from engine.model.traits import lacking
from engine.progress import Progress
from engine.text import early_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.worker.limits import graph_bytes, memory_of, resolve
from engine.worker.weights import kept_files
from engine.worker.weights.memory import check_memory

if TYPE_CHECKING:
    from engine.worker.rank_runner import LeadRunner
    from engine.worker.runner import Parts, Runner

logger = logging.getLogger("engine")

DELTA_SIZES = {16, 32, 64, 128, 256}  # of keys and values in engine/kernels/delta.py


@dataclass(slots=True)
class Built:
    """An engine, the tokenizer of its model (None if not loaded), and facts about both for the user."""

    engine: Engine
    tokenizer: Tokenizer | None
    info: EngineInfo
    close: Callable[[], None]  # ends the processes of other ranks
    prepare: Callable[[bool], dict[str, Any] | None]  # see Runner.prepare


def build_engine(
    config: EngineConfig, on_progress: Progress | None = None, on_lost: Callable[[str], None] | None = None,
    before_torch: Callable[[], None] = lambda: None, max_waiting: int | None = None, later: bool = False,
) -> Built:
    """Load a model and make an engine for it. Raises EngineError if that is not possible.

    on_progress    called with {"stage", "done", "total", "text"}; `total` is 0 if unknown. After the model was found,
                   a message also has "model_dir", the directory of the checkpoint
    on_lost        called from another thread, with a sentence, when one of several ranks has ended unexpectedly
    before_torch   called after the model was found and before torch is needed
    max_waiting    the most requests that may wait in the queue; further requests are refused; None: no limit
    later          on one GPU: capture CUDA graphs in Built.prepare, which the caller calls, instead of now
    """
    from engine.text.structured import Grammars

    notes: list[str] = []

    def report(progress: dict[str, Any]) -> None:
        if "note" in progress:
            notes.append(progress["note"])
        if progress["stage"] == "pool" and config.load_tokenizer:
            early_tokenizer.begin(str(directory))  # it holds Python's lock; the allocation of memory on a GPU does not
        if on_progress is not None:
            on_progress(progress)

    started = time.perf_counter()
    report({"stage": "model", "done": 0, "total": 0, "text": f"looking for {config.model}"})
    directory = resolve_model(
        config.model, on_progress=report, weights=not config.dummy_weights, tokenizer=config.load_tokenizer
    )
    model = read_model_config(directory, config.hf_overrides)
    text = f"loading {Path(config.model).name}"
    torch = {"stage": "torch", "done": 0, "total": 0, "text": "importing torch"}
    report({**torch, "model_dir": str(directory)})
    kept_files.begin(config, directory, model)
    before_torch()
    report({"stage": "model", "done": 0, "total": 0, "text": text})
    limits = resolve(config, model)
    config = replace(config, quantization=limits.quantization)  # loading changes the free memory
    if limits.device.type == "cpu":
        kept_files.begin(config, directory, model)  # if "auto" has become a kind
        if config.load_tokenizer:
            early_tokenizer.begin(str(directory))
    else:
        kept_files.forget()
    runner = make_runner(model, config, directory, report, on_lost, later and not config.graphs_at_start)
    tokenizer = early_tokenizer.load(str(directory)) if config.load_tokenizer else None
    if tokenizer is not None:
        tokenizer.context = limits.max_model_len
    overlap = limits.device.type != "cpu" if config.overlap == "auto" else config.overlap == "on"
    ends = frozenset(eos_ids(directory) if tokenizer is None else tokenizer.eos_ids)
    engine = Engine(
        runner,
        SchedulerConfig(
            max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len, chunked_prefill=config.enable_chunked_prefill,
            policy=config.scheduling_policy, max_waiting=max_waiting,
            speculative_tokens=config.speculative_tokens if config.speculation != "off" else 0,
            checkpoint_interval=config.checkpoint_interval, max_gap_ms=config.max_gap_ms,
        ),
        overlap=overlap, prefix_caching=config.enable_prefix_caching, eviction_policy=config.eviction_policy,
        eos_ids=ends,
        grammars=Grammars(tokenizer, model.vocab_size) if tokenizer is not None else None,
    )
    notes += [*limits.notes, *runner.loaded.notes]
    kinds = {group.kind for group in cache_groups(model)}
    if config.window_blocks is not None and "window" not in kinds:
        notes.append("--window-blocks has no effect: this model has no windows beside full attention")
    if config.state_slots is not None and "state" not in kinds:
        notes.append("--state-slots has no effect: this model has no recurrent states")
    if not ends:
        notes.append("the checkpoint names no token that ends a reply (eos_token_id), so replies end at max_tokens")
    speculation: dict[str, Any] = {}
    if config.speculation != "off":
        speculation = {"method": config.speculation, "tokens": config.speculative_tokens}
        notes.append("speculation: steps are not overlapped, because each step needs the tokens of the previous step")
    if limits.device.type == "cuda" and (why_not := without_graphs(model, config)):
        notes.append(f"steps are several times slower, without CUDA graphs and without most of our kernels: {why_not}")
    groups = [
        (group.name, len(group.layers), size)
        for group, size in zip(cache_groups(model), runner.loaded.block_bytes, strict=True) if runner.groups
    ]
    info = EngineInfo(
        model=Path(config.model).name, model_dir=str(directory), architecture=model.architecture,
        parameters=model.num_parameters, active_parameters=model.active_parameters, device=runner.loaded.device_name,
        dtype=str(limits.dtype).removeprefix("torch."),
        quantization={"checkpoint": "fp8"}.get(limits.quantization, limits.quantization),
        kv_cache_dtype="fp8" if config.kv_cache_dtype == "fp8" else str(limits.dtype).removeprefix("torch."),
        num_blocks=runner.num_blocks - 1, block_size=runner.block_size, max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=model.vocab_size, eos_ids=sorted(ends), attention=runner.loaded.attention_name,
        overlap=engine.delay > 0, kv_bytes_per_token=model.kv_bytes_per_token(limits.kv_dtype),
        prefix_caching=config.enable_prefix_caching, chunked_prefill=config.enable_chunked_prefill,
        scheduling_policy=config.scheduling_policy, eviction_policy=config.eviction_policy,
        dummy_weights=config.dummy_weights, generation=tokenizer.generation if tokenizer is not None else {},
        load_seconds=round(time.perf_counter() - started, 3), notes=notes,
        speculation=speculation, tensor_parallel_size=config.tensor_parallel_size, groups=groups,
        checkpoint_interval=config.checkpoint_interval if model.state_layers else 0,
        max_gap_ms=config.max_gap_ms or 0.0, graphs=runner.loaded.graphs,
    )
    logger.info("ready: %s", info.to_json())
    return Built(engine, tokenizer, info, runner.close, runner.prepare)


def make_runner(
    model: ModelConfig, config: EngineConfig, directory: Path | None = None, on_progress: Progress | None = None,
    on_lost: Callable[[str], None] | None = None, later: bool = False,
) -> Runner | LeadRunner:
    """Returns the runner for the device in `config`. With several ranks, rank 0's runner starts the other ranks; then
    `later` has no effect, because all ranks must capture the same graph at the same time."""
    from engine.worker.rank_runner import LeadRunner
    from engine.worker.runner import Runner

    check_memory(model, config, resolve(config, model), None if config.dummy_weights else directory)
    parts = choose_parts(model, config)
    if config.tensor_parallel_size > 1:
        return LeadRunner(model, config, parts, directory, on_progress, on_lost)
    return Runner(model, config, parts, directory, on_progress, later=later)


def choose_parts(model: ModelConfig, config: EngineConfig) -> Parts:
    """Returns the fastest parts of a runner that can run the model as `config` asks. All ranks choose the same parts.
    The imports are inside the function because some modules need triton, which is not installed everywhere."""
    from engine.model import ops
    from engine.worker.eager import Eager
    from engine.worker.runner import Parts

    device = resolve(config, model).device
    if device.type == "cpu" and config.tensor_parallel_size == 1:
        from engine.worker.cpu.executor import CPUSteps

        return Parts(ops, (CPUSteps, Eager))
    if not without_graphs(model, config):
        from engine.kernels.compile_ahead import compiler
        from engine.worker.graphs import fused_ops
        from engine.worker.graphs.cuda_graphs import CudaGraphs

        memory = memory_of(device) or 0
        return Parts(fused_ops, (CudaGraphs, Eager), 0 if config.enforce_eager else graph_bytes(memory), compiler)
    return Parts(ops, (Eager,))


def without_graphs(model: ModelConfig, config: EngineConfig) -> str:
    """Returns the reason why this model cannot run with CUDA graphs under `config`; empty if it can."""
    from engine.attention.choose import backend_names, why_not_triton

    limits = resolve(config, model)
    if limits.device.type != "cuda":
        return f"the device is {limits.device}"
    prefill, decode = backend_names(config.attention_backend)
    if decode not in ("auto", "triton") or prefill == "torch":
        return f"attention_backend is {config.attention_backend}, but CUDA graphs need triton; prefill may use flash"
    if lacks := lacking(model, "graphs"):
        return f"this {model.architecture} has {lacks}, which our CUDA graphs do not support"
    if (delta := model.delta) is not None and not {delta.key_dim, delta.value_dim} <= DELTA_SIZES:
        return (
            f"each head of a delta rule has a state of {delta.key_dim} by {delta.value_dim}, and our kernels need "
            f"{', '.join(map(str, sorted(DELTA_SIZES)))}"
        )
    ranks, experts = config.tensor_parallel_size, model.experts
    if ranks > 1 and config.speculation != "off":
        return f"steps with drafts are captured on one GPU only, but tensor_parallel_size is {ranks}"
    if experts is not None and (model.hidden_size % 8 or experts.inner_size % (8 * ranks)):
        return (
            f"the matrices of an expert are {model.hidden_size} by {experts.inner_size}, divided among {ranks} "
            f"rank{'s' if ranks > 1 else ''}, but our kernels need a multiple of 8 numbers in each row"
        )
    return why_not_triton(model, limits.dtype, limits.device, limits.kv_dtype)


def as_engine_error(error: BaseException) -> EngineError:
    """Returns an EngineError that says what to do, for any error that occurred while an engine was built."""
    if isinstance(error, EngineError):
        return error
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        return EngineError(
            f"there is not enough memory for this model ({error}): use a smaller model, fewer --kv-blocks, or a lower "
            "--gpu-memory-utilization"
        )
    return EngineError(f"the engine could not start: {type(error).__name__}: {error}")
