"""Loading checkpoints: memory, progress, and the errors for damaged or unsuitable files."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError
from engine.model.decoder import Decoder
from engine.model.hf.config import read_model_config
from engine.model.weights import dummy_weights
from tests.support.models import Driver, load_decoder, make_request, plain_runner, reference, rewrite, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "m"))


@pytest.mark.parametrize(
    ("kind", "fields", "form"),
    [
        ("qwen3", {}, {"shards": True}), ("qwen2", {"head_dim": 16}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("qwen3_moe", {"mlp_only_layers": [1]}, {"shards": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}, {"shards": True, "stacked": True}),
    ],
)
def test_every_parameter_is_filled_from_its_own_tensor(
    kind: str, fields: dict[str, Any], form: dict[str, bool], tmp_path: Path
) -> None:
    model = reference(kind, **fields)
    ours = load_decoder(save(model, tmp_path, **form))
    theirs = model.state_dict()
    assert {slot.name for slot in ours.slots()} == set(theirs)
    for slot in ours.slots():
        assert torch.equal(slot.view, theirs[slot.name].expand_as(slot.view)), slot.name


def test_progress_counts_every_byte(checkpoint: Path) -> None:
    told: list[dict[str, Any]] = []
    model = load_decoder(checkpoint, on_progress=told.append)
    total = sum(slot.view[:1].nbytes if slot.repeated else slot.view.nbytes for slot in model.slots())
    assert told[-1]["done"] == told[-1]["total"] == total
    assert [news["done"] for news in told] == sorted(news["done"] for news in told)
    assert all(news["stage"] == "weights" and "of" in news["text"] for news in told)


def test_missing_tensors_are_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1.mlp" in name])
    with pytest.raises(CheckpointError, match=r"model\.safetensors lacks model\.layers\.1\.mlp\.gate_proj\.weight, "):
        load_decoder(checkpoint)


def test_misshapen_tensors_are_named_with_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(32, 64), "model.norm.weight": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is \[32, 64\] and should be \[64, 64\]") as caught:
        load_decoder(checkpoint)
    assert "model.norm.weight is [1] and should be [64]" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_named_at_once_and_shortened(checkpoint: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers" in name]:
            tensors[name.replace("layers", "blocks")] = tensors.pop(name)

    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=r"lacks .* and \d+ more; it has .*blocks.* and \d+ more, unknown"):
        load_decoder(checkpoint)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100, struct.pack("<Q", 10) + b"not json!!"])
def test_a_corrupt_file_is_named(content: bytes, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        load_decoder(checkpoint)


def test_a_header_that_does_not_fit_the_file_is_named(checkpoint: Path) -> None:
    """More bytes or a larger shape than the file has, or an unknown type."""
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    correct = json.loads(data[8 : 8 + size])
    for wrong in ({"shape": [64, 1000]}, {"data_offsets": [0, 1 << 40]}, {"dtype": "F8_BOGUS"}):
        header = json.loads(json.dumps(correct))
        header["model.norm.weight"].update(wrong)
        encoded = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_decoder(checkpoint)


def test_tensors_that_only_the_index_names_are_missing(tmp_path: Path) -> None:
    save(reference("qwen3"), tmp_path, shards=True)
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    tensors = load_file(first)
    gone = sorted(tensors)[0]
    tensors.pop(gone)
    save_file(tensors, first)
    with pytest.raises(CheckpointError, match=f"lacks {gone}"):
        load_decoder(tmp_path)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    save(reference("qwen3"), tmp_path, shards=True)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map"):
        load_decoder(tmp_path)


def test_dummy_weights_are_random_with_norms_of_one(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    models = [Decoder(config, torch.float32, CPU, 16) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        dummy_weights(model.slots(), seed)
    for one, same, other in zip(*(model.slots() for model in models), strict=True):
        assert torch.equal(one.view, same.view)
        if "norm" in one.name:
            assert (one.view == 1).all()
        else:
            assert not torch.equal(one.view, other.view)
            assert 0.018 < float(one.view.std()) < 0.022


def test_with_dummy_weights_only_the_config_is_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    config = read_model_config(checkpoint)
    runner = plain_runner(config, EngineConfig(device="cpu", dummy_weights=True, num_blocks=8, cpu_threads=1))
    assert len(Driver(runner).generate(make_request([5, 6, 7], 0), 4)) == 4
    with pytest.raises(EngineError, match="neither a model directory nor dummy_weights"):
        plain_runner(config, EngineConfig(device="cpu", num_blocks=8, cpu_threads=1))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="/proc tells the peak of resident memory")
def test_peak_memory_while_loading_stays_near_one_shard(tmp_path: Path) -> None:
    """40 MB of weights in shards of 10: beyond the model itself, the process may grow by little more than a shard."""
    model = reference("llama", hidden_size=512, intermediate_size=1408, num_hidden_layers=4, vocab_size=1000)
    model.save_pretrained(tmp_path, max_shard_size="10MB")
    code = f"""
from pathlib import Path
from engine.process.startup import import_torch
import_torch()
import torch
from engine.model.hf.config import read_model_config
from engine.model.decoder import Decoder
from engine.model.weights import load_weights
def memory(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name))
config = read_model_config({str(tmp_path)!r})
model = Decoder(config, torch.float32, torch.device("cpu"), 16)
for slot in model.slots():
    slot.view.fill_(1)
Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
before = memory("VmRSS")
load_weights(model.slots(), Path({str(tmp_path)!r}), False)
print((memory("VmHWM") - before) / 1024, model.nbytes / 2**20)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    grown, size = map(float, output.split())
    assert size > 35
    assert 0 < grown < 18, f"{grown:.0f} MiB for shards of 10 MB"


def test_an_index_names_files_beside_it_and_nothing_else(tmp_path: Path) -> None:
    names = ["../model.safetensors", "/etc/passwd", 7, None, ["x"], "a/b.safetensors", "x.bin", "a\0.safetensors", ""]
    directory = save(reference("llama"), tmp_path / "m", shards=True)
    shutil.copy(next(directory.glob("*.safetensors")), tmp_path / "model.safetensors")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for name in names:
        content["weight_map"]["model.norm.weight"] = name
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"index\.json names .* not a safetensors file in its directory"):
            load_decoder(directory)


def test_a_damaged_header_is_refused_in_one_sentence(checkpoint: Path) -> None:
    """Random damage is refused with a sentence, or loaded where it does not matter."""
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    [length] = struct.unpack("<Q", whole[:8])
    random = Random(0)
    refused = 0
    for _ in range(120):
        damaged = bytearray(whole)
        for _ in range(random.choice((1, 1, 2, 8))):
            at = random.randrange(8, 8 + length)
            signs = random.choices(b'0123456789-{}[]",:e', k=random.randrange(9))
            damaged[at : at + random.randrange(1, 9)] = bytes(signs)
        if random.random() < 0.2:
            damaged[random.randrange(8)] ^= 1 << random.randrange(8)
        if random.random() < 0.2:
            del damaged[random.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            load_decoder(checkpoint)
        except CheckpointError:
            refused += 1
    assert refused > 90
