"""The settings that a what-if can change, and what they were in a recording."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from engine.config import CHOICES, MOST, MOST_GAP_MS, MOST_SPECULATIVE_TOKENS
from engine.core.scheduler import SchedulerConfig
from engine.errors import EngineError
from engine.info import EngineInfo

WATERMARK = SchedulerConfig().watermark
SWITCHES = {"on": True, "off": False}


@dataclass(frozen=True)
class Setting:
    """Settings of a played engine, as in EngineConfig. 0 for none: `speculation`, the longest draft; `gap`, the target
    for gaps between tokens in ms."""

    budget: int
    seqs: int
    blocks: int
    block_size: int
    context: int
    policy: str = "fcfs"
    eviction: str = "lru"
    cache: bool = True
    chunking: bool = True
    speculation: int = 0
    gap: float = 0.0
    watermark: float = WATERMARK  # vLLM keeps no reserve

    @staticmethod
    def of(info: EngineInfo, snapshot: dict[str, Any]) -> Setting:
        """Returns the settings of a recording."""
        drafts = info.speculation or {}
        return Setting(
            budget=info.max_num_batched_tokens or snapshot["budget"],
            seqs=info.max_num_seqs or snapshot["max_num_seqs"],
            blocks=info.num_blocks, block_size=info.block_size,
            context=info.max_model_len or MOST["max_model_len"],
            policy=info.scheduling_policy if info.scheduling_policy in CHOICES["scheduling_policy"] else "fcfs",
            eviction=eviction if (eviction := snapshot.get("eviction_policy")) in CHOICES["eviction_policy"] else "lru",
            cache=info.prefix_caching is not False,
            chunking=info.chunked_prefill is not False, speculation=int(drafts.get("tokens", 0)), gap=info.max_gap_ms,
            watermark=0.0 if info.engine else WATERMARK,
        )

    def scheduler(self) -> SchedulerConfig:
        """Returns the settings of the scheduler."""
        return SchedulerConfig(
            max_num_batched_tokens=self.budget, max_num_seqs=self.seqs, max_model_len=self.context,
            chunked_prefill=self.chunking, policy=self.policy, speculative_tokens=self.speculation,
            watermark=self.watermark, max_gap_ms=self.gap or None,
        )

    def info(self, info: EngineInfo) -> EngineInfo:
        """Returns the facts about an engine with these settings."""
        return replace(
            info, num_blocks=self.blocks, block_size=self.block_size, max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget, prefix_caching=self.cache, chunked_prefill=self.chunking,
            scheduling_policy=self.policy, eviction_policy=self.eviction,
            speculation={"method": "prompt-lookup", "tokens": self.speculation} if self.speculation else {},
            max_gap_ms=self.gap,
        )


NUMBERS = {  # name -> the option of EngineConfig whose largest value bounds it
    "budget": "max_num_batched_tokens", "seqs": "max_num_seqs", "blocks": "num_blocks", "block_size": "block_size",
    "context": "max_model_len",
}
WORDS = {"policy": CHOICES["scheduling_policy"], "eviction": CHOICES["eviction_policy"]}
OR_OFF = {"speculation": MOST_SPECULATIVE_TOKENS, "gap": MOST_GAP_MS}  # numbers that may be "off" -> the largest
NAMES = (*NUMBERS, *WORDS, "cache", "chunking", *OR_OFF)
EXAMPLE = "budget=1024,blocks=2000"
MOST_POINTS = 24  # of a sweep


def value_of(name: str, text: str) -> Any:
    """Returns the value of a setting. Raises EngineError if there is no such setting or value."""
    if name not in NAMES:
        raise EngineError(f"there is no setting {name[:40]!r}: the settings are {', '.join(NAMES)}, as in {EXAMPLE}")
    if name in WORDS:
        if text not in WORDS[name]:
            raise EngineError(f"{name} is {text[:40]!r}: it must be one of {', '.join(WORDS[name])}")
        return text
    if name in ("cache", "chunking"):
        if text not in SWITCHES:
            raise EngineError(f"{name} is {text[:40]!r}: it must be on or off")
        return SWITCHES[text]
    if name in OR_OFF and text == "off":
        return 0
    most = OR_OFF[name] if name in OR_OFF else MOST[NUMBERS[name]]
    if not re.fullmatch(r"[1-9]\d{0,9}", text, re.ASCII) or int(text) > most:
        raise EngineError(f"{name} is {text[:40]!r}: it must be a whole number from 1 to {most:,}")
    return int(text)


def changes(text: str) -> dict[str, str]:
    """Returns {"budget": "1024", "blocks": "2000"} for "budget=1024,blocks=2000". Raises EngineError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in found:
            raise EngineError(
                f"{text[:80]!r} is not a list of settings: write {EXAMPLE}; the names: {', '.join(NAMES)}"
            )
        value_of(name, value)
        found[name] = value
    return found


def points(text: str) -> tuple[str, list[str]]:
    """Returns ("budget", ["512", "1024", …]) for "budget=512..8192" (each twice the one before) or "cache=on|off".
    Raises EngineError."""
    name, equals, values = text.partition("=")
    if not equals:
        raise EngineError(f"{text[:80]!r} is not a range of a setting: write budget=512..8192 or policy=fcfs|static")
    low, dots, high = values.partition("..")
    if not dots:
        found = values.split("|")
        for value in found:
            value_of(name, value)
        return name, found
    first, last = value_of(name, low), value_of(name, high)
    if type(first) is not int or type(last) is not int or first >= last:
        raise EngineError(f"{values[:40]!r} is not a range of {name}: write two numbers, the smaller first")
    doubled = (max(1, first) << i for i in range(MOST_POINTS - 1))
    return name, [str(n) for n in (*(n for n in doubled if n < last), last)]
