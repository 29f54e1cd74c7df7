"""The classes of engine/params.py under the name that their module has in vLLM."""

from engine.params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
