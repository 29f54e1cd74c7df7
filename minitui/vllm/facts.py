"""Facts about vLLM's engine: whether minitui can show this model, and what the panels say about the engine."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from vllm import __version__
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from engine.errors import EngineError
from minitui.vllm.ports import ports_of

TRIED = "0.25.1"
OF_POOL = ("get_new_blocks", "cache_full_blocks", "evict_blocks")
OF_CACHING = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size")  # of cache_full_blocks
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


def only_manager(scheduler: Scheduler) -> Any:
    """Returns the manager of the only group of KV caches. Raises ValueError if minitui cannot show this model."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1:
        raise ValueError(f"this model has {len(managers)} KV cache groups; minitui shows models with one")
    if not isinstance(managers[0].kv_cache_spec, FullAttentionSpec | MLAAttentionSpec):
        kind = type(managers[0].kv_cache_spec).__name__
        raise ValueError(f"the KV cache of this model is a {kind}; minitui shows full attention only")
    return managers[0]


def describe(scheduler: Scheduler, block_size: int) -> dict[str, Any]:
    """Returns facts about the engine, with the names of minitui's own. Raises EngineError if a port is not valid.

    A dense model's config has only one rank left; data_parallel_index is the rank nevertheless.
    """
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
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks, "block_size": block_size,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens, "max_num_seqs": scheduler.max_num_running_reqs,
        "max_model_len": scheduler.max_model_len, "vocab_size": model.get_vocab_size(),
        "prefix_caching": bool(cache.enable_prefix_caching), "device": _device(parallel.world_size),
        "dummy_weights": str(config.load_config.load_format) == "dummy", "rank": rank,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "scheduling_policy": str(config.scheduler_config.policy),
        "tensor_parallel_size": parallel.tensor_parallel_size, "api_port": ports.api,
        "telemetry_port": ports.telemetry, "telemetry_ports": ports.all,
        "generation": model.get_diff_sampling_param(),
    }  # fmt: skip


def _device(count: int) -> str:
    from vllm.platforms import current_platform

    try:
        name = str(current_platform.get_device_name() or current_platform.device_type)
    except Exception:
        name = str(current_platform.device_type)
    return name if count == 1 else f"{count} × {name}"
