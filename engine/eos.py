"""Finds the tokens that end a reply."""

from __future__ import annotations

from pathlib import Path

from engine.fields import Fields
from engine.files import read_json_if_there


def eos_ids(directory: Path) -> tuple[int, ...]:
    """Returns the end-of-reply ids of a checkpoint's generation_config.json and config.json, each id once."""
    ids: list[int] = []
    for path in (directory / "generation_config.json", directory / "config.json"):
        raw = read_json_if_there(path)
        ids += Fields(path, raw).token_ids("eos_token_id")
        if isinstance(text := raw.get("text_config"), dict):  # of a model for images and text
            ids += Fields(path, text, " in its text_config").token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
