"""minitui's inference engine, which also works without the terminal application.

from engine import LLM, SamplingParams
print(LLM("Qwen/Qwen3-0.6B").generate("The capital of France is", SamplingParams(max_tokens=20)))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, EngineDead, EngineError, InvalidRequest
from engine.params import RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM, AsyncLLMEngine
    from engine.beam_search import BeamSearchOutput, BeamSearchParams
    from engine.llm import LLM, cleanup_dist_env_and_memory
    from engine.llm_engine import LLMEngine
    from engine.metrics.values import Counter, Gauge, Histogram, Vector
    from engine.options import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from engine.outputs import CompletionOutput, Logprob, RequestOutput
    from engine.profiler import ProfilerConfig
    from engine.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchOutput", "BeamSearchParams", "CheckpointError",
    "CompletionOutput", "Counter", "EngineArgs", "EngineDead", "EngineError", "FlexibleArgumentParser", "Gauge",
    "Histogram", "InvalidRequest", "LLMEngine", "Logprob", "ProfilerConfig", "RequestOutput", "RequestOutputKind",
    "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "Vector", "cleanup_dist_env_and_memory",
]

# These modules are imported only when they are used: importing torch takes a second, and tokenizers 0.1 s.
MODULE_OF = {
    "LLM": "llm", "LLMEngine": "llm_engine", "AsyncLLM": "async_llm", "AsyncLLMEngine": "async_llm",
    "EngineArgs": "options", "AsyncEngineArgs": "options", "FlexibleArgumentParser": "options",
    "TextPrompt": "prompts", "TokensPrompt": "prompts", "BeamSearchParams": "beam_search",
    "BeamSearchOutput": "beam_search", "RequestOutput": "outputs", "CompletionOutput": "outputs",
    "Logprob": "outputs", "ProfilerConfig": "profiler", "cleanup_dist_env_and_memory": "llm",
    "Counter": "metrics.values", "Gauge": "metrics.values", "Histogram": "metrics.values", "Vector": "metrics.values",
}


def __getattr__(name: str) -> Any:
    if name in MODULE_OF:
        return getattr(import_module(f"engine.{MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
