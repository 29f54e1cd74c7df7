"""4-bit weights for a GPU, without one: the kernels in Triton's interpreter, and matrices as checkpoints store them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.four_bit_rounding import round_groups
from engine.model.checkpoint import checkpoint_slots
from engine.model.decoder import Decoder
from engine.model.four_bits import Int4Tiles
from engine.model.group import Group
from engine.model.hf.config import read_model_config
from engine.model.weights import load_weights
from engine.parallel.shards import shard_config, shard_slots
from engine.worker.weights.quantised import matrices
from tests.engine.model.test_packed import FOUR_BITS
from tests.support.kernels.interpreted import interpreted
from tests.support.models import load_decoder, reference, save
from tests.support.packing import FORMATS, quantise

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 1,
}
CPU = torch.device("cpu")


class OneOfTwo(Group):
    """A rank of two, for loading."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_the_kernels_compute_the_products_of_the_numbers() -> None:
    pytest.importorskip("triton")
    for case, errors in interpreted("four_bits").items():
        for name, error in errors.items():
            assert error < {"norm": 0.02, "expand": 0.02, "one": 5e-5}.get(name, 3e-6), (case, errors)


@pytest.mark.parametrize("columns", [256, 384])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_numbers_are_found_where_they_were_stored(columns: int, group: int) -> None:
    kind = type("Kind", (Int4Tiles,), {"__slots__": (), "group": group})
    weight, wide = kind.empty(256, columns, CPU), torch.randn(256, columns)
    weight.copy_(wide)
    numbers, scales = round_groups(wide, group)
    exact = (numbers.double() - 8) * scales.double().repeat_interleave(group, 1)
    torch.testing.assert_close(weight.dense(), exact, rtol=1e-3, atol=0)
    assert 0.006 < (weight.dense() - wide).square().sum() / wide.square().sum() < 0.011
    first, second = weight.split([128, 128])
    assert torch.equal(torch.cat((first.dense(), second.dense())), weight.dense())
    x = torch.randn(3, columns)
    torch.testing.assert_close(weight.product(x).double(), x.double() @ weight.dense().T, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = reference("llama", **SIZES)
    return model, save(model, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name,ranks", [("gptq", 1), ("awq", 2), ("symmetric", 2), ("rows", 2), ("in bytes", 1)])
def test_a_checkpoint_of_4_bits_is_stored_as_it_is(
    name: str, ranks: int, plain: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is rounded again, and each of several ranks has its part."""
    monkeypatch.setitem(FORMATS, name, FOUR_BITS[name])
    model, source = plain
    quantise(type(model)(model.config), source, tmp_path / "m", name)
    config, whole = read_model_config(tmp_path / "m"), load_decoder(tmp_path / "m", torch.float64)
    kind = matrices("int4", config, torch.bfloat16)
    assert kind is not None and kind is not Int4Tiles and issubclass(kind, Int4Tiles)
    joined: dict[str, list[torch.Tensor]] = {}
    for rank in range(ranks):
        group = OneOfTwo(rank) if ranks > 1 else Group()
        shard = shard_config(config, rank, ranks)
        decoder = Decoder(shard, torch.bfloat16, CPU, 16, quantised=kind, group=group)
        slots = list(shard_slots(decoder.slots(), config, rank, ranks) if ranks > 1 else decoder.slots())
        load_weights(
            checkpoint_slots(slots, config, torch.bfloat16), tmp_path / "m", config.tie_word_embeddings,
            packing=config.packing,
        )
        for slot in slots:
            if slot.name.endswith("_proj.weight"):
                assert isinstance(slot.view, Int4Tiles)
                joined.setdefault(slot.name, []).append(slot.view.dense())
    for slot in whole.slots():
        if slot.name in joined:
            across = slot.name.endswith(("o_proj.weight", "down_proj.weight"))
            found = torch.cat(joined.pop(slot.name), int(across))
            torch.testing.assert_close(found, slot.view, rtol=1e-3, atol=1e-7)
    assert not joined
