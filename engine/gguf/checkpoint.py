"""Turns a GGUF file into a checkpoint directory: config.json, tokenizer, and weights in safetensors.

The engine then loads it like any other checkpoint. Quantised tensors are expanded to float16, whose rounding is far
finer than the quantisation (engine/model/linear.py rounds them to 8 bits again, if the user asks for this). Tensors are
read and written one after the other. The directory is kept in the cache; a file that changes gets a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.errors import CheckpointError, not_installed
from engine.fields import shown
from engine.files import CONFIG, SINGLE
from engine.gguf.header import Header, Tensor, read_header
from engine.gguf.tokenizer import tokenizer_files
from engine.progress import Progress

REVISION = 1  # increases when the contents of the directories change
PLAIN = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}  # stored as they are: type in safetensors, bytes
NAMES = {  # name of a module in GGUF -> name in the checkpoint
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
IGNORED = ("rope_freqs.weight",)  # _rope reads it
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Family:
    """What differs between the architectures of GGUF."""

    architecture: str
    model_type: str
    pairs: bool = False  # the rows of q and k are in the order that rotates neighbouring numbers


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", pairs=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
}


def as_checkpoint(path: Path, on_progress: Progress | None = None, weights: bool = True) -> Path:
    """Returns the checkpoint directory of a GGUF file. The first call for a file writes it.

    `weights`: False writes config.json and the tokenizer only. Raises CheckpointError.
    """
    status = path.stat()
    key = f"{REVISION} {path.resolve()} {status.st_size} {status.st_mtime_ns} {weights}"
    directory = cache_directory() / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    header = read_header(path)
    family = _family(header)
    files = {CONFIG: config(header, family)}
    files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer_files(header)
    files["generation_config.json"] = {"eos_token_id": _ends(header)}
    plan = _plan(header)
    place = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _check_room(directory.parent, sum(size for *_, size in plan) if weights else 0, path)
        place = Path(tempfile.mkdtemp(dir=directory.parent))
        for name, contents in files.items():
            (place / name).write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")
        if weights:
            _write(header, family, plan, place / SINGLE, on_progress)
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


def cache_directory() -> Path:
    """Returns the directory of the unpacked files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitui" / "gguf"


def config(header: Header, family: Family) -> dict[str, Any]:
    """Returns the contents of config.json."""
    kind = header.get("general.architecture", str)

    def whole(key: str, default: int | None = None) -> int:
        return header.get(f"{kind}.{key}", int, default)

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    if heads < 1 or hidden < 1:
        raise header.error(f"has {heads} heads and an embedding of {hidden}: download it again")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise header.error("has no tensor token_embd.weight: download it again")
    stored = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {
        "architectures": [family.architecture], "model_type": family.model_type, "vocab_size": embedding.shape[0],
        "hidden_size": hidden, "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": whole("attention.key_length", hidden // heads),
        "rms_norm_eps": round(header.get(f"{kind}.attention.layer_norm_rms_epsilon", float), 12),
        "max_position_embeddings": whole("context_length"), "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": False, "rope_parameters": _rope(header, kind),
        "dtype": "bfloat16" if stored == {"BF16"} else "float32" if stored == {"F32"} else "float16",
    }  # fmt: skip


def _family(header: Header) -> Family:
    kind = header.get("general.architecture", str)
    if kind not in FAMILIES:
        raise header.error(
            f"has the architecture {shown(kind)}: supported in GGUF are {', '.join(FAMILIES)}; use the checkpoint in "
            "safetensors, which more families have"
        )
    return FAMILIES[kind]


def _rope(header: Header, kind: str) -> dict[str, Any]:
    theta = header.get(f"{kind}.rope.freq_base", float, 10_000.0)
    scaling = header.metadata.get(f"{kind}.rope.scaling.type", "none")
    factor = header.metadata.get(f"{kind}.rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear", "yarn"):
        raise header.error(f"stretches positions by {shown(scaling)}: supported are linear and yarn")
    if "rope_freqs.weight" in header.tensors:
        return {"rope_theta": theta, "rope_type": "llama3", **LLAMA3_BANDS, "factor": _llama3_factor(header, theta)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    found = {"rope_theta": theta, "rope_type": scaling, "factor": factor}
    original = header.metadata.get(f"{kind}.rope.scaling.original_context_length")
    return found if original is None else {**found, "original_max_position_embeddings": original}


def _llama3_factor(header: Header, theta: float) -> float:
    """Returns the factor of Llama 3's positions. The file has the divisor of each frequency, not the factor."""
    tensor = header.tensors["rope_freqs.weight"]
    found = _expand(header, tensor).reshape(-1)
    factor, turns = float(found.max()), LLAMA3_BANDS["original_max_position_embeddings"]
    low, high = LLAMA3_BANDS["low_freq_factor"], LLAMA3_BANDS["high_freq_factor"]
    wavelength = 2 * np.pi * theta ** (np.arange(len(found)) / len(found))
    smooth = np.clip((turns / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise header.error("stretches positions in its own way (rope_freqs.weight): use the checkpoint in safetensors")
    return factor


def _ends(header: Header) -> list[int]:
    found = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _plan(header: Header) -> list[tuple[Tensor, str, str, int]]:
    """Returns (tensor, its name in the checkpoint, its type in safetensors, its bytes there)."""
    found = []
    for tensor in header.tensors.values():
        if tensor.name in IGNORED:
            continue
        module, _, leaf = tensor.name.rpartition(".")
        layer = ""
        if module.startswith("blk."):
            _, number, module = module.split(".", 2)
            layer = f"model.layers.{number}."
        if module not in NAMES or leaf not in ("weight", "bias"):
            raise header.error(f"has a tensor {shown(tensor.name)}, unknown to this architecture: use safetensors")
        kind, bytes_ = PLAIN.get(tensor.type, ("F16", 2))
        found.append((tensor, f"{layer}{NAMES[module]}.{leaf}", kind, int(np.prod(tensor.shape)) * bytes_))
    return found


def _write(
    header: Header, family: Family, plan: list[tuple[Tensor, str, str, int]], path: Path, on_progress: Progress | None
) -> None:
    """Write a safetensors file: the length of the header, the header, and the tensors one after the other."""
    listed, at = {}, 0
    for tensor, name, kind, size in plan:
        listed[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(listed).encode()
    head += b" " * (-len(head) % 8)
    contents = config(header, family)
    heads = {"q_proj": contents["num_attention_heads"], "k_proj": contents["num_key_value_heads"]}
    done = 0
    with path.open("wb") as out, header.path.open("rb") as file:
        out.write(len(head).to_bytes(8, "little") + head)
        for tensor, name, _, size in plan:
            data = _read(header, file, tensor)
            owner = name.split(".")[-2]
            if family.pairs and owner in heads:
                if len(data) % (2 * heads[owner]):
                    raise header.error(f"has {len(data)} rows in {shown(tensor.name)}, not a multiple of its heads")
                data = _halves(data, heads[owner])
            out.write(np.ascontiguousarray(data).tobytes())
            done += size
            if on_progress is not None:
                text = f"unpacking {header.path.name}: {done / 1e9:.2f} of {at / 1e9:.2f} GB"
                on_progress({"stage": "weights", "done": done, "total": at, "text": text})


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows in the order that rotates the first half of a head with the second half."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _read(header: Header, file: BinaryIO, tensor: Tensor) -> np.ndarray:
    """Returns a tensor as it is written: bfloat16 as uint16, quantised ones as float16."""
    file.seek(tensor.offset)
    data = np.frombuffer(file.read(tensor.nbytes), np.uint8)
    if len(data) != tensor.nbytes:
        raise header.error(f"ended while {shown(tensor.name)} was read: download it again")
    plain: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    if tensor.type in plain:
        return data.view(plain[tensor.type]).reshape(tensor.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return _dequantize()(data.reshape(*tensor.shape[:-1], -1), tensor.type).astype(np.float16)


def _expand(header: Header, tensor: Tensor) -> np.ndarray:
    with header.path.open("rb") as file:
        data = _read(header, file, tensor)
    return (data.astype(np.uint32) << 16).view(np.float32) if tensor.type == "BF16" else data.astype(np.float32)


def _dequantize() -> Callable[[np.ndarray, str], np.ndarray]:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise CheckpointError(not_installed("reading quantised GGUF files", error, "gguf")) from error
    return lambda data, kind: quants.dequantize(data, GGMLQuantizationType[kind])


def _check_room(place: Path, needed: int, path: Path) -> None:
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"{path} takes {needed / 1e9:.2f} GB when it is unpacked to {place}, where {free / 1e9:.2f} GB are free: "
            "delete files there, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
