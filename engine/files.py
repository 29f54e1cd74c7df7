"""Reads the files of a checkpoint with limits: only regular files, of limited size, and JSON of limited depth."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.fields import Fields, listed, shown

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of a LoRA adapter
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack", ".xml")
OF_TRANSFORMERS = ("pytorch_model", "tf_model", "flax_model")  # the beginnings of names of weights that it converts
WEIGHTS_AT = ("*", "onnx/*", "original/*")
ORIGINAL = "consolidated"  # the beginning of the name of weights in Mistral's or Meta's own format
POINTER = b"version https://git-lfs"  # the beginning of a file that Git LFS has not replaced with its contents
OTHER_KINDS = {  # a file beside which there is no config.json -> what the directory holds
    "params.json": "a model in Mistral's or Meta's own format, not a Hugging Face checkpoint: download the repository "
    "with config.json and model.safetensors (its name may end in -hf)",
    "model_index.json": "a pipeline that makes images, not a language model: give the directory of a language model",
}
INSIDE = ("*", "snapshots/*")  # where a directory that was named by mistake may hold a checkpoint
JSON_BYTES = 64 << 20  # the index of a model with 100,000 tensors takes 10 MB
JSON_PARTS = 4_000_000  # that index has 400,000; Python takes a second and 250 MB for this many
TOKENIZER_BYTES = 256 << 20  # the largest published tokenizer.json takes 34 MB


def read_bytes(path: Path, most: int) -> bytes:
    """Returns the contents of a regular file of at most `most` bytes. Raises FileNotFoundError if the file does not
    exist, and CheckpointError if it is too large or not a regular file: reading a FIFO could block, and reading a
    device could never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file: put the checkpoint's own file in its place")
            if status.st_size > most:
                raise CheckpointError(
                    f"{path} has {status.st_size:,} bytes, and the limit is {most:,}: it cannot be the checkpoint's "
                    "file; download it again"
                )
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(most)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): download it again") from error


def again(path: Path) -> str:
    """Returns what to do about a damaged file."""
    with suppress(OSError), open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            return "it is a Git LFS pointer; run `git lfs pull` in its directory"
    return "download it again"


def read_text(path: Path, most: int) -> str:
    """Like `read_bytes`, but return the contents as text in UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read as UTF-8 ({error}): download it again") from error


def json_parts(document: bytes) -> int:
    """Returns the number of quotation marks, lists and objects of a JSON document: its cost to read."""
    return sum(document.count(sign) for sign in (b"[", b"{", b'"'))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a checkpoint. Raises CheckpointError, which names the file and the fault."""
    try:
        text = read_text(path, JSON_BYTES)
        parts = json_parts(text.encode())
        if parts > JSON_PARTS:
            raise CheckpointError(
                f"{path} has {parts:,} quotation marks, lists and objects, and the limit is {JSON_PARTS:,}: it cannot "
                "be the checkpoint's file; download it again"
            )
        value = json.loads(text)
        if "\\ud" in text.lower():  # raise UnicodeEncodeError (a ValueError) now if the text has a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except FileNotFoundError:
        if path.is_symlink():
            raise no_target(path) from None
        if path.name == CONFIG and (path.parent / ADAPTER).is_file():
            raise _is_adapter(path.parent) from None
        for name, what in OTHER_KINDS.items():
            if path.name == CONFIG and (path.parent / name).is_file():
                raise CheckpointError(f"{path.parent} holds {what} ({name} is there, {CONFIG} is not)") from None
        inside = next((each for way in INSIDE for each in path.parent.glob(f"{way}/{path.name}")), None)
        example = "" if inside is None else f", as in {inside.parent}"
        raise CheckpointError(
            f"{path} does not exist: {path.parent} is not a Hugging Face checkpoint; give the directory that holds "
            f"config.json{example}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {again(path)}") from error
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read (it is nested too deeply): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object: download it again")
    return value


def no_target(link: Path) -> CheckpointError:
    """Returns the error for a link whose target does not exist, as in a cache from which files were deleted."""
    return CheckpointError(
        f"{link} is a link to {shown(os.readlink(link))[1:-1]}, which does not exist: download the model again, or "
        "connect the disk with this file"
    )


def _is_adapter(directory: Path) -> CheckpointError:
    base = read_json(directory / ADAPTER).get("base_model_name_or_path")
    of = f" of {shown(base)[1:-1]}" if isinstance(base, str) and base else ""
    return CheckpointError(
        f"{directory} holds a LoRA adapter{of} ({ADAPTER}), without the model: merge both with merge_and_unload of "
        "peft, save the result with its tokenizer, and give its directory"
    )


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, but return {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def eos_ids(directory: Path) -> tuple[int, ...]:
    """Returns the end-of-reply ids of a checkpoint's generation_config.json and config.json, each id once."""
    ids: list[int] = []
    for path in (directory / "generation_config.json", directory / "config.json"):
        raw = read_json_if_there(path)
        ids += Fields(path, raw).token_ids("eos_token_id")
        if isinstance(text := raw.get("text_config"), dict):  # of a model for images and text
            ids += Fields(path, text, " in its text_config").token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def checkpoint_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint: model.safetensors, or the shards that its index names."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    index = directory / INDEX
    if (directory / SINGLE).is_symlink():
        raise no_target(directory / SINGLE)
    if index.is_file():
        names, absent = shard_names(index), missing_weights(directory)
        if absent and (directory / absent[0]).is_symlink():
            raise no_target(directory / absent[0])
        if absent:
            raise CheckpointError(
                f"{index} names {len(names)} files, of which {listed(absent)} {'is' if len(absent) == 1 else 'are'} "
                "missing: download the checkpoint again"
            )
        return [directory / name for name in names]
    if (directory / ADAPTER).is_file():
        raise _is_adapter(directory)
    raise _no_weights(directory)


def _no_weights(directory: Path) -> CheckpointError:
    """Returns the error for a directory without weights in safetensors; it names those in other formats."""
    found = (path for way in WEIGHTS_AT for path in directory.glob(way) if path.suffix in WEIGHTS)
    held = sorted(path.relative_to(directory).as_posix() for path in found)
    shards = [name for name in held if name.endswith(".safetensors") and not name.startswith(ORIGINAL)]
    if len(shards) == 1 and "-of-" not in shards[0]:
        return CheckpointError(
            f"{directory} has {shards[0]}, but neither {SINGLE} nor {INDEX}: if this file holds the whole model, "
            f"rename it to {SINGLE}"
        )
    if shards:
        return CheckpointError(
            f"{directory} has {listed(shards)}, but neither {SINGLE} nor {INDEX}, which names the files that belong "
            f"together: download {INDEX} too"
        )
    hint = ": download the checkpoint again, or use --dummy-weights for random weights"
    if held:
        hint = f", only {listed(held)}: download the weights in safetensors that belong to config.json"
    if any(name.startswith(OF_TRANSFORMERS) for name in held):
        hint += ", or convert these with from_pretrained(…) and save_pretrained(…) of transformers"
    return CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}")


def missing_weights(directory: Path) -> list[str]:
    """Returns the names of the weight files that are missing in the directory of a checkpoint."""
    if (directory / SINGLE).is_file():
        return []
    index = directory / INDEX
    names = shard_names(index) if index.is_file() else [SINGLE]
    return [name for name in names if not (directory / name).is_file()]


def shard_names(index: Path) -> list[str]:
    """Returns the files that a model.safetensors.index.json names, without duplicates. Raises CheckpointError for a
    name that contains a directory or does not end in .safetensors."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map: download it again")
    for name in names.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\\0"):
            raise CheckpointError(
                f"{index} names {shown(name)}, which is not a safetensors file in its directory: download it again"
            )
    return list(dict.fromkeys(names.values()))
