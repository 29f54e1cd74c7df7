"""Finds GGUF files: at a path, in a directory, and in the local Hugging Face cache."""

from __future__ import annotations

import glob
from pathlib import Path

from engine.errors import CheckpointError
from engine.files import CONFIG
from engine.gguf.header import MAGIC, model_name
from engine.hub.cache import cache_directory, repository_of

IMAGES = "mmproj"  # the beginning of the name of a file that reads images for a model beside it


def is_gguf(path: Path) -> bool:
    """Returns True for a GGUF file. Its name may have no ending: Ollama names files by their hashes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def models_in(directory: Path, pattern: str = "*.gguf") -> list[Path]:
    """Returns the GGUF files of a directory; of a model that is split into several files, only the first one."""
    found = sorted(each for each in directory.glob(pattern) if not each.name.startswith(IMAGES) and each.is_file())
    return list({(each.parent, model_name(each)): each for each in reversed(found)}.values())[::-1]


def file_in(path: Path) -> Path | None:
    """Returns the GGUF file that the path means; None if it is a directory with a checkpoint, or without GGUF files."""
    if path.is_file():
        return path
    found = models_in(path)
    if not found or ((path / CONFIG).exists() and any(path.glob("*.safetensors"))):
        return None
    if len(found) > 1:
        raise CheckpointError(f"{path} has {len(found)} GGUF files: name one of them, as in --model {found[0]}")
    return found[0]


def cached(pattern: str = "models--*") -> dict[str, Path]:
    """Returns the GGUF files of the local cache by the names that --model accepts, those of older snapshots first. A
    name is that of the repository, with the file in it if there are several, as in Org/Name-GGUF/name-Q8_0.gguf."""
    names: dict[str, Path] = {}
    snapshots = (path for path in cache_directory().glob(f"{pattern}/snapshots/*") if not (path / CONFIG).is_file())
    for snapshot in sorted(snapshots, key=lambda path: path.stat().st_mtime):
        repository = repository_of(snapshot.parents[1])
        files = [*models_in(snapshot), *models_in(snapshot, "*/*.gguf")]
        for file in files:
            one = repository if len(files) == 1 else f"{repository}/{file.relative_to(snapshot)}"
            names[one] = file
    return names


def in_cache(name: str) -> Path | None:
    """Returns the file of a name as in `cached`; None if there is none. Raises CheckpointError if it means several."""
    repository = "/".join(name.split("/")[:2])
    found = cached("models--" + glob.escape(repository.replace("/", "--"))) if "/" in name else {}
    if name not in found and name == repository and found:
        raise CheckpointError(f"{name} has {len(found)} GGUF files in the cache: name one of them, {', '.join(found)}")
    return found.get(name)
