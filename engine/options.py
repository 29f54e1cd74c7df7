"""Makes an EngineConfig from the options of LLM: those of EngineConfig, and vLLM's names for the same settings."""

from __future__ import annotations

import secrets
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineError

DTYPES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "safetensors", "dummy")
UNSET: tuple[Any, ...] = (None, False, 0, "auto", {}, [], ())

# vLLM's options that mean nothing here, or that have another name. They are accepted if they have a value of UNSET or
# the second value; else the error says what to do.
VLLM_OPTIONS: dict[str, tuple[str, Any]] = {
    "trust_remote_code": ("code from a checkpoint never runs here: the engine has its own models", False),
    "tokenizer": ("the tokenizer is read from the model's directory: save it there", None),
    "tokenizer_mode": ("there is one kind of tokenizer, from tokenizer.json", "auto"),
    "skip_tokenizer_init": ("use load_tokenizer=False", False),
    "revision": ("download the revision (hf download --revision) and give its directory as the model", "main"),
    "tokenizer_revision": ("the tokenizer is read from the model's directory", "main"),
    "download_dir": ("set the environment variable HF_HUB_CACHE", None),
    "pipeline_parallel_size": ("use tensor_parallel_size", 1),
    "data_parallel_size": ("start one LLM for each GPU", 1),
    "enable_lora": ("merge the adapter into the checkpoint (merge_and_unload of peft)", False),
    "speculative_config": ('use speculation="prompt-lookup" and speculative_tokens=N', None),
    "num_gpu_blocks_override": ("use num_blocks", None),
    "kv_cache_memory_bytes": ("use kv_tokens, the size of the KV cache in tokens", None),
    "swap_space": ("preempted requests are computed again, not swapped", 4),
    "cpu_offload_gb": ("weights stay on the device; quantization='fp8' halves them", 0),
    "async_scheduling": ('use overlap="on"', False),
    "runner": ("only generation is supported", "generate"),
    "task": ("only generation is supported", "generate"),
    "hf_overrides": ("change the model's config.json", None),
    "logits_processors": ("use the fields of SamplingParams: logit_bias, allowed_token_ids, bad_words", None),
    "disable_log_stats": ("LLM logs no statistics; each output has metrics", True),
}


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Returns the configuration. Raises EngineError, with the equivalent, for an option that has no meaning here."""
    given = dict(options)
    for name, (sentence, default) in VLLM_OPTIONS.items():
        if name in given and (value := given.pop(name)) not in (*UNSET, default, *([model] * (name == "tokenizer"))):
            raise EngineError(f"{name}={value!r} is not supported: {sentence}")
    load_format = given.pop("load_format", "auto")
    if load_format not in LOAD_FORMATS:
        raise EngineError(f"load_format is {load_format!r}: it must be {', '.join(LOAD_FORMATS)}; weights are "
                          "read from safetensors")  # fmt: skip
    if load_format == "dummy":
        given["dummy_weights"] = True
    if "dtype" in given:
        name = str(given["dtype"]).removeprefix("torch.")
        given["dtype"] = DTYPES.get(name, name)
    if given.get("seed", 0) in (None, -1):
        given["seed"] = secrets.randbits(63)
    # As in vLLM, None means the default.
    given = {name: value for name, value in given.items() if value is not None or name not in known()}
    unknown = sorted(given.keys() - known())
    if unknown:
        raise EngineError(f"LLM has no option {', '.join(unknown)}; the options are {', '.join(known())}")
    return EngineConfig(model=model, **given)


def known() -> list[str]:
    """Returns the names of the options."""
    return [name for name in EngineConfig.__dataclass_fields__ if name != "model"]


def refuse_unknown(function: str, others: dict[str, Any], equivalents: dict[str, str]) -> None:
    """Raise TypeError for arguments that `function` does not have, with the equivalent of vLLM's arguments.

    vLLM's arguments are accepted if they are None or False.
    """
    for name, value in others.items():
        if name not in equivalents:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise TypeError(f"{function}() has no argument {name!r}: {equivalents[name]}")
