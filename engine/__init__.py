"""minitui's inference engine, which also works without the terminal application.

from engine import LLM, SamplingParams
print(LLM("Qwen/Qwen3-0.6B").generate("The capital of France is", SamplingParams(max_tokens=20)))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM", "AsyncLLM", "CheckpointError", "CompletionOutput", "EngineDead", "EngineError", "InvalidRequest", "Logprob",
    "RequestOutput", "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip

# These modules are imported only when they are used: importing torch takes a second, and tokenizers 0.1 s.
MODULE_OF = {
    "LLM": "engine.llm", "AsyncLLM": "engine.async_llm", "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs", "Logprob": "engine.outputs",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in MODULE_OF:
        return getattr(import_module(MODULE_OF[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
