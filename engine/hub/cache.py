"""The snapshots of models in the local Hugging Face cache, and the weight files that are missing in each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.files import CONFIG, INDEX, missing_weights

DEFAULT = "main"  # the branch that is downloaded if the user names no revision
SHORTEST_COMMIT = 7  # digits of a commit that are enough to name it
COMMIT_BYTES = 100  # a file in refs/ holds one commit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One revision of a repository in the local cache."""

    repository: str
    path: Path
    missing: tuple[str, ...]  # names of the weight files that are missing
    refs: tuple[str, ...] = ()  # the branches and tags that point to it, as in "main"

    @property
    def commit(self) -> str:
        """The commit on the hub."""
        return self.path.name

    def is_revision(self, revision: str) -> bool:
        """Returns True if `revision` is a branch or tag of this snapshot, or its commit (7 digits or more). "", no
        revision, is that of branch main, or of no branch."""
        if not revision:
            return DEFAULT in self.refs or not self.refs
        return revision in self.refs or (len(revision) >= SHORTEST_COMMIT and self.commit.startswith(revision))

    def complete(self, weights: bool = True) -> bool:
        """Returns True if no weight file is missing. With weights=False, return True if there is a tokenizer."""
        return not self.missing if weights else (self.path / "tokenizer.json").is_file()


def cache_directory() -> Path:
    """Returns the directory of the Hugging Face cache. Environment variables can change it."""
    for variable, subfolder in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / subfolder
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def cached_snapshots(pattern: str = "models--*") -> list[Snapshot]:
    """Returns every snapshot in the local cache that has a config.json: those of branch main first, then the newest."""
    found = []
    for folder in cache_directory().glob(pattern):
        refs = _refs(folder)
        for config in folder.glob(f"snapshots/*/{CONFIG}"):
            if config.is_file():
                names = tuple(refs.get(config.parent.name, ()))
                missing = tuple(missing_files(config.parent))
                snapshot = Snapshot(repository_of(folder), config.parent, missing, names)
                found.append((DEFAULT in names, config.stat().st_mtime, snapshot))
    return [snapshot for *_, snapshot in sorted(found, key=lambda found: found[:2], reverse=True)]


def snapshots_of(name: str, revision: str = "") -> list[Snapshot]:
    """Returns the cached snapshots of a model, in the order of `cached_snapshots`. A name without an organisation
    matches the models of this name from all organisations. `revision`: as for `Snapshot.is_revision`."""
    found = cached_snapshots("models--" + name.replace("/", "--") if "/" in name else f"models--*--{name}")
    return [snapshot for snapshot in found if snapshot.is_revision(revision)]


def _refs(folder: Path) -> dict[str, list[str]]:
    """Returns {commit: its branches and tags}."""
    found: dict[str, list[str]] = {}
    for path in sorted((folder / "refs").rglob("*")):
        if path.is_file() and path.stat().st_size <= COMMIT_BYTES:
            commit = path.read_text(encoding="utf-8", errors="replace").strip()
            found.setdefault(commit, []).append(path.relative_to(folder / "refs").as_posix())
    return found


def repository_of(folder: Path) -> str:
    """Returns the name of the repository that has this folder in the cache."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def missing_files(directory: Path) -> list[str]:
    """Returns the names of the missing weight files, or the name of the index if it cannot be read."""
    try:
        return missing_weights(directory)
    except CheckpointError:
        return [INDEX]
