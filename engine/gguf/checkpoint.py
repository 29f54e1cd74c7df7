"""Turns a GGUF file, or all parts of a split one, into a checkpoint: config.json, tokenizer, safetensors.

The engine then loads it like any other checkpoint (engine/model/linear.py rounds expanded weights again, if the user
asks for this). The directory is kept in the cache; a file that changes gets a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.fields import Fields
from engine.files import CONFIG, SINGLE
from engine.gguf.config import config
from engine.gguf.families import family_of
from engine.gguf.header import Header
from engine.gguf.parts import model_name, parts_of, read_parts
from engine.gguf.tensors import Output, four_bits, outputs, write
from engine.gguf.tokenizer import end_tokens, tokenizer_files
from engine.model.config import ModelConfig
from engine.model.hf_config import ConfigReader
from engine.progress import Progress

REVISION = 3  # increases when the contents of the directories change


def as_checkpoint(path: Path, on_progress: Progress | None = None, weights: bool = True) -> Path:
    """Returns the checkpoint directory of a GGUF file, or of a model of which `path` is a part.

    The first call for a file writes it.

    `weights`: False writes config.json and the tokenizer only. Raises CheckpointError.
    """
    parts = parts_of(path)
    states = ((part.resolve(), part.stat()) for part in parts)
    key = f"{REVISION} {weights} " + " ".join(f"{place} {each.st_size} {each.st_mtime_ns}" for place, each in states)
    directory = cache_directory() / f"{model_name(path)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    header = read_parts(parts)
    fields, tensors = _contents(header)
    tensors = tensors if weights else []
    files = {CONFIG: fields}
    files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer_files(header)
    files["generation_config.json"] = {"eos_token_id": end_tokens(header)}
    place = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _check_room(directory.parent, sum(output.nbytes for output in tensors), path)
        place = Path(tempfile.mkdtemp(dir=directory.parent))
        for name, contents in files.items():
            (place / name).write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")
        if weights:
            write(header, tensors, place / SINGLE, on_progress)
        place.replace(directory)
    except OSError as error:
        if directory.is_dir():  # another process was faster
            return directory
        raise CheckpointError(
            f"{path} cannot be unpacked to {directory.parent} ({error}): set XDG_CACHE_HOME to a writable folder"
        ) from error
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)  # nothing is there if all went well
    return directory


def read_config(path: Path) -> ModelConfig:
    """Returns the configuration of the checkpoint that `as_checkpoint` makes. Only headers are read."""
    return ConfigReader(Fields(path, _contents(read_parts(parts_of(path)))[0])).model_config()


def _contents(header: Header) -> tuple[dict[str, Any], list[Output]]:
    """Returns the fields of config.json, and the tensors."""
    family = family_of(header)
    fields = config(header, family)
    tensors = outputs(header, family, fields)
    if any(output.kind == "U8" for output in tensors):
        fields["quantization_config"] = {"quant_method": "mxfp4"}
    elif packing := four_bits(tensors):
        fields["quantization_config"] = packing
    return fields, tensors


def cache_directory() -> Path:
    """Returns the directory of the unpacked files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitui" / "gguf"


def _check_room(place: Path, needed: int, path: Path) -> None:
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"{path} takes {needed / 1e9:.2f} GB when it is unpacked to {place}, where {free / 1e9:.2f} GB are free: "
            "delete files there, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
