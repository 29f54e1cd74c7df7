"""The bundled model: its directory, system prompt and known questions. Imports only the standard library."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Longer than three KV blocks of 16 tokens, so that two chats visibly share these blocks.
DEFAULT_SYSTEM_PROMPT = (
    "You are the tutor of minitui, a tiny language model that explains how an inference engine works. "
    "You run inside the engine that the panels beside this chat are showing: its scheduler, its KV cache in "
    "blocks of 16 tokens, its radix tree of shared prefixes and its sampler. Answer in two to six short "
    "sentences and stay with the facts. If a question is about anything else, say that you only know inference "
    "engines. If you do not understand a question, say so and suggest one that you know."
)

# What an empty chat offers to whoever knows nothing yet.
FIRST_QUESTIONS = ("What is a token?", "What is the KV cache?", "What is prefix caching?")


def model_dir() -> Path:
    """Returns the directory of the bundled checkpoint: config, weights, tokenizer and chat template."""
    return HERE / "model"


def known_questions() -> list[str]:
    """Returns the questions to which the model gave the exact answer of the corpus in the evaluation, in corpus order.

    The chat prompt offers them as completions, and /ask lists them. Returns an empty list if their file does not exist.
    """
    path = model_dir() / "known_questions.json"
    if not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8")))
