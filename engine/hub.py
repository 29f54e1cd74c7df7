"""Where a model's files are: a directory, the local Hugging Face cache, or the hub (engine/hub_download.py).

Looking in the cache needs no library; downloading needs huggingface_hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.fields import shown
from engine.files import CONFIG, INDEX, missing_weights

Progress = Callable[[dict[str, Any]], None]

# A bare name is looked for under the organisation that publishes models called so.
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama", "mistral": "mistralai"}
NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
LONGEST_NAME = 96  # the hub's own limit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One revision of a repository in the local cache."""

    repository: str
    path: Path
    missing: tuple[str, ...]  # files of weights that are not there yet

    def complete(self, weights: bool = True) -> bool:
        """Whether the download has ended; without weights: that of config.json and the tokenizer."""
        return not self.missing if weights else (self.path / "tokenizer.json").is_file()


def resolve_model(name: str, on_progress: Progress | None = None, weights: bool = True, tokenizer: bool = True) -> Path:
    """The directory with the checkpoint called `name`: a directory, "Qwen3-8B" or "Qwen/Qwen3-8B".

    Looked for in this order: as a path, in the local Hugging Face cache, on the hub (downloaded to the cache, with
    progress; what an interrupted download left is kept). A model on the hub that is not supported is refused before
    its weights are downloaded. Raises CheckpointError with what was tried.

    `weights`: False if config.json and the tokenizer are enough. `tokenizer`: False if it is not needed.
    """
    directory = _as_directory(name)
    if directory is not None:
        return directory
    _check_name(name)
    found = _cached(name)
    whole = next((snapshot for snapshot in found if snapshot.complete(weights)), None)
    if whole is not None:
        return whole.path
    from engine.hub_download import Download

    repository = _repository(name, found)
    begun = next((snapshot for snapshot in found if snapshot.repository == repository), None)
    return Download(repository, begun, on_progress).run(weights, tokenizer)


def cache_directory() -> Path:
    """Hugging Face's cache, where its own variables say."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / below
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def find_cached(name: str) -> Path | None:
    """The newest complete snapshot of a model in the local cache; a bare name may be of any organisation."""
    return next((snapshot.path for snapshot in _cached(name) if snapshot.complete()), None)


def cached_snapshots(pattern: str = "models--*") -> list[Snapshot]:
    """Every snapshot in the local cache that has a config.json, the newest first."""
    found = [
        (config.stat().st_mtime, Snapshot(_name_of(folder), config.parent, tuple(_missing(config.parent))))
        for folder in cache_directory().glob(pattern)
        for config in folder.glob(f"snapshots/*/{CONFIG}")
        if config.is_file()
    ]
    return [snapshot for _, snapshot in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _as_directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, not permitted, or the home of an unknown user
        raise CheckpointError(
            f"{shown(name)} is not a directory ({shown(str(error))[1:-1]}): give the directory that holds config.json, "
            "or the name of a model, as in Qwen/Qwen3-0.6B"
        ) from None
    if is_file:
        raise CheckpointError(f"{path} is a file: give the directory that holds config.json and the weights")
    return None


def _check_name(name: str) -> None:
    plain, colon, file = name.rpartition(":")
    if colon and "/" not in file and NAME.fullmatch(plain):
        plain = re.sub(r"[-_.]gguf$", "", plain, flags=re.IGNORECASE)
        raise CheckpointError(
            f"{shown(name)} is not a directory, and a name with a colon means one file of a GGUF repository: GGUF and "
            f"quantised files are not read here; name the repository with the plain weights, as in {plain}"
        )
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME or {".", ".."} & set(name.split("/")):
        raise CheckpointError(
            f"{shown(name)} is not a directory, and cannot be the name of a model on the hub either: a name is like "
            "Qwen/Qwen3-0.6B"
        )


def _cached(name: str) -> list[Snapshot]:
    return cached_snapshots("models--" + name.replace("/", "--") if "/" in name else f"models--*--{name}")


def _missing(directory: Path) -> list[str]:
    try:
        return missing_weights(directory)
    except CheckpointError:  # the index cannot be read
        return [INDEX]


def _name_of(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _repository(name: str, begun: list[Snapshot]) -> str:
    if "/" in name:
        return name
    for prefix, organisation in ORGANISATIONS.items():
        if name.lower().startswith(prefix):
            return f"{organisation}/{name}"
    if begun:
        return begun[0].repository
    raise CheckpointError(
        f"{name!r} is neither a directory nor in the cache {cache_directory()}: give a directory, or the full name on "
        f"the hub, as in Qwen/{name}"
    )
