"""Finds the tokens that end a reply."""

from __future__ import annotations

from pathlib import Path

from engine.fields import Fields
from engine.files import read_json_if_there


def eos_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-reply ids of a checkpoint's generation_config.json and config.json, each id once."""
    ids: list[int] = []
    for path in (directory / "generation_config.json", directory / "config.json"):
        ids += Fields(path, read_json_if_there(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
