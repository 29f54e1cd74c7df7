"""Two runs compared: what differs in figures, and one sentence about it. Does not import Textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from engine.info import EngineInfo
from minitui.text import count, duration, exact, listed
from minitui.viewmodel.compare.runs import KEYS, QUANTITIES, Quantity, Run, Totals, Value
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import request_data

CLEAR = 0.1  # durations that differ by a smaller share are called about the same
PRICE = 0.25  # what got worse by a smaller share is not worth a sentence


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of both runs."""

    quantity: Quantity
    first: Value
    second: Value
    alike: bool = True  # the runs did the same work, so their totals can be compared
    judged: bool = True  # False: a run stopped early, so nothing of it is better or worse

    @property
    def share(self) -> float | None:
        """The change from the first run to the second, as a share of the first; None if it is not known."""
        if self.first is None or self.second is None:
            return None
        if self.first == self.second:
            return 0.0
        return (self.second - self.first) / self.first if self.first else None

    @property
    def weight(self) -> float:
        """The size of the change: the same for a half and for twice as much. 0: about the same, or not known."""
        if self.first is None or self.second is None or self.first == self.second:
            return 0.0
        if min(self.first, self.second) <= 0:
            return log(1 + abs(self.second - self.first))
        size = abs(log(self.second / self.first))
        return 0.0 if self.quantity.timed and size < log(1 + CLEAR) else size

    @property
    def better(self) -> bool | None:
        """True if the second run is clearly better, False if it is clearly worse, None if that cannot be said."""
        alike = self.judged and (self.alike or self.quantity.each)
        if self.quantity.less is None or not self.weight or not alike:
            return None
        assert self.first is not None and self.second is not None
        return (self.second < self.first) == self.quantity.less

    @property
    def change(self) -> str:
        """The change in a few characters: "-54%", "×2.6", "+2" (from zero), "same", "–"."""
        if self.first is None or self.second is None:
            return "–"
        if self.first == self.second:
            return "same"
        if self.share is None:
            return "+" + self.quantity.text(self.second)
        if self.share >= 1:
            return f"×{1 + self.share:,.1f}"
        return f"{self.share:+.0%}"


class Comparison:
    """One or two runs on clocks that begin together. `key`: the quantity that the setting is meant to change."""

    def __init__(self, runs: Sequence[Run | Totals], key: str = "") -> None:
        self.runs: list[Run] = list(runs)  # type: ignore[arg-type]  # drawings and data need more than totals
        self.key = key

    @classmethod
    def of(cls, view: View, key: str = "") -> Comparison:
        """Returns the comparison of the run that the view shows with `view.earlier`, if there is one."""
        return cls([Run(one) for one in _views(view)], key)

    def refresh(self) -> None:
        """Read what the views of the runs have folded since the last call."""
        for run in self.runs:
            run.refresh()

    def shows(self, view: View) -> bool:
        """True if these are still the runs that `Comparison.of(view)` compares."""
        views = _views(view)
        return len(views) == len(self.runs) and all(
            run.view is one and run.name == one.run_name for run, one in zip(self.runs, views, strict=True)
        )

    def end(self, unit: str) -> float:
        """Returns the end of the longer run on a clock ("ms" or "steps")."""
        return max(run.clocks[unit].end for run in self.runs)

    @property
    def differences(self) -> list[Difference]:
        """All quantities of two runs, in the order of QUANTITIES. Empty with one run."""
        if len(self.runs) < 2:
            return []
        first, second = (run.figures for run in self.runs)
        alike, judged = not self.unlike, not self.stopped
        every = [Difference(one, one.of(first), one.of(second), alike, judged) for one in QUANTITIES]
        return [one for one in every if not one.quantity.optional or one.first or one.second]

    @property
    def stopped(self) -> str:
        """Says which run stopped at a failed step, before its requests ended, and why; else empty."""
        return " ".join(run.stopped for run in self.runs if run.stopped)

    @property
    def unlike(self) -> str:
        """What makes the comparison unfair: a sentence if the runs had different requests, else empty."""
        if len(self.runs) < 2:
            return ""
        first, second = (run.figures for run in self.runs)
        if any(run.forgotten for run in self.runs):
            return "Only the last steps of a long run are kept: the figures leave out its beginning."
        if any(figures.finished < figures.requests for figures in (first, second)):
            unfinished = [count(f.requests - f.finished, "request") for f in (first, second)]
            return f"Not finished: {unfinished[0]} of the first run, {unfinished[1]} of the second."
        parts: list[str] = []
        for name, noun in (("requests", "request"), ("prompt_tokens", "prompt token"), ("replies", "reply token")):
            a, b = getattr(first, name), getattr(second, name)
            if a != b:
                parts.append(f"{a:,} and {count(b, noun)}")
        return f"The two runs did not do the same work: {'; '.join(parts)}." if parts else ""

    @property
    def disturbed(self) -> str:
        """A sentence if other programs delayed a run by a clear share of its time; else empty."""
        parts = [
            f"{duration(figures.delayed)} ({figures.delayed / figures.time:.0%}) of {run.name or 'this run'}"
            for run in self.runs
            if (figures := run.figures).delayed is not None and figures.delayed > CLEAR * figures.time
        ]
        if not parts:
            return ""
        return f"Other programs used the core for {listed(parts)}: on a quiet machine, the times are shorter."

    @property
    def sentence(self) -> str:
        """What differs most, in one or two sentences. Empty with one run."""
        if len(self.runs) < 2 or not all(run.figures.steps for run in self.runs):
            return ""
        if self.stopped:
            return self.stopped
        unlike = bool(self.unlike)
        by_name = {one.quantity.name: one for one in self.differences}
        told = [one for one in self.differences if one.weight and (one.quantity.each if unlike else one.quantity.told)]
        main = by_name.get(self.key)
        if main is None or not main.weight or (unlike and not main.quantity.each):
            main = max(told, key=lambda one: one.weight, default=None)
        if all(one.first == one.second for one in self.differences):
            return "No figure of the two runs differs."
        if main is None:
            return f"No figure of the two runs differs by more than {CLEAR:.0%}."
        first, second = (run.name for run in self.runs)
        words = f"With {second or 'the second run'}, compared with {first or 'the first run'}, {_told(main)}"
        against = [one for one in told if {one.better, main.better} == {True, False}]
        time = by_name["time"]
        if self.disturbed:  # times may differ for other reasons than the setting
            against = [one for one in against if not one.quantity.timed]
        elif time is not main and time.weight and time not in against and not unlike:
            words += f", and {_told(time)}"
        price = max(against, key=lambda one: one.weight, default=None)
        if price is not None and price.weight >= log(1 + PRICE):
            return f"{words}. In return, {_told(price)}."
        return words + "."


def _views(view: View) -> list[View]:
    """Returns the views of the run before, if there is one, and of the run that the view shows."""
    if view.earlier is None:
        return [view]
    if view.earlier.history.steps is view.history.steps:  # the run was kept, and the next run has not begun
        return [view.earlier]
    return [view.earlier, view]


def _told(one: Difference) -> str:
    """Returns "the longest gap between tokens was 14 ms instead of 230 ms (-94%)"."""
    quantity = one.quantity
    share = "" if one.share is None else f" ({one.share:+.0%})"
    if one.share is not None and one.share >= 1:
        share = f" ({1 + one.share:,.1f} times)"
    return f"the {quantity.words} was {quantity.text(one.second)} instead of {quantity.text(one.first)}{share}"


SETTINGS = {  # a fact about an engine -> its name in words
    "model": "model", "device": "device", "dtype": "dtype", "quantization": "quantization",
    "kv_cache_dtype": "KV cache", "num_blocks": "KV blocks", "block_size": "tokens in a block",
    "max_num_seqs": "rows", "max_num_batched_tokens": "token budget of a step", "prefix_caching": "prefix caching",
    "chunked_prefill": "chunked prefill", "scheduling_policy": "scheduling policy",
    "eviction_policy": "order of eviction", "speculation": "speculation",
    "max_gap_ms": "target for gaps", "attention": "attention", "overlap": "overlap", "tensor_parallel_size": "ranks",
}
CHANGED = {  # a setting -> the quantity that it is meant to change (runs.py)
    "prefix_caching": "computed", "chunked_prefill": "gap_longest", "scheduling_policy": "steps",
    "speculation": "steps", "num_blocks": "preemptions", "max_gap_ms": "gap_p99",
}
TITLE, VALUE, CHANGE = 23, 20, 9  # cells of a column: with a word behind, 80


def settings_that_differ(infos: Sequence[EngineInfo]) -> str:
    """Returns the settings of two engines that differ: "prefix caching off and on"; empty if none is known."""
    first, second = infos
    parts = [
        f"{SETTINGS[name]} {_setting(getattr(first, name))} and {_setting(getattr(second, name))}"
        for name in _different(infos)
    ]
    return listed(parts) if parts else ""


def key_of(infos: Sequence[EngineInfo]) -> str:
    """Returns the quantity that the setting in which two engines differ is meant to change; empty if several differ."""
    keys = [CHANGED[name] for name in _different(infos) if name in CHANGED]
    return keys[0] if len(keys) == 1 else ""


def _known(info: EngineInfo) -> dict[str, Any]:
    return info.to_json() | {"max_gap_ms": info.max_gap_ms}  # 0: none


def _different(infos: Sequence[EngineInfo]) -> list[str]:
    first, second = map(_known, infos)
    return [name for name in SETTINGS if name in first and name in second and first[name] != second[name]]


def _setting(value: Any) -> str:
    if isinstance(value, dict):  # speculation
        return str(value.get("method", "off"))
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):  # the target for gaps
        return f"{value:g} ms" if value else "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def told(comparison: Comparison, title: str, settings: str, notes: Sequence[str]) -> list[str]:
    """Returns the comparison as lines of text. `settings`: what differs in the engines; `notes`: more sentences."""
    first, second = comparison.runs
    lines = [text for text in (comparison.stopped, title) if text]
    if settings:
        lines.append(f"The engines differ in: {settings}.")
    lines += ["", " " * TITLE + f"{first.name:>{VALUE}}{second.name:>{VALUE}}{'change':>{CHANGE}}"]
    for one in comparison.differences:
        quantity = one.quantity
        word = {True: "  better", False: "  worse", None: ""}[one.better]
        values = f"{quantity.text(one.first):>{VALUE}}{quantity.text(one.second):>{VALUE}}"
        lines.append(f"{quantity.title:<{TITLE}}{values}{one.change:>{CHANGE}}{word}")
    sentence = "" if comparison.stopped else comparison.sentence
    return [*lines, "", *(text for text in (sentence, comparison.unlike, *notes) if text)]


def as_data(comparison: Comparison, title: str, infos: Sequence[EngineInfo], notes: Sequence[str]) -> dict[str, Any]:
    """Returns the comparison as data with the keys of RunFigures; null: not known."""
    changes = {
        one.quantity.key: {
            "first": number(one.first), "second": number(one.second), "change_share": number(one.share),
            "better": one.better,
        }
        for one in comparison.differences
    }
    return {
        "title": title,
        "runs": [_run(run, info) for run, info in zip(comparison.runs, infos, strict=True)],
        "differences": changes, "sentence": comparison.sentence, "unlike": comparison.unlike,
        "notes": [note for note in notes if note],
    }


def _run(run: Run, info: EngineInfo) -> dict[str, Any]:
    known = _known(info)
    data = {
        "name": run.name,
        "settings": {name: known[name] for name in SETTINGS if name in known},
        "figures": {KEYS[name]: number(value) for name, value in asdict(run.figures).items()},
    }
    return data if run.lanes is None else data | {"requests": [request_data(run.view, lane) for lane in run.lanes]}


def number(value: Any) -> Any:
    """Returns whole numbers as such, and other numbers rounded as durations are; also of a dictionary's values."""
    if isinstance(value, dict):
        return {name: number(each) for name, each in value.items()}
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else exact(value)
