"""Makes an EngineConfig from the options of LLM: those of EngineConfig, and vLLM's names for the same settings."""

from __future__ import annotations

import json
import secrets
import warnings
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

from engine.config import EngineConfig
from engine.errors import EngineError

DTYPES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "safetensors", "hf", "mistral", "dummy")
UNSET: tuple[Any, ...] = (None, False, 0, "auto", {}, [], ())

# vLLM's options that would change replies, or fail later. They are accepted if they have a value of UNSET or the second
# value; else the error says what to do.
REFUSED: dict[str, tuple[str, Any]] = {
    "tokenizer": ("the tokenizer is read from the model's directory: save it there", None),
    "tokenizer_revision": ("the tokenizer is read from the model's directory", "main"),
    "pipeline_parallel_size": ("use tensor_parallel_size", 1),
    "data_parallel_size": ("start one LLM for each GPU", 1),
    "enable_lora": ("merge the adapter into the checkpoint (merge_and_unload of peft)", False),
    "kv_cache_memory_bytes": ("use kv_tokens, the size of the KV cache in tokens", None),
    "runner": ("only generation is supported", "generate"),
    "task": ("only generation is supported", "generate"),
    "profiler_config": ("only LLM and LLMEngine have start_profile", None),
    "logits_processors": ("use the fields of SamplingParams: logit_bias, allowed_token_ids, bad_words", None),
}
# vLLM's options without an effect on replies. A notice gives the reason, once.
NO_EFFECT: dict[str, str] = {
    "trust_remote_code": "code from a checkpoint never runs here: the engine has its own models",
    "enable_trace_replay": "any request may have trace_decode_token_ids",
    "tokenizer_mode": "there is one kind of tokenizer, from tokenizer.json",
    "config_format": "the configuration is read from config.json",
    "download_dir": "models are stored where the environment variable HF_HUB_CACHE says",
    "swap_space": "preempted requests are computed again, not swapped",
    "cpu_offload_gb": "weights stay on the device; quantization='fp8' halves them",
    "enable_expert_parallel": "experts are split like other matrices (tensor_parallel_size)",
    "distributed_executor_backend": "ranks are processes of this machine",
    "disable_custom_all_reduce": "ranks use NCCL or gloo",
    "compilation_config": "there are CUDA graphs, unless enforce_eager=True, and no compiler",
    "max_seq_len_to_capture": "CUDA graphs hold any length",
    "disable_log_stats": "only LLM and LLMEngine count, for get_metrics; each output has metrics",
    "max_logprobs": "a request may ask for at most 20",
    "limit_mm_per_prompt": "prompts are text",
    "mm_processor_kwargs": "prompts are text",
    "disable_chunked_mm_input": "prompts are text",
}


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Returns the configuration. Raises EngineError, with the equivalent, for an option that has no meaning here."""
    given = dict(options)
    if given.get("tokenizer") == model or model.endswith(".gguf"):  # a GGUF file has its tokenizer inside
        given.pop("tokenizer", None)
    for name, (sentence, default) in REFUSED.items():
        if name in given and (value := given.pop(name)) not in (*UNSET, default):
            raise EngineError(f"{name}={value!r} is not supported: {sentence}")
    for name, reason in NO_EFFECT.items():
        if name in given and (value := given.pop(name)) not in UNSET:
            warnings.warn(f"{name}={value!r} has no effect: {reason}", stacklevel=2)
    if (revision := given.pop("revision", None)) and not Path(model).exists():
        model = f"{model}@{revision}"
    load_format = given.pop("load_format", "auto")
    if load_format not in LOAD_FORMATS:
        raise EngineError(f"load_format is {load_format!r}: it must be {', '.join(LOAD_FORMATS)}; weights are "
                          "read from safetensors")
    if load_format == "dummy":
        given["dummy_weights"] = True
    if given.pop("skip_tokenizer_init", False):
        given["load_tokenizer"] = False
    if given.pop("async_scheduling", False):
        given["overlap"] = "on"
    if (blocks := given.pop("num_gpu_blocks_override", None)) is not None:
        given["num_blocks"] = blocks
    given |= _speculation(given.pop("speculative_config", None))
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


def _speculation(config: dict[str, Any] | None) -> dict[str, Any]:
    """Returns vLLM's speculative_config as options of EngineConfig."""
    if config is None:
        return {}
    if (method := config.get("method")) != "ngram":
        raise EngineError(f"speculative_config has the method {method!r}: only ngram is supported (prompt lookup)")
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        if config.get(name) is not None:
            warnings.warn(f"{name} has no effect: drafts follow the longest repeated text", stacklevel=2)
    tokens = config.get("num_speculative_tokens")
    return {"speculation": "prompt-lookup"} | ({} if tokens is None else {"speculative_tokens": tokens})


class EngineArgs(EngineConfig):
    """The options of LLM as one object, or as arguments of a command line. `LLM(**asdict(args))` uses them."""

    __setattr__ = object.__setattr__  # an EngineConfig cannot be changed, these options can

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(**asdict(engine_config(model, options)))

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Add an argument for each option to an argparse parser, and return the parser."""
        for name, kind in get_type_hints(EngineConfig).items():
            flags = [f"--{spelling}" for spelling in dict.fromkeys((name.replace("_", "-"), name))]
            if kind is bool:
                parser.add_argument(*flags, action=BooleanOptionalAction, default=getattr(EngineConfig, name))
            else:
                of = next((of for of in (int, float, str) if of in (kind, *get_args(kind))), json.loads)
                parser.add_argument(*flags, type=of, default=getattr(EngineConfig, name))
        parser.add_argument("--trust-remote-code", action="store_true", help=NO_EFFECT["trust_remote_code"])
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> EngineArgs:
        """Returns the options among parsed arguments; other arguments are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in EngineConfig.__dataclass_fields__})


AsyncEngineArgs = EngineArgs
FlexibleArgumentParser = ArgumentParser  # add_cli_args adds both spellings, --max-model-len and --max_model_len


def known() -> list[str]:
    return [name for name in EngineConfig.__dataclass_fields__ if name != "model"]


def refuse_unknown(function: str, others: dict[str, Any], equivalents: dict[str, str]) -> None:
    """Raise TypeError for arguments that `function` does not have, with the equivalent of vLLM's arguments. vLLM's
    arguments are accepted if they are None or False."""
    for name, value in others.items():
        if name not in equivalents:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise TypeError(f"{function}() has no argument {name!r}: {equivalents[name]}")
