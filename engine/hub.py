"""Where a model's files are: a directory, the local Hugging Face cache, or the hub.

Looking in the cache needs no library; downloading needs huggingface_hub.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from engine.errors import CheckpointError
from engine.progress import Progress

WANTED = ("*.json", "*.safetensors", "*.jinja", "LICENSE*")
# A bare name is looked for under the organisation that publishes models called so.
ORGANISATIONS = {"qwen": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama", "mistral": "mistralai"}
POLL_SECONDS = 0.25


def resolve_model(name: str, on_progress: Progress | None = None) -> Path:
    """The directory with the checkpoint called `name`: a directory, "Qwen3-8B" or "Qwen/Qwen3-8B".

    Looked for in this order: as a path, in the local Hugging Face cache, on the hub (downloaded to the cache, with
    progress). Raises CheckpointError with what was tried.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file: give the directory that holds config.json and the weights")
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..", "~") for part in parts):
        raise CheckpointError(f"{name!r} is not a directory, and cannot be the name of a model on the hub either")
    cached = find_cached(name)
    return cached if cached is not None else _download(_repository(name), on_progress)


def cache_directory() -> Path:
    """Hugging Face's cache, where its own variables say."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / below
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def find_cached(name: str) -> Path | None:
    """The newest complete snapshot of a model in the local cache; a bare name may be of any organisation."""
    pattern = "models--" + name.replace("/", "--") if "/" in name else f"models--*--{name}"
    snapshots = [
        path.parent
        for repository in cache_directory().glob(pattern)
        for path in repository.glob("snapshots/*/config.json")
        if any(path.parent.glob("*.safetensors"))
    ]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _repository(name: str) -> str:
    if "/" in name:
        return name
    for prefix, organisation in ORGANISATIONS.items():
        if name.lower().startswith(prefix):
            return f"{organisation}/{name}"
    raise CheckpointError(
        f"{name!r} is neither a directory nor in the cache {cache_directory()}: give a directory, or the full name on "
        f"the hub, as in Qwen/{name}"
    )


def _download(repository: str, on_progress: Progress | None) -> Path:
    where = f"{repository} is neither a directory nor in the cache {cache_directory()}"
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils import disable_progress_bars  # not an attribute of every version's package
    except ImportError:
        what = "huggingface_hub, which is not installed: pip install huggingface_hub"  # no extra: all installs have it
        raise CheckpointError(f"{where}, and downloading needs {what}") from None
    disable_progress_bars()
    try:
        files = hub.HfApi().model_info(repository, files_metadata=True).siblings or []
        total = sum(file.size or 0 for file in files if any(Path(file.rfilename).match(part) for part in WANTED))
        with _Watch(cache_directory() / f"models--{repository.replace('/', '--')}", repository, total, on_progress):
            return Path(hub.snapshot_download(repository, allow_patterns=list(WANTED)))
    except Exception as error:  # the library raises its own, requests' and the operating system's errors
        kind = type(error).__name__
        if kind in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
            raise CheckpointError(
                f"{where}, and the hub does not give it ({kind}): check the name, and log in with `hf auth login` if "
                "the model asks for it"
            ) from error
        raise CheckpointError(
            f"{where}, and the hub could not be reached ({kind}: {error}): connect to the internet, or give a directory"
        ) from error


class _Watch:
    """Reports how far a download has come, from the size of the cache's folder."""

    def __init__(self, folder: Path, name: str, total: int, on_progress: Progress | None) -> None:
        self._folder, self._name, self._total, self._tell = folder, name, total, on_progress
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="download progress")

    def __enter__(self) -> _Watch:
        if self._tell is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._tell is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._tell is not None
        while not self._over.wait(POLL_SECONDS):
            done = min(self._total, _size(self._folder / "blobs"))
            text = f"downloading {self._name}: {done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
            self._tell({"stage": "download", "done": done, "total": self._total, "text": text})


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed just now, from incomplete to whole
            continue
    return total
