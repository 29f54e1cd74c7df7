"""A comparison of two runs as plain text and as data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from minitui.text import exact, listed
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
JSON_KEYS = {  # a figure of a run (RunFigures) -> its key in JSON: what is counted, or the unit at the end
    "requests": "requests", "finished": "finished_requests", "steps": "steps", "time": "time_ms",
    "prompt_tokens": "prompt_tokens", "computed": "prompt_tokens_computed", "cached": "prompt_tokens_cached",
    "twice": "tokens_computed_twice", "replies": "reply_tokens", "drafted": "draft_tokens",
    "accepted": "draft_tokens_accepted", "delayed": "host_waited_for_core_ms", "preemptions": "preemptions",
    "evicted": "blocks_evicted", "tok_s": "reply_tokens_per_second", "tokens_a_step": "reply_tokens_per_step",
    "firsts": "first_tokens", "first_p50": "first_token_p50_ms", "first_p99": "first_token_p99_ms", "gaps": "gaps",
    "gap_p50": "gap_p50_ms", "gap_p99": "gap_p99_ms", "gap_longest": "longest_gap_ms", "longest": "longest_gap",
}  # fmt: skip
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
    """Returns the comparison as data with the keys of JSON_KEYS; null: not known."""
    changes = {
        JSON_KEYS[one.quantity.name]: {
            "first": _number(one.first), "second": _number(one.second), "change_share": _number(one.share),
            "better": one.better,
        }
        for one in comparison.differences
    }  # fmt: skip
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
        "figures": {JSON_KEYS[name]: _number(value) for name, value in asdict(run.figures).items()},
        "requests": [request_data(run.view, lane) for lane in run.lanes],
    }


def _number(value: Any) -> Any:
    """Returns whole numbers as such, and other numbers rounded as durations are; also of a dictionary's values."""
    if isinstance(value, dict):
        return {name: _number(each) for name, each in value.items()}
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else exact(value)
