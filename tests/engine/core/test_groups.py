"""Cache groups: which layers share a pool, and what a token takes in it."""

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.groups import cache_groups
from engine.model.config import DeltaConfig, ModelConfig
from engine.worker.loaded import PoolSizes

MODEL = ModelConfig("LlamaForCausalLM", 100, 64, 128, 6, 4, 2, 16, 1024)


def having(**fields: object) -> ModelConfig:
    return ModelConfig(**{**MODEL.__dict__, **fields})


@pytest.mark.parametrize("windows", [(), (8,) * 6, (0,) * 6, (8, 8, 16, 16, 8, 8)])
def test_a_model_whose_layers_all_have_windows_or_none_has_one_group(windows: tuple[int, ...]) -> None:
    (group,) = cache_groups(having(windows=windows))
    assert (group.name, group.kind, group.layers, group.window) == ("full", "full", tuple(range(6)), 0)
    assert group.bytes_per_token(torch.bfloat16) == MODEL.kv_bytes_per_token(torch.bfloat16) == 6 * 2 * 2 * 16 * 2


def test_full_layers_are_group_0_and_each_window_and_shape_is_a_group() -> None:
    full, small, large = cache_groups(having(windows=(16, 0, 8, 0, 16, 8)))
    assert [(each.name, each.layers) for each in (full, small, large)] == [
        ("full", (1, 3)), ("window 8", (2, 5)), ("window 16", (0, 4)),
    ]
    shapes = ((4, 8), (2, 16), (1, 32), (2, 16), (4, 8), (4, 8))
    groups = cache_groups(having(windows=(8, 0, 8, 0, 8, 8), layer_heads=shapes))
    assert [each.name for each in groups] == ["full", "window 8, 1 x 32", "window 8, 4 x 8"]
    assert [each.layers for each in groups] == [(1, 3), (2,), (0, 4, 5)]
    assert [each.bytes_per_token(torch.float32) for each in groups] == [2 * 2 * 32 * 4, 2 * 32 * 4, 2 * 3 * 32 * 4]


def test_layers_that_read_the_keys_of_another_layer_take_no_memory() -> None:
    full, window = cache_groups(having(windows=(8, 0, 8, 0, 8, 0), kv_source=(0, 1, 2, 3, 2, 3)))
    assert (full.layers, full.readers, window.layers, window.readers) == ((1, 3), (5,), (0, 2), (4,))
    assert full.bytes_per_token(torch.float32) == 2 * 2 * 32 * 4


def test_full_layers_with_different_heads_cannot_share_a_table() -> None:
    with pytest.raises(ValueError, match="differ in their heads"):
        cache_groups(having(windows=(0, 0, 8, 8, 8, 8), layer_heads=((4, 8), (2, 16), *((2, 8),) * 4)))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_pool_that_one_request_does_not_fit_is_refused_with_its_numbers(drafts: int) -> None:
    """A request needs its own state, one that it makes, and one for each draft; of a window, the pages it spans."""
    model = having(windows=(0, 0, 100, 0, 0, 0), delta=DeltaConfig((True,) + (False,) * 5, 1, 1, 8, 8, 4))
    speculation = {"speculation": "prompt-lookup", "speculative_tokens": drafts} if drafts else {}
    beside = " with 3 drafts" if drafts else ""
    for name, least in (("state_slots", 2 + drafts), ("window_blocks", 9 + (drafts > 0))):

        def sides(given: int, name: str = name) -> tuple[int, ...]:
            config = EngineConfig(model="", **{name: given}, **speculation)  # type: ignore[arg-type]
            return tuple(side.num_blocks for side in PoolSizes(model, config, 4, 64, torch.bfloat16).sides(50))

        assert 1 + least in sides(least)
        text = rf"{name} is {least - 1}, but one request needs {least} in .*'{beside}: "
        with pytest.raises(EngineError, match=text):
            sides(least - 1)
