"""The snapshots of models in the local Hugging Face cache, and the weight files that are missing in each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.files import CONFIG, INDEX, missing_weights


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One revision of a repository in the local cache."""

    repository: str
    path: Path
    missing: tuple[str, ...]  # names of the weight files that are missing

    def complete(self, weights: bool = True) -> bool:
        """Return True if no weight file is missing. With weights=False, return True if there is a tokenizer."""
        return not self.missing if weights else (self.path / "tokenizer.json").is_file()


def cache_directory() -> Path:
    """Return the directory of the Hugging Face cache. Environment variables can change it."""
    for variable, subfolder in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / subfolder
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def cached_snapshots(pattern: str = "models--*") -> list[Snapshot]:
    """Return every snapshot in the local cache that has a config.json, the newest first."""
    found = [
        (config.stat().st_mtime, Snapshot(_name_of(folder), config.parent, tuple(missing_files(config.parent))))
        for folder in cache_directory().glob(pattern)
        for config in folder.glob(f"snapshots/*/{CONFIG}")
        if config.is_file()
    ]
    return [snapshot for _, snapshot in sorted(found, key=lambda pair: pair[0], reverse=True)]


def snapshots_of(name: str) -> list[Snapshot]:
    """Return the cached snapshots of a model, the newest first. A name without an organisation matches the models of
    this name from all organisations."""
    return cached_snapshots("models--" + name.replace("/", "--") if "/" in name else f"models--*--{name}")


def _name_of(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def missing_files(directory: Path) -> list[str]:
    """Return the names of the missing weight files, or the name of the index if it cannot be read."""
    try:
        return missing_weights(directory)
    except CheckpointError:
        return [INDEX]
