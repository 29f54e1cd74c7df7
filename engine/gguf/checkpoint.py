"""Turns a GGUF file, or all parts of a split one, into a checkpoint: config.json, tokenizer, safetensors.

The engine then loads it like any other checkpoint (engine/model/linear.py rounds expanded weights again, if the user
asks for this). The directory is kept in the cache; a file that changes gets a new one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.disk_cache import UNPACKED, Damaged
from engine.errors import CheckpointError
from engine.fields import Fields
from engine.files import CONFIG, SINGLE
from engine.gguf.config import config
from engine.gguf.families import family_of
from engine.gguf.header import Header, model_name, parts_of, read_parts
from engine.gguf.tensors import Output, four_bits, outputs, write
from engine.gguf.tokenizer import end_tokens, tokenizer_files
from engine.model.config import ModelConfig
from engine.model.hf.config import ConfigReader
from engine.progress import Progress

REVISION = 4  # increases when the contents of the directories change


def as_checkpoint(path: Path, on_progress: Progress | None = None, weights: bool = True) -> Path:
    """Returns the checkpoint directory of a GGUF file, or of a model of which `path` is a part.

    The first call for a file writes it. A directory that was damaged is written again, and `on_progress` gets a note.

    `weights`: False writes config.json and the tokenizer only. Raises CheckpointError.
    """
    parts = parts_of(path)
    states = [(part.resolve(), part.stat()) for part in parts]
    files = [(str(place), each.st_ino, each.st_size, each.st_mtime_ns) for place, each in states]
    name = UNPACKED.entry_name(model_name(path), REVISION, weights, files)
    try:
        if (kept := UNPACKED.find(name)) is not None:
            return kept
    except Damaged as error:
        if on_progress is not None:
            text, note = f"unpacking {path.name} again", f"{error}: {path} was unpacked again"
            on_progress({"stage": "weights", "done": 0, "total": 0, "text": text, "note": note})
    header = read_parts(parts)
    fields, tensors = _contents(header)
    tensors = tensors if weights else []
    texts = {CONFIG: fields}
    texts["tokenizer.json"], texts["tokenizer_config.json"] = tokenizer_files(header)
    texts["generation_config.json"] = {"eos_token_id": end_tokens(header)}

    def unpack(place: Path) -> None:
        for file, contents in texts.items():
            (place / file).write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")
        if weights:
            write(header, tensors, place / SINGLE, on_progress)

    try:
        return UNPACKED.keep(name, unpack, sum(output.nbytes for output in tensors))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be unpacked to the cache ({error}): delete files there, or set XDG_CACHE_HOME to a "
            "writable folder on a larger disk"
        ) from error


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
