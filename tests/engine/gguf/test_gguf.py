"""GGUF files: written with the gguf package from the bundled model, and loaded again."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.gguf import families, header, tensors
from engine.gguf.header import read_header
from engine.gguf.tokenizer import tokenizer_files
from engine.hub.resolve import resolve_model
from engine.llm import LLM
from engine.model.four_bits import Int4Weight
from engine.model.hf.config import read_model_config
from engine.model.rope import inverse_frequencies
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui import tutor
from tests.support.checkpoints.gguf_files import add_sizes, add_tokenizer, finish
from tests.support.models import load_decoder, make_runner

gguf = pytest.importorskip("gguf")
TYPES = gguf.GGMLQuantizationType
TUTOR = tutor.model_dir()
NAMES = {ours: theirs for theirs, ours in families.NAMES.items()}
TEXTS = [
    "What is a KV cache?", " two  spaces\n\nand 12345 numbers, it's", "Grüße, 世界! 🙂",
    "<|im_end|>def f(x):\n\treturn x",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(
    path: Path, kind: str = "F32", change: Callable[[Any], None] = lambda writer: None, tensors: int = 0,
    whole: bool = True,
) -> Path:
    """The bundled model as a GGUF file, with matrices of this type; in parts of `tensors` tensors (0: one file).
    `whole`: False writes only the embedding, which is enough for tests without weights."""
    config = json.loads((TUTOR / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "qwen3", split_max_tensors=tensors)
    add_sizes(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_tokenizer(writer, TUTOR, "gpt-2")
    for name, tensor in load_file(TUTOR / "model.safetensors").items():
        if whole or "embed" in name:
            add_tensor(writer, gguf_name(name), tensor.float().numpy(), kind)
    change(writer)
    finish(writer)
    return path


def gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, inner = module.split(".", 3)
        return f"blk.{number}.{NAMES[inner]}.{leaf}"
    return f"{NAMES[module]}.{leaf}"


def add_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    if values.ndim < 2 or kind == "F32":
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, TYPES[kind]), raw_dtype=TYPES[kind])


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


# ---- weights


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_the_weights_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    made = loaded(resolve_model(str(written(tmp_path / f"tutor-{kind}.gguf", kind))))
    for name, tensor in load_file(TUTOR / "model.safetensors").items():
        expected = tensor.float()
        if tensor.dim() > 1 and kind.startswith("Q"):
            values = gguf.quants.quantize(expected.numpy(), TYPES[kind])
            expected = torch.from_numpy(gguf.quants.dequantize(values, TYPES[kind]))
            if f"{name}_packed" in made:
                numbers = made[f"{name}_packed"][..., None] >> torch.arange(0, 32, 4) & 15
                scales = made[f"{name}_scale"].float().repeat_interleave(32, 1)
                made[name] = (numbers.flatten(1) - 8) * scales
            else:
                expected = expected.half().float()
        elif tensor.dim() > 1 and kind == "F16":
            expected = expected.half().float()
        assert torch.equal(made[name].float(), expected), name


def test_4_bits_are_computed_as_they_are(tmp_path: Path) -> None:
    if why_not := Int4Weight.why_not():
        pytest.skip(why_not)
    directory = resolve_model(str(written(tmp_path / "tutor.gguf", "Q4_0")))
    runner = make_runner(directory, "auto")
    assert runner.loaded.quantization == "int4"
    exact = load_decoder(directory)
    for ours, theirs in zip(runner.loaded.model.slots(), exact.slots(), strict=True):
        if isinstance(ours.view, Int4Weight):
            assert torch.equal(ours.view.dense().float(), theirs.view), ours.name


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS", "IQ1_M"])
def test_blocks_of_256_numbers_are_expanded(kind: str, tmp_path: Path) -> None:
    """The package cannot write these types, so the blocks are random bytes."""
    rows, columns = 3, 512
    bytes_each = gguf.constants.GGML_QUANT_SIZES[TYPES[kind]][1]
    blocks = np.random.default_rng(0).integers(0, 60, (rows, columns // 256 * bytes_each), dtype=np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=TYPES[kind])
    finish(writer)
    tensor = read_header(path).tensors["blk.0.ffn_up.weight"]
    assert tensor.shape == (rows, columns)
    with path.open("rb") as file:
        found = tensors._read(file, tensor, 0, rows, raw=False)
    assert np.array_equal(found, gguf.quants.dequantize(blocks, TYPES[kind]).astype(np.float16))


def test_a_file_answers_as_the_checkpoint_does(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    replies = []
    for model in (str(TUTOR), str(written(tmp_path / "tutor.gguf", "BF16"))):
        llm = LLM(model, device="cpu", kv_tokens=2_048)
        replies.append(llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)[0])
    assert replies[0].outputs[0].text == replies[1].outputs[0].text
    assert replies[0].prompt_token_ids == replies[1].prompt_token_ids


def test_a_file_is_unpacked_once_and_a_changed_one_again(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "tutor.gguf")
    told: list[dict[str, Any]] = []
    first = resolve_model(str(path), told.append)
    assert told[-1]["done"] == told[-1]["total"] > 1e6 and "unpacking tutor.gguf" in told[-1]["text"]
    assert resolve_model(str(tmp_path)) == resolve_model(str(path), told.clear) == first
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="has 2 GGUF files: name one of them"):
        resolve_model(str(tmp_path))
    path.write_bytes(path.read_bytes() + b"\0")
    assert resolve_model(str(path)) != first
    assert {each.parent for each in cache.rglob("config.json")} == set((cache / "minitui" / "gguf").iterdir())


def test_a_damaged_directory_is_unpacked_again(tmp_path: Path) -> None:
    """tests/engine/process/test_disk_cache.py has all kinds of damages."""
    path = written(tmp_path / "tutor.gguf")
    directory = resolve_model(str(path))
    before = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "entry.json"}
    os.truncate(directory / "model.safetensors", 100)
    built = build_engine(EngineConfig(str(path), device="cpu", kv_tokens=1024))
    built.close()
    (note,) = [note for note in built.info.notes if "damaged" in note]
    assert str(directory) in note and note.endswith(f"{path} was unpacked again")
    assert {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "entry.json"} == before


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be unpacked to the cache.*set XDG_CACHE_HOME to a writable"):
        resolve_model(str(written(tmp_path / "tutor.gguf")))


# ---- a model in several files


@pytest.fixture(scope="module")
def written_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled model in four parts."""
    folder = tmp_path_factory.mktemp("split")
    written(folder / "tutor.gguf", "F16", tensors=13)
    assert [part.name for part in sorted(folder.iterdir())] == [f"tutor-0000{i}-of-00004.gguf" for i in range(1, 5)]
    return folder


@pytest.fixture
def parts(written_parts: Path, tmp_path: Path) -> list[Path]:
    return sorted(Path(shutil.copytree(written_parts, tmp_path / "m")).iterdir())


def test_a_split_file_is_loaded_from_any_part_and_from_the_folder(parts: list[Path], tmp_path: Path) -> None:
    (parts[0].parent / "mmproj-tutor.gguf").write_bytes(b"images")
    first = resolve_model(str(parts[0]))
    assert {resolve_model(str(place)) for place in (*parts, parts[0].parent)} == {first}
    whole = resolve_model(str(written(tmp_path / "whole.gguf", "F16")))
    found, expected = loaded(first), loaded(whole)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert (first / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


def rename(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("mine.gguf"))


def swap(parts: list[Path]) -> Path:
    contents = [part.read_bytes() for part in parts[1:3]]
    for part, content in zip(parts[1:3], reversed(contents), strict=True):
        part.write_bytes(content)
    return parts[0]


def mix(parts: list[Path]) -> Path:
    """The last part is that of a model with one tensor more."""
    (parts[0].parent / "other").mkdir()
    more = lambda writer: writer.add_tensor("more.weight", np.zeros(4, dtype=np.float32))  # noqa: E731
    written(parts[0].parent / "other" / "tutor.gguf", "F16", more, 13)
    shutil.copy(parts[0].parent / "other" / parts[3].name, parts[3])
    return parts[0]


def repeat(parts: list[Path]) -> Path:
    """The second part has a tensor of the first part in the place of its own."""
    theirs, own = (read_header(part).tensors for part in parts[:2])
    pair = next((a, b) for a in theirs for b in own if len(a) == len(b))
    parts[1].write_bytes(parts[1].read_bytes().replace(pair[1].encode(), pair[0].encode()))
    return parts[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: (parts[1].unlink(), parts[2].unlink(), parts[3])[2],
         r"00004-of-00004\.gguf is part 4 of 4, and tutor-00002-of-00004\.gguf, .*are missing: download the rest to"),
        (lambda parts: parts[0].rename(parts[0].with_name("tutor-00007-of-00004.gguf")), "named as part 7 of 4"),
        (rename, r"mine\.gguf has split\.count = 4, but its name means 1 part: .* as in mine-00001-of-00004\.gguf"),
        (swap, r"tutor-00002-of-00004\.gguf has split\.no = 2 and should have 1"),
        (mix, r"has split\.tensors\.count = \d+, but its 4 parts have \d+ tensors: the parts belong to different"),
        (repeat, r"tutor-00002-of-00004\.gguf has the tensor '.*', like another part"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(change: Any, message: str, parts: list[Path]) -> None:
    place = change(parts)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(place))


# ---- the tokenizer and the configuration


def test_the_tokenizer_and_the_template_are_the_checkpoint_s(tmp_path: Path) -> None:
    directory = resolve_model(str(written(tmp_path / "tutor.gguf", whole=False)), weights=False)
    assert not (directory / "model.safetensors").exists()
    ours, theirs = Tokenizer(directory), Tokenizer(TUTOR)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, allow_special=True) == theirs.encode(text, allow_special=True)
        assert ours.decode(ours.encode(text)) == text
    assert (ours.special_ids, ours.eos_ids[0]) == (theirs.special_ids, theirs.eos_ids[0])
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert read_model_config(directory).num_parameters == read_model_config(TUTOR).num_parameters


@pytest.mark.parametrize("factor,low,high,original,theta", [
    (32, 1, 4, 8192, 500_000), (8, 1, 4, 64, 10_000), (8, 1, 1.3, 8192, 500_000), (16, 1.5, 3.7, 5000, 1e6),
    (8, 1, 1.05, 700, 10_000), (8, 1, 4, 1 << 20, 10_000),
])
def test_the_bands_of_a_stretched_llama_are_found(
    factor: float, low: float, high: float, original: int, theta: float, tmp_path: Path
) -> None:
    """The file has only the divisors. Bands with several frequencies between them, with none, without slow ones."""

    def llama3(writer: Any) -> None:
        length = 2 * np.pi * theta ** (np.arange(32) / 32)
        smooth = np.clip((original / length - low) / (high - low), 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / factor + smooth)).astype(np.float32))
        writer.kv_data[0]["qwen3.rope.freq_base"].value = float(theta)

    directory = resolve_model(str(written(tmp_path / "tutor.gguf", change=llama3, whole=False)), weights=False)
    found = read_model_config(directory).rope
    bands = {"low_freq_factor": float(low), "high_freq_factor": float(high), "original_max_position": original}
    exact = replace(found, factor=float(factor), **bands)
    torch.testing.assert_close(inverse_frequencies(found, 64), inverse_frequencies(exact, 64), rtol=2e-4, atol=0)
    if (low, high) == (1, 4) and original < 1 << 20:
        assert found == exact, "the numbers of published models are found exactly"


def test_divisors_that_are_no_bands_are_refused(tmp_path: Path) -> None:
    for name, divisors, message in (
        ("ramp", np.linspace(1, 8, 32), "stretches positions in its own way"),
        ("nan", np.full(32, np.nan), "divides frequencies by numbers below 1"),
        ("few", np.ones(16), "has 16 divisors of frequencies .*, and 32 frequencies"),
        ("zero", np.zeros(32), "divides frequencies by numbers below 1"),
    ):
        def change(writer: Any, divisors: np.ndarray = divisors) -> None:
            writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))

        with pytest.raises(CheckpointError, match=message):
            resolve_model(str(written(tmp_path / f"{name}.gguf", change=change, whole=False)), weights=False)


# ---- damaged and foreign files


def test_a_file_without_the_ending_is_recognised_by_its_contents(tmp_path: Path, cache: Path) -> None:
    """Ollama names files by their hashes."""
    path = written(tmp_path / "tutor.gguf", whole=False).rename(tmp_path / "sha256-0123abc")
    assert (resolve_model(str(path), weights=False) / "config.json").is_file()
    path.write_bytes(b"else")
    with pytest.raises(CheckpointError, match="is a file: give the directory that holds config"):
        resolve_model(str(path))


@pytest.mark.parametrize(("kind", "what"), [
    ("adapter", "holds a LoRA adapter without its model"), ("mmproj", "only the part of a model that reads images"),
    ("imatrix", "statistics for quantising a model"),
])
def test_a_file_without_a_language_model_is_named(kind: str, what: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf", change=lambda writer: writer.add_type(kind), whole=False)
    with pytest.raises(CheckpointError, match=rf"{what}.*: give the GGUF file of the language model"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends within its header"),
        (b"PK\x03\x04" + bytes(40), "it is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors, and the limit is"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "entries of metadata, and the limit is"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "bytes in a string, and the limit is"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 60), "items in its arrays, and the limit"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 2, 1, b"k", 9, 0, 2_000_000) + bytes(2_000_000)
            + struct.pack("<Q1sIIQ", 1, b"l", 9, 8, 2_000_000) + bytes(16_000_000),
            "has 4,000,000 items in its arrays, and the limit is 2,097,152",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "a value of type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"t", 1, 64, 0, 0, 0)[:-12], "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 64, 0, 0), "within the tensor 't'"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 64, 99, 0), "as type 99, which is not supported"),
    ],
    ids=range(12),
)
def test_a_damaged_header_is_one_sentence(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model(str(path))
    assert str(path) in str(caught.value)


def test_tensors_that_overlap_and_longer_headers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would take far more memory or disk than the file has."""
    one = b"".join(struct.pack("<Q1sIQIQ", 1, name, 1, 16, 0, 0) for name in (b"a", b"b"))
    path = tmp_path / "bad.gguf"
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + one).ljust(96, b"\0") + bytes(64))
    with pytest.raises(CheckpointError, match=r"bad\.gguf has tensors that overlap, such as 'b'"):
        read_header(path)
    monkeypatch.setattr(header, "LARGEST_HEADER", 60)
    with pytest.raises(CheckpointError, match=r"bad\.gguf has a header of more than 60 bytes"):
        read_header(path)


def test_pieces_of_more_characters_than_any_vocabulary_has_are_refused() -> None:
    """Each place where a piece could be cut is tried, so their time grows with the characters."""
    fields = {"model": "llama", "tokens": [f"{i:05}" + "a" * 1000 for i in range(5000)], "scores": [0.0] * 5000}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    with pytest.raises(CheckpointError, match="has tokens of 5,025,000 characters in all, and the limit is 4,194,304"):
        tokenizer_files(header.Header(Path("x.gguf"), metadata, {}))


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "tutor.gguf", "Q8_0")
    found = read_header(path).tensors["blk.0.attn_q.weight"]
    data = bytearray(path.read_bytes())
    data[found.offset : found.offset + 2] = b"\x00\x7c"  # infinity in float16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"numbers in 'blk\.0\.attn_q\.weight' that are not finite"):
        resolve_model(str(path))


def test_no_cut_of_a_file_raises_anything_else(tmp_path: Path, cache: Path) -> None:
    whole = written(tmp_path / "tutor.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (5, 30, 77, 400, 5_000, 60_000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            resolve_model(str(path))
    assert not list(cache.rglob("*.json"))
