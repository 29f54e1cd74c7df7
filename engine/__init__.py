"""minitui's inference engine, which also works without the terminal application.

from engine import LLM, SamplingParams
print(LLM("Qwen/Qwen3-0.6B").generate("The capital of France is", SamplingParams(max_tokens=20)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "CheckpointError", "EngineDead", "EngineError", "InvalidRequest", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # engine.llm imports torch, which takes a second. So engine.llm is imported only when LLM is used.
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
