"""Says which supported family is the nearest to an architecture that is not supported."""

from __future__ import annotations

import itertools
import re

from engine.model.families import ARCHITECTURES

# Architecture -> the beginnings of the names of others that are built like it, but whose names differ.
RELATIVES = {
    "LlamaForCausalLM": "apertus arcee baichuan ernie idefics internlm llava minicpm mllama orion smolvlm yi",
    "Qwen3ForCausalLM": "hunyuan internvl",
    "Qwen2ForCausalLM": "mimo",
    "Qwen3MoeForCausalLM": "bailing deepseek dots kimi minimax",
    "MixtralForCausalLM": "dbrx grok",
    "MistralForCausalLM": "pixtral voxtral",
    "Gemma2ForCausalLM": "paligemma",
    "Glm4ForCausalLM": "chatglm",
    "StableLmForCausalLM": "gptneox",
    "Starcoder2ForCausalLM": "gptbigcode",
}
GENERATES = ("CausalLM", "ConditionalGeneration")  # what follows "For" in the name of a model that generates text
WITH_OUTPUT = ("LMHead", "Chat", "Omni")  # models named …Model that generate text


def nearest(name: str) -> str:
    """Returns clauses that say what the model `name` is, if it generates no text, and which family is the nearest."""
    _, made, purpose = name.partition("For")
    what = ""
    if made and not purpose.startswith(GENERATES):
        what = ", which is not a model that generates text"
    elif name.endswith("Model") and not any(each in name for each in WITH_OUTPUT):
        what = ", a model without an output matrix, such as an embedding model, which generates no text"
    found = _nearest(name)
    if found is None:
        return what
    family = ARCHITECTURES[found]
    return f"{what}, and the nearest family is {family.title} (for example {family.example})"


def _nearest(name: str) -> str | None:
    alike = [each for each in ARCHITECTURES if _letters(name).startswith(_letters(each))]
    if not alike:
        relatives = {stem: each for each, stems in RELATIVES.items() for stem in stems.split()}
        return next((each for stem, each in relatives.items() if _stem(name).startswith(stem)), None)

    def key(other: str) -> tuple[bool, int, int]:
        pairs = zip(_stem(name), _stem(other), strict=False)
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return ("moe" in _stem(other)) == ("moe" in _stem(name)), common, _version(other)

    return max(alike, key=key)


def _stem(name: str) -> str:
    """Returns the name of the family in an architecture's name, as in "qwen3moe" of Qwen3MoeForCausalLM."""
    return name.partition("For")[0].removesuffix("Model").lower().replace("_", "")


def _letters(name: str) -> str:
    return re.match("[a-z]*", _stem(name))[0]  # type: ignore[index]


def _version(name: str) -> int:
    return int((re.search("[0-9]", name) or "0")[0])
