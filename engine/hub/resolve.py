"""Finds a model's directory: at a path, in the local Hugging Face cache, or on the hub (engine/hub/download.py).

Only a download needs huggingface_hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import CheckpointError
from engine.fields import shown
from engine.hub.cache import Snapshot, cache_directory, snapshots_of
from engine.hub.gguf_files import file_in, in_cache, is_gguf
from engine.progress import Progress

# The beginning of a name without an organisation -> the organisation.
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama", "mistral": "mistralai"}
NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,99}")  # a branch, a tag or a commit
LONGEST_NAME = 96  # characters; the limit of the hub


def resolve_model(name: str, on_progress: Progress | None = None, weights: bool = True, tokenizer: bool = True) -> Path:
    """Returns the directory of the checkpoint `name`: a path, or a name like "Qwen3-8B" or "Qwen/Qwen3-8B".

    A path may also be a GGUF file, or a directory with one; it is unpacked to the cache (engine/gguf/checkpoint.py). So
    is a GGUF file in the local Hugging Face cache, which `cached` of engine/hub/gguf_files.py names.

    A name may end in @ and a branch, a tag or a commit, as in "Qwen/Qwen3-8B@main".

    A path is tried first, then the local Hugging Face cache, then the hub. A model on the hub is downloaded to the
    cache, and an interrupted download is continued. An unsupported model is refused before its weights are downloaded.
    Raises CheckpointError, with the reason, if no directory can be returned.

    `weights`: False if config.json and the tokenizer are enough. `tokenizer`: False if no tokenizer is needed.
    """
    directory = _as_directory(name)
    file = in_cache(name) if directory is None else file_in(directory)
    if file is not None:
        from engine.gguf.checkpoint import as_checkpoint

        return as_checkpoint(file, on_progress, weights)
    if directory is not None:
        return directory
    name, revision = _parts(name)
    found = snapshots_of(name, revision)
    whole = next((snapshot for snapshot in found if snapshot.complete(weights)), None)
    if whole is not None:
        return whole.path
    from engine.hub.download import Download

    repository = _repository(name, found)
    partial = next((snapshot for snapshot in found if snapshot.repository == repository), None)
    return Download(repository, revision, partial, on_progress).run(weights, tokenizer)


def _as_directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path
        if name and path.is_file() and is_gguf(path):
            return path
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, not permitted, or an unknown user's home
        raise CheckpointError(
            f"{shown(name)} is not a directory ({shown(str(error))[1:-1]}): give the directory that holds config.json, "
            "or the name of a model, as in Qwen/Qwen3-0.6B"
        ) from None
    if is_file:
        raise CheckpointError(f"{path} is a file: give the directory that holds config.json and the weights")
    return None


def _parts(name: str) -> tuple[str, str]:
    """Returns the name and the revision; "" if there is none. Raises CheckpointError if one of them is not valid."""
    plain, at, revision = name.partition("@")
    _check_name(plain, name)
    if at and (not REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(
            f"{shown(name)} names no valid revision: a branch, a tag or a commit follows the @, as in {plain}@main"
        )
    return plain, revision


def _check_name(name: str, given: str) -> None:
    plain, colon, file = name.rpartition(":")
    if colon and "/" not in file and NAME.fullmatch(plain):
        plain = re.sub(r"[-_.]gguf$", "", plain, flags=re.IGNORECASE)
        raise CheckpointError(
            f"{shown(given)} is not a directory, and a name with a colon means one file of a GGUF repository. minitui "
            "downloads no GGUF files: download the file and give its path, or give the name of the repository with the "
            f"safetensors, as in {plain}"
        )
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME or {".", ".."} & set(name.split("/")):
        raise CheckpointError(
            f"{shown(given)} is not a directory, and not a valid name of a model on the hub: a name looks like "
            "Qwen/Qwen3-0.6B"
        )


def _repository(name: str, found: list[Snapshot]) -> str:
    if "/" in name:
        return name
    for prefix, organisation in ORGANISATIONS.items():
        if name.lower().startswith(prefix):
            return f"{organisation}/{name}"
    if found:
        return found[0].repository
    raise CheckpointError(
        f"{name!r} is neither a directory nor in the cache {cache_directory()}: give a directory, or the full name on "
        f"the hub, as in Qwen/{name}"
    )
