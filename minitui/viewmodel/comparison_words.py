"""A comparison of two runs as plain text and as data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from minitui.text import listed
from minitui.viewmodel.comparison import Comparison
from minitui.viewmodel.request_words import request_data
from minitui.viewmodel.runs import Run

Info = Mapping[str, Any]
SETTINGS = {  # a fact about an engine -> its name in words
    "model": "model", "device": "device", "dtype": "dtype", "quantization": "quantization",
    "kv_cache_dtype": "KV cache", "num_blocks": "KV blocks", "block_size": "tokens in a block",
    "max_num_seqs": "rows", "max_num_batched_tokens": "token budget of a step", "prefix_caching": "prefix caching",
    "chunked_prefill": "chunked prefill", "scheduling_policy": "scheduling policy", "speculation": "speculation",
    "attention": "attention", "overlap": "overlap", "tensor_parallel_size": "ranks",
}  # fmt: skip
KEYS = {  # a setting -> the quantity that it is meant to change (comparison.py)
    "prefix_caching": "computed", "chunked_prefill": "gap_longest", "scheduling_policy": "steps",
    "speculation": "steps", "num_blocks": "preemptions",
}  # fmt: skip
DIGITS = 4  # of numbers in JSON, after the point
TITLE, VALUE, CHANGE = 24, 22, 9  # cells of a column


def settings_that_differ(infos: Sequence[Info]) -> str:
    """Returns the settings of two engines that differ: "prefix caching off and on"; empty if none is known."""
    first, second = infos
    parts = [f"{SETTINGS[name]} {_setting(first[name])} and {_setting(second[name])}" for name in _different(infos)]
    return listed(parts) if parts else ""


def key_of(infos: Sequence[Info]) -> str:
    """Returns the quantity that the setting in which two engines differ is meant to change; empty if several differ."""
    keys = [KEYS[name] for name in _different(infos) if name in KEYS]
    return keys[0] if len(keys) == 1 else ""


def _different(infos: Sequence[Info]) -> list[str]:
    first, second = infos
    return [name for name in SETTINGS if name in first and name in second and first[name] != second[name]]


def _setting(value: Any) -> str:
    if isinstance(value, dict):  # speculation
        return str(value.get("method", "on"))
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def told(comparison: Comparison, title: str, settings: str, notes: Sequence[str]) -> list[str]:
    """Returns the comparison as lines of text. `settings`: what differs in the engines; `notes`: more sentences."""
    first, second = comparison.runs
    lines = [title]
    if settings:
        lines.append(f"The engines differ in: {settings}.")
    lines += ["", " " * TITLE + f"{first.name:>{VALUE}}{second.name:>{VALUE}}{'change':>{CHANGE}}"]
    for one in comparison.differences:
        quantity = one.quantity
        word = {True: "  better", False: "  worse", None: ""}[one.better]
        values = f"{quantity.text(one.first):>{VALUE}}{quantity.text(one.second):>{VALUE}}"
        lines.append(f"{quantity.title:<{TITLE}}{values}{one.change:>{CHANGE}}{word}")
    return [*lines, "", *(text for text in (comparison.sentence, comparison.unlike, *notes) if text)]


def as_data(comparison: Comparison, title: str, infos: Sequence[Info], notes: Sequence[str]) -> dict[str, Any]:
    """Returns the comparison as data. Durations are in ms; null: not known."""
    changes = {
        one.quantity.name: _rounded(
            {"first": one.first, "second": one.second, "share": one.share, "better": one.better}
        )
        for one in comparison.differences
    }
    return {
        "title": title,
        "runs": [_run(run, info) for run, info in zip(comparison.runs, infos, strict=True)],
        "differences": changes, "sentence": comparison.sentence, "unlike": comparison.unlike,
        "notes": [note for note in notes if note],
    }  # fmt: skip


def _run(run: Run, info: Info) -> dict[str, Any]:
    return {
        "name": run.name,
        "settings": {name: info[name] for name in SETTINGS if name in info},
        "figures": _rounded(asdict(run.figures)),
        "requests": [request_data(run.view, lane) for lane in run.lanes],
    }


def _rounded(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the data with whole numbers as such, and with other numbers rounded."""
    return {name: _number(value) for name, value in data.items()}


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return _rounded(value)
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else round(value, DIGITS)
