"""Finds a model's directory: at a path, in the local Hugging Face cache, or on the hub.

From the hub, the configuration and the tokenizer are downloaded first, then the weights. huggingface_hub, which only a
download needs, transfers the files. A connection that breaks off is resumed where it ended; a start after an
interrupted download transfers only the files that are not complete. The weights' hashes are compared with the hub's.
"""

from __future__ import annotations

import glob
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage
from typing import Any

from engine.errors import CheckpointError
from engine.fields import listed, shown
from engine.files import ADAPTER, CONFIG, INDEX, SINGLE, shard_names
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


# The files to download besides config.json and the weights.
DESCRIPTION = {
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", INDEX, "LICENSE", "LICENSE.txt", "LICENSE.md",
}
OTHER_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pth", ".pt", ".onnx", ".h5", ".msgpack")
POLL_SECONDS = 0.25
SPEED_SECONDS = 10.0  # the speed is the mean over this time
HASHED_AT_ONCE = 4  # files; a core computes SHA-256 of 0.5 to 2 GB per second
MAX_ERROR_TEXT = 300  # characters of a library's error in our message


class Download:
    """The download of one repository. `revision`: a branch, tag or commit; "": the main branch. `begun`: the snapshot
    of an interrupted download, if there is one."""

    def __init__(self, repository: str, revision: str, begun: Snapshot | None, on_progress: Progress | None) -> None:
        self._repository = repository
        self._revision = revision
        self._begun = begun
        self._on_progress = on_progress
        self._cache = cache_directory()

    def run(self, weights: bool, tokenizer: bool) -> Path:
        """Download the missing files; return the snapshot's directory. `weights`: False leaves the weights out.
        `tokenizer`: True also checks that the tokenizer can be loaded. Raises CheckpointError. An unsupported model is
        refused before any weights are downloaded."""
        import huggingface_hub as hub  # only a download needs this large library
        from huggingface_hub.utils import disable_progress_bars  # some versions export it only here

        disable_progress_bars()
        try:
            revision = self._revision or None
            files = hub.HfApi().model_info(self._repository, revision=revision, files_metadata=True).siblings or []
            sizes = {file.rfilename: file.size or 0 for file in files}
            self._check_listing(sizes, weights)
            config = hub.hf_hub_download(self._repository, CONFIG, revision=revision, cache_dir=self._cache)
            directory = Path(config).parent
            self._fetch(hub, directory, sorted(DESCRIPTION & sizes.keys()))
            self._check_description(directory, tokenizer)
            if weights:
                hashes = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
                self._fetch_weights(hub, directory, sizes, hashes)
        except CheckpointError:
            raise
        except Exception as error:  # from the library, its HTTP client or the operating system
            raise CheckpointError(f"{self._where()}, and {self._reason(error)}") from error
        return directory

    def _check_listing(self, sizes: dict[str, int], weights: bool) -> None:
        """Refuse a repository without a checkpoint in safetensors."""
        if CONFIG in sizes and (not weights or {SINGLE, INDEX} & sizes.keys()):
            return
        if ADAPTER in sizes:
            raise CheckpointError(
                f"{self._repository} on the hub is a LoRA adapter ({ADAPTER}), without the model: merge both with "
                "merge_and_unload of peft, save the result with its tokenizer, and give its directory"
            )
        missing = CONFIG if CONFIG not in sizes else f"{SINGLE} or {INDEX}"
        others = [name for name in sizes if name.endswith(OTHER_WEIGHTS)]
        raise CheckpointError(
            f"{self._repository} on the hub has no {missing}"
            + (f", only {shown(listed(others))[1:-1]}" if others else "")
            + ": minitui downloads weights in safetensors; name the repository with these, or download a GGUF file and "
            "give its path"
        )

    def _check_description(self, directory: Path, tokenizer: bool) -> None:
        from engine.model.hf.config import read_model_config
        from engine.text.tokenizer import Tokenizer

        read_model_config(directory)
        if tokenizer:
            Tokenizer(directory)

    def _fetch_weights(self, hub: Any, directory: Path, sizes: dict[str, int], hashes: dict[str, str]) -> None:
        names = [SINGLE] if SINGLE in sizes else shard_names(directory / INDEX)
        absent = [name for name in names if name not in sizes]
        if absent:
            raise CheckpointError(
                f"{self._repository} on the hub lacks {listed(absent)}, which its {INDEX} names: use another model"
            )
        new = [name for name in names if not (directory / name).is_file()]
        total, needed = (sum(sizes[name] for name in group) for group in (names, new))
        free = disk_usage(self._cache).free
        if needed > free:
            raise CheckpointError(
                f"{self._repository} needs {needed / 1e9:.2f} GB more in {self._cache}, where {free / 1e9:.2f} GB are "
                "free: delete files on that disk, or set HF_HOME to a folder on a disk with more space"
            )
        with _Watch(directory.parents[1] / "blobs", self._repository, total, total - needed, self._on_progress):
            self._fetch(hub, directory, names)
        if self._on_progress is not None:
            text = f"comparing the hashes of {self._repository} with the hub's"
            self._on_progress({"stage": "check", "done": 0, "total": 0, "text": text})
        for name in new:
            bytes_ = (directory / name).stat().st_size
            if bytes_ != sizes[name]:
                self._discard(directory / name, f"{bytes_:,} bytes, and the hub announced {sizes[name]:,}")
        with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            for name, found in zip(new, pool.map(_sha256, [directory / name for name in new]), strict=True):
                expected = hashes.get(name, found)
                if found != expected:
                    told = f"SHA-256 {found[:12]}…, and the hub announced {shown(expected[:12])[1:-1]}…"
                    self._discard(directory / name, told)

    def _discard(self, path: Path, what: str) -> None:
        """Delete a file that is not the hub's, and raise CheckpointError."""
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path.name} of {self._repository} arrived damaged: it has {what}. It was deleted: start again"
        )

    def _fetch(self, hub: Any, directory: Path, names: list[str]) -> None:
        """Download files of the snapshot's revision, several at a time."""
        patterns = [glob.escape(name) for name in names]
        if patterns:
            hub.snapshot_download(
                self._repository, revision=directory.name, allow_patterns=patterns, cache_dir=self._cache
            )
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:  # the library returns an incomplete snapshot if the hub fails during the download
            raise CheckpointError(f"the download of {self._repository} ended without {listed(absent)}: start again")

    def _where(self) -> str:
        """Returns a clause that says how much of the model is in the cache."""
        if self._begun is None:
            return f"{self._repository} is neither a directory nor in the cache {self._cache}"
        missing = self._begun.missing
        what = f"its download did not finish (missing: {listed(list(missing))})" if missing else "it is incomplete"
        return f"{self._repository} is in the cache {self._cache}, but {what}; the rest must be downloaded"

    def _reason(self, error: Exception) -> str:
        """Returns a phrase that says why the download failed and what to do."""
        kind, status, text = type(error).__name__, _status(error), " ".join(str(error).split())[:MAX_ERROR_TEXT]
        if kind == "RevisionNotFoundError" and self._revision:
            return f"the hub has no revision {self._revision} of it: name another one, or leave out @{self._revision}"
        if kind == "GatedRepoError" or status == 403:
            return (
                f"the hub denies access to the model ({kind}): accept the model's terms on its page, and log in with "
                "`hf auth login`"
            )
        if kind in ("RepositoryNotFoundError", "RevisionNotFoundError") or status in (401, 404):
            return (
                f"the hub does not have the model or denies access to it ({kind}): check the name, and log in with "
                "`hf auth login` if the model is private or gated"
            )
        if status == 429:
            return "the hub refuses more requests for now (429): try again in some minutes, or log in: `hf auth login`"
        if status is not None and status >= 500:
            return f"the hub reports an internal error ({status}): try again later; files that are complete are kept"
        if kind == "OfflineModeIsEnabled":
            return "HF_HUB_OFFLINE is set, so the hub is not used: unset it, or give a directory"
        return (
            f"the hub could not be reached ({kind}: {text}): connect to the internet, or give a directory; files that "
            "are complete are kept"
        )


def _status(error: BaseException | None) -> int | None:
    """Returns the HTTP status of the response that caused an error; None if there was no response."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


class _Watch:
    """Reports the progress of a download, with its speed over SPEED_SECONDS. The size of the folder is measured."""

    def __init__(self, folder: Path, name: str, total: int, done: int, on_progress: Progress | None) -> None:
        self._folder, self._name, self._total, self._on_progress = folder, name, total, on_progress
        self._others = _size(folder) - done  # bytes of the folder's other files
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="download progress")

    def __enter__(self) -> _Watch:
        if self._on_progress is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._on_progress is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._on_progress is not None
        seen: deque[tuple[float, int]] = deque(maxlen=round(SPEED_SECONDS / POLL_SECONDS))  # (time, bytes)
        while not self._ended.wait(POLL_SECONDS):
            done = max(0, min(self._total, _size(self._folder) - self._others))
            seen.append((time.monotonic(), done))
            text = f"downloading {self._name}: {done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
            self._on_progress({
                "stage": "download", "done": done, "total": self._total, "text": text + pace(seen, self._total),
            })


def pace(seen: Sequence[tuple[float, int]], total: int) -> str:
    """Returns the speed and the time left, as in ", 45.0 MB/s, 5 min left"; "" while nothing arrives. `seen`: (time in
    seconds, bytes that have arrived), the oldest first."""
    (began, before), (now, done) = seen[0], seen[-1]
    if now <= began or done <= before:
        return ""
    speed = (done - before) / (now - began)
    left = (total - done) / speed
    remaining = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    return f", {speed / 1e6:.1f} MB/s, {remaining} left"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # the file was just renamed, because its download is complete
            continue
    return total
