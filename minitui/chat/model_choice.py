"""Chooses the model that a command runs, its default system prompt and its known questions."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import CheckpointError
from engine.info import EngineInfo
from engine.text import early_tokenizer
from minitui import tutor
from minitui.chat.prompt import Codec
from minitui.protocol import ServerInfo

PLAIN_SYSTEM_PROMPT = "You are a helpful assistant. Answer clearly and briefly."


@dataclass(frozen=True)
class Choice:
    """A model, its system prompt, and its names in the application."""

    name: str  # a directory, or a repository on the hub; the engine finds the files
    label: str  # the name that the application shows; empty: the engine's name for the model
    system: str
    speaker: str  # the name shown beside the model's answers
    known_questions: list[str] = field(default_factory=list)


def choose_model(name: str | None, system: str | None = None) -> Choice:
    """Returns the choice for `name`: a directory, or a model in the local cache or on the hub; None: the bundled model.
    Raises CheckpointError if the bundled model is missing."""
    if name is not None:
        return _plain(name, system)
    path = tutor.model_dir()
    if not (path / "config.json").exists():
        raise CheckpointError(f"the bundled model is missing at {path}: reinstall minitui, or name a model (--model)")
    return _bundled(str(path), "tutor", system)


def served_choice(info: ServerInfo, system: str | None) -> Choice:
    """Returns the choice for the model of a minitui server, from the server's `info`."""
    return _bundled("", "", system) if info.bundled else _plain("", system)


def _bundled(name: str, label: str, system: str | None) -> Choice:
    prompt = tutor.DEFAULT_SYSTEM_PROMPT if system is None else system
    return Choice(name, label, prompt, "tutor", tutor.known_questions())


def _plain(name: str, system: str | None) -> Choice:
    return Choice(name, "", PLAIN_SYSTEM_PROMPT if system is None else system, "model")


def load_codec(info: EngineInfo) -> Codec:
    """Returns the tokenizer of the checkpoint that the engine has loaded. Raises CheckpointError."""
    tokenizer = early_tokenizer.load(info.model_dir)
    tokenizer.context = info.max_model_len or None
    tokenizer.start_rendering()
    return tokenizer
