"""Describes an answer in one line, and separates its thinking from its text."""

from __future__ import annotations

from typing import Any

from minitui.chat.conversation import Message
from minitui.chat.prompt import END_THINK, THINK
from minitui.text import duration, match_reason

PAUSED = "The engine is paused: /resume lets it run."  # said where a question waits
OTHER_PAUSED = "Your lecturer paused the engine: the answer goes on when it runs again."  # with a key only for chats
OTHER_SLOW = "Your lecturer slowed the engine down to 1/{pace:g} of its speed."


def split_thinking(text: str) -> tuple[str, str, bool]:
    """Splits `text` into (thinking, answer, True if the thinking is unfinished). A Markdown parser would drop the
    <think> part as HTML."""
    stripped = text.lstrip()
    if not stripped.startswith(THINK):
        # A streamed "<thi" may still become "<think>".
        return ("", "", True) if stripped and THINK.startswith(stripped) else ("", text, False)
    inner, end, rest = stripped[len(THINK) :].partition(END_THINK)
    return inner.strip("\n"), rest.lstrip("\n"), not end


def describe_answer(message: Message) -> list[tuple[str, str]]:
    """Returns the line under an answer as (text, tone) parts. Tones: dim, hit, bad."""
    m = message.metrics
    parts: list[tuple[str, str]] = []
    if message.state == "cancelled":
        parts.append((message.error or "cancelled", "bad"))
    if message.state == "error":
        parts.append((message.error, "bad"))
    if not m:
        return parts
    if message.state == "cancelled" and not message.error and not m.get("output_tokens"):
        return [("cancelled before its first token", "bad")]
    if m.get("ttft_ms") is not None:
        parts.append((f"first token {duration(m['ttft_ms'])}", "dim"))
    if m.get("decode_tok_s"):
        parts.append((f"{m['decode_tok_s']:,.0f} tok/s", "dim"))
    parts.append((f"{m.get('output_tokens', 0):,} tokens", "dim"))
    if m.get("finish") == "length":
        tokens = (m.get("prompt_tokens") or 0) + m.get("output_tokens", 0)
        full = f"stopped at {tokens:,} tokens of prompt and answer: the context or the pool is full"
        parts.append((full if m.get("full") else "stopped at max_tokens", "dim"))
    if by := m.get("replica"):
        failed = " and ".join(str(number) for number in by["passed"])
        why = f", because replica {failed} did not answer" if failed else ""
        parts.append((f"replica {by['number']} ({by['name']}){why}", "dim"))
    total, cached = m.get("prompt_tokens", 0), m.get("cached_tokens", 0)
    if total is None or cached is None:  # not every server reports these numbers
        parts.append(("cache use unknown", "dim"))
        return parts
    parts.append((f"{cached:,} of {total:,} prompt tokens from cache", "hit" if cached else "dim"))
    match = m.get("match") or {}
    if reason := match_reason(str(match.get("stop") or ""), match.get("at"), cached, match.get("detail") or ""):
        parts.append((reason, "dim"))
    if m.get("drafted_tokens"):
        parts.append((f"{m['accepted_tokens']:,} of {m['drafted_tokens']:,} draft tokens accepted", "dim"))
    if m.get("preemptions"):
        parts.append((f"preempted {m['preemptions']}×", "bad"))
    if diverged := m.get("diverged"):
        parts.append((f"{diverged['reason']}: the prompt changes from token {diverged['at']:,} on", "dim"))
    return parts


def replay_note(metrics: dict[str, Any], block_size: int | None, primed: bool = False) -> str:
    """Returns how much of the prompt of a chat that replays another one came from the cache. `primed`: see Session."""
    cached, total = metrics.get("cached_tokens"), metrics.get("prompt_tokens")
    if cached is None or total is None or not block_size:
        return "replayed; this server does not report how much of the prompt came from its cache"
    first = "the cache had nothing of this prompt, so a first request computed it. Then " if primed else ""
    return (
        f"{first}replayed: {cached:,} of {total:,} prompt tokens came from the cache ({cached // block_size} blocks "
        f"of {block_size}); {total - cached:,} tokens were computed"
    )
