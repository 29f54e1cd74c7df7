"""What the product knows about a checkpoint beyond the engine: its default prompt and known questions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from minitui import tutor
from minitui.chat.prompt import Codec

PLAIN_SYSTEM_PROMPT = "You are a helpful assistant. Answer clearly and briefly."


@dataclass(frozen=True)
class Choice:
    """The model a command runs on: `name` is what the engine resolves."""

    name: str
    label: str  # as it is shown; empty: as the engine calls it
    system: str
    speaker: str
    known_questions: list[str] = field(default_factory=list)


def choose_model(name: str | None, system: str | None = None) -> Choice:
    """The bundled model for None; else `name` as the engine resolves it: a directory, the local cache, or the hub."""
    if name is not None:
        return Choice(name, "", PLAIN_SYSTEM_PROMPT if system is None else system, "model")
    path = tutor.model_dir()
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"the bundled model is missing at {path}: name one with --model, or install minitui again"
        )
    prompt = tutor.DEFAULT_SYSTEM_PROMPT if system is None else system
    return Choice(str(path), "tutor", prompt, "tutor", tutor.known_questions())


def load_codec(info: dict[str, Any]) -> Codec:
    """The tokenizer of the checkpoint that the engine has loaded; raises CheckpointError."""
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(Path(info["model_dir"]))
    tokenizer.context = info.get("max_model_len")
    tokenizer.start_rendering()
    return tokenizer
