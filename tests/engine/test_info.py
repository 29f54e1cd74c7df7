"""Facts about an engine: as JSON for clients and recordings, and checked when they come from there."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from engine.info import EngineInfo
from engine.trace.kind import bounds_of
from minitui.protocol import ServerInfo

HERE = EngineInfo(
    model="m", model_dir="/here", log_file="/here/log", device="CPU, 1 thread", num_blocks=7, block_size=16,
    overlap=False, speculation={}, generation={"temperature": 0.0}, notes=["a note"],
)


@pytest.mark.parametrize("cls", [EngineInfo, ServerInfo])
def test_every_fact_has_a_bound(cls: type[EngineInfo]) -> None:
    assert [each.name for each in fields(cls)] == list(bounds_of(cls))


def test_known_facts_survive_json_and_unknown_ones_are_left_out() -> None:
    data = HERE.to_json()
    assert data["overlap"] is False and data["speculation"] is None and "dtype" not in data and "rank" not in data
    assert EngineInfo.from_json(data) == HERE
    assert EngineInfo.from_json(data | {"a later fact": 1}) == HERE
    first = ServerInfo(model="m", rank=0)
    assert ServerInfo.from_json(first.to_json()) == first and first.to_json()["rank"] == 0
    assert HERE and not EngineInfo() and not ServerInfo()


def test_facts_that_an_older_version_lacks_are_unknown() -> None:
    old = EngineInfo.from_json({"model": "m", "quantization": None})
    assert old == EngineInfo(model="m") and old.prefix_caching is None and old.speculation is None


def test_the_public_facts_have_no_path_of_this_machine() -> None:
    assert not HERE.public().keys() & {"model_dir", "log_file"}
    assert EngineInfo.from_json(HERE.public()) == replace(HERE, model_dir="", log_file="")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 7), ("model", "x" * 5000), ("num_blocks", 0), ("num_blocks", 1 << 40), ("overlap", 1),
        ("eos_ids", [-1]), ("notes", [1]), ("notes", ["a note"] * 101), ("generation", {"temperature": {}}),
        ("load_seconds", float("nan")), ("speculation", ["prompt-lookup"]),
    ],
)
def test_a_fact_that_is_not_valid_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineInfo.from_json({"model": "m", name: value})
