"""Facts about vLLM's engine: whether minitui can show this model, and what the panels say about the engine."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from vllm import __version__
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from engine.errors import EngineError
from minitui.vllm.ports import ports_of

TRIED = "0.33.0"
MOST_GROUPS = 10
OF_POOL = ("get_new_blocks", "cache_full_blocks", "evict_blocks")
OF_CACHING = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size")  # of cache_full_blocks
OF_GROUPS = ("free_blocks", "cache_partial_block", "_maybe_evict_cached_block", "move_block_hashes")  # of the pool
OF_SCHEDULER = ("_preempt_request", "_free_blocks", "get_request_counts")


def explain(error: Exception) -> str:
    """Returns why minitui does not record this engine. Errors that are not sentences may come from vLLM's version."""
    if isinstance(error, ValueError | EngineError):
        return str(error)
    fits = f"; minitui was tried with vLLM {TRIED}, and this is vLLM {__version__}" if __version__ != TRIED else ""
    return f"{error!r}{fits}"


def check_names(scheduler: Scheduler) -> None:
    """Raises AttributeError if a method of vLLM's that minitui observes does not exist in this version, or differs."""
    pool = scheduler.kv_cache_manager.block_pool
    for owner, names in ((Scheduler, OF_SCHEDULER), (pool, OF_POOL)):
        for name in names:
            getattr(owner, name)
    parameters = tuple(inspect.signature(pool.cache_full_blocks).parameters)
    if parameters[: len(OF_CACHING)] != OF_CACHING:
        raise AttributeError(f"cache_full_blocks has the parameters {', '.join(parameters)}")


def managers_of(scheduler: Scheduler) -> list[Any]:
    """Returns the managers of the KV cache groups, that of full attention first. Raises ValueError if minitui cannot
    show this model."""
    managers = list(scheduler.kv_cache_manager.coordinator.single_type_managers)
    if len(managers) > MOST_GROUPS:
        raise ValueError(f"this model has {len(managers)} KV cache groups; minitui shows up to {MOST_GROUPS}")
    kinds = [_kind(manager) for manager in managers]
    if "full" not in kinds:
        raise ValueError("no layer of this model has full attention; minitui shows models that have some")
    main = managers.pop(kinds.index("full"))
    if any(manager.block_pool is not main.block_pool for manager in managers):
        raise ValueError("the KV cache groups of this model have several block pools; minitui shows models with one")
    return [main, *managers]


def _kind(manager: Any) -> str:
    """Returns "full", "window", "chunks" or "state". Raises ValueError for other kinds of KV cache."""
    spec, name = manager.kv_cache_spec, type(manager).__name__
    if name in ("FullAttentionManager", "SinkFullAttentionManager") and isinstance(
        spec, FullAttentionSpec | MLAAttentionSpec
    ):
        return "full"
    if name == "SlidingWindowManager" and isinstance(spec, SlidingWindowSpec):
        return "window"
    if name == "ChunkedLocalAttentionManager" and isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunks"
    if name == "MambaManager" and isinstance(spec, MambaSpec):
        return "state"
    raise ValueError(
        f"a KV cache group of this model is a {type(spec).__name__}; minitui shows full attention, sliding windows, "
        "chunked local attention and recurrent states"
    )


def describe_groups(managers: list[Any], max_model_len: int) -> list[dict[str, Any]]:
    """Returns what the watcher must know about the groups beside the first one with full attention. name; kind:
    "window" or "state" (another group with full attention is a window of the longest text); window: tokens; chunk:
    tokens of a chunk of local attention, else 0; size: tokens of a block. Their blocks are in one pool."""
    groups: list[dict[str, Any]] = []
    for manager in managers:
        spec, kind = manager.kv_cache_spec, _kind(manager)
        chunk = spec.attention_chunk_size if kind == "chunks" else 0
        window = {"window": getattr(spec, "sliding_window", 0), "full": max_model_len + 1}.get(kind, chunk)
        name = {"window": f"window {window}", "chunks": f"chunks {chunk}"}.get(kind, kind)
        same = sum(group["name"].partition(" #")[0] == name for group in groups) + (kind == "full")
        groups.append({
            "name": f"{name} #{same + 1}" if same else name, "kind": "state" if kind == "state" else "window",
            "window": window, "chunk": chunk, "size": manager.block_size,
        })
    return groups


def describe_hits(scheduler: Scheduler, managers: list[Any]) -> dict[str, Any]:
    """Returns what decides how long a hit is. "predictable_hits": only what each group has cached."""
    coordinator = scheduler.kv_cache_manager.coordinator
    unit = getattr(coordinator.block_pool, "hash_block_size", managers[0].block_size)
    partial = getattr(coordinator, "enable_partial_hash_hits", False)
    looks_ahead = bool(getattr(scheduler, "num_hash_lookahead_tokens", 0))  # a hash depends on tokens after its block
    drops = looks_ahead or any(getattr(manager, "use_eagle", False) for manager in managers)
    alignment = unit if partial else getattr(scheduler, "block_size", managers[0].block_size)
    return {
        "hash_unit": unit, "hit_alignment": alignment,
        "predictable_hits": not (partial or drops or scheduler.connector is not None),
    }


def describe_graphs(config: Any, most_rows: int) -> dict[str, Any]:
    """Returns EngineInfo.graphs if CUDA graphs compute whole steps with prompts; else, or if that is unknown, {}."""
    compilation: Any = getattr(config, "compilation_config", None)
    sizes = sorted(getattr(compilation, "cudagraph_capture_sizes", None) or [])
    mode = getattr(compilation, "cudagraph_mode", None)
    # A worker in another process may have fewer graphs than its configuration says here.
    if not sizes or mode is None or config.parallel_config.world_size > 1 or mode.mixed_mode().name != "FULL":
        return {}
    rows = [size for size in sizes if size <= most_rows]
    return {"rows": rows, "decodes": [], "tokens": sizes[-1], "prompts": most_rows, "launch_ms": 0.0}


def describe(scheduler: Scheduler, managers: list[Any]) -> dict[str, Any]:
    """Returns facts about the engine, with the names of minitui's own. Raises EngineError if a port is not valid. A
    dense model's config has only one rank left; data_parallel_index is the rank nevertheless."""
    config = scheduler.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    served = model.served_model_name
    name = served if isinstance(served, str) else (served or [model.model])[0]
    rank, local_rank = parallel.data_parallel_index, parallel.data_parallel_rank_local or 0
    ports = ports_of(sys.argv, os.environ.get("MINITUI_TELEMETRY_PORT"), rank, local_rank)
    return {
        "engine": f"vLLM {__version__}", "model": os.path.basename(name) if os.path.isdir(name) else name,
        "tokenizer": str(model.tokenizer), "revision": model.tokenizer_revision,
        "dtype": str(model.dtype).split(".")[-1],
        "quantization": model.quantization or "none", "kv_cache_dtype": str(cache.cache_dtype),
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks, "block_size": managers[0].block_size,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens, "max_num_seqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len, "vocab_size": model.get_vocab_size(),
        "prefix_caching": bool(cache.enable_prefix_caching), "device": _device(parallel.world_size),
        "dummy_weights": str(config.load_config.load_format) == "dummy", "rank": rank,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "scheduling_policy": str(config.scheduler_config.policy),
        "graphs": describe_graphs(config, scheduler.max_num_running_reqs),
        "tensor_parallel_size": parallel.tensor_parallel_size, "api_port": ports.api,
        "telemetry_port": ports.telemetry, "telemetry_ports": ports.all,
        "generation": model.get_diff_sampling_param(),
    } | ({} if len(managers) == 1 else {
        "side_groups": describe_groups(managers[1:], scheduler.max_model_len), **describe_hits(scheduler, managers),
        "notes": [f"vLLM has one block pool for all {len(managers)} KV cache groups: a free block is free for each"],
    })


def _device(count: int) -> str:
    from vllm.platforms import current_platform

    try:
        name = str(current_platform.get_device_name() or current_platform.device_type)
    except Exception:
        name = str(current_platform.device_type)
    return name if count == 1 else f"{count} × {name}"
