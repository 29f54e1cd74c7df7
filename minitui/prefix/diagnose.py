"""Finds, for each request of a log, its nearest ancestor, the first text that differs, and the cause. The nearest
ancestor is the earlier request with the longest equal beginning. What it shares could have come from the cache. A cause
is named only if the texts, the fields of the request or the server's own numbers show it; else it is "unknown"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf

import numpy as np

from minitui.prefix.session import Part, Turn

CAUSES = {  # cause -> (whose fault it is, what to change)
    "none": ("", ""),
    "first": ("", ""),
    "too short for a block": ("", ""),
    "tools reordered": ("client", "send the tools in the same order each time"),
    "tools changed": ("client", "keep the set of tools, and put tools that change last"),
    "date or time": ("template", "put the date or time at the end of the prompt, or leave it out"),
    "changing value": ("template", "remove the number or hash that changes with each request"),
    "system prompt changed": ("client", "keep the system prompt, and put what changes into the last message"),
    "thinking removed": ("template", "keep the thinking of earlier turns, or accept that its turn is computed again"),
    "history changed": ("client", "send earlier messages unchanged"),
    "history shortened": ("client", "remove old messages seldom, and many at once"),
    "salt": ("client", "use one cache_salt for requests that may share"),
    "adapter": ("client", "send the same prompt to one model or adapter"),
    "another replica": ("routing", "route a chat to the replica that has its prefix"),
    "eviction": ("server", "a larger pool, or fewer requests between two turns"),
    "window": ("server", "nothing: the window of this model does not keep what it needs to go on"),
    "checkpoint": ("server", "checkpoints at shorter intervals (--checkpoint-interval of minitui)"),
    "unknown": ("unknown", "the server does not tell why: watch it with minitui, or read its log"),
}
DATE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|"
    r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|"
    r"\b1[5-9]\d{8}(?:\d{3})?\b", re.I
)
VALUE = re.compile(r"[0-9a-f]{4,}|\d+|[A-Za-z0-9_+/=-]{12,}", re.I)
AROUND = 24  # characters around a difference in which a date is looked for
SHOWN = 60  # characters of a diff
CHARACTERS = 4.0  # of a token, if a server tells no number of tokens
ROUNDING = 256  # tokens that a server may leave out because they fill no block
RELATED = 0.5  # share of a part: two texts with more in common are versions of one text
ALIKE = 0.05  # a server's count is the expected one within this share


@dataclass(slots=True)
class Finding:
    """What became of one request's beginning. Tokens; `estimated`: from the number of characters. `could`: shared with
    the ancestor; `cached`: None if the server does not tell; `lost`: what a repaired cause would save. `seconds`: None
    if the times do not tell it."""

    number: int
    prompt: int
    could: int
    cached: int | None
    lost: int
    cause: str
    ancestor: int | None = None
    where: str = ""
    before: str = ""
    after: str = ""
    seconds: float | None = None
    estimated: bool = False


def diagnose(turns: Sequence[Turn]) -> list[Finding]:
    """Returns a finding for each request, in order."""
    findings = [_one(turn, turns[:i]) for i, turn in enumerate(turns)]
    cost = _token_ms(turns)
    for finding in findings:
        finding.seconds = None if cost is None else finding.lost * cost / 1e3
    return findings


def _one(turn: Turn, earlier: Sequence[Turn]) -> Finding:
    size = sum(map(len, turn.parts))
    per_token = size / turn.prompt if turn.prompt else CHARACTERS
    prompt = turn.prompt if turn.prompt is not None else round(size / CHARACTERS)
    best, shared = None, 0
    for other in reversed(earlier):  # of equal ones the latest
        n = _shared(turn.parts, other.parts)
        better = n > shared or (n == shared and best is not None and _apart(turn, best) and not _apart(turn, other))
        if n and better:
            best, shared = other, n
    could = min(round(shared / per_token), prompt)
    cause = "first" if best is None else "none"
    found = Finding(turn.number, prompt, could, turn.cached, 0, cause, estimated=turn.prompt is None)
    if best is None:
        return found
    found.ancestor = best.number
    intact = sum(map(len, best.parts))
    if shared < min(intact, size):
        cause, found.where, found.before, found.after = difference(turn.parts, best.parts)
        # What the ancestor has after the difference, and this request has, too, is computed again.
        again = min(intact, size) - shared
        if cause and again > 0:
            found.cause, found.lost = cause, round(again / per_token)
    missing = could - (turn.cached if turn.cached is not None else could)
    if missing > max(ROUNDING, ALIKE * could):
        if missing > found.lost or found.cause == "none":
            found.cause = _apart(turn, best) or "unknown"
        found.lost += missing
    elif turn.cached is None and found.cause == "none" and _apart(turn, best):
        found.cause, found.lost = _apart(turn, best), could
    return found


def _apart(turn: Turn, other: Turn) -> str:
    """Returns why two requests cannot share a cache; empty if they can."""
    if turn.salt != other.salt or turn.adapter != other.adapter:
        return "salt" if turn.salt != other.salt else "adapter"
    return "another replica" if turn.replica and other.replica and turn.replica != other.replica else ""


def _shared(a: Sequence[Part], b: Sequence[Part]) -> int:
    """Returns the number of equal characters at the beginning of two prompts."""
    n = 0
    for one, other in zip(a, b, strict=False):
        same = one.common(other)
        n += same
        if same < len(one) or same < len(other) or one.kind != other.kind:
            break
    return n


def difference(parts: Sequence[Part], earlier: Sequence[Part]) -> tuple[str, str, str, str]:
    """Returns (cause, where, text before, text now) of the first difference. The cause is empty where the request ends
    in another way than its ancestor: that is another question, not a change of what came before."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(parts, earlier, strict=False))
    i = sum(1 for _ in alike)
    now = parts[i] if i < len(parts) else Part("end")
    was = earlier[i] if i < len(earlier) else Part("end")
    at = now.common(was)
    where = f"part {i + 1} ({now.kind if now.kind == was.kind else f'{was.kind}, now {now.kind}'}), character {at:,}"
    shown = (_excerpt(was, at), _excerpt(now, at))
    return _cause(parts, earlier, i, at), where, *shown


def _excerpt(part: Part, at: int) -> str:
    return "hidden" if part.hashes else part.text[max(0, at - 12) : at + SHOWN]


def _cause(parts: Sequence[Part], earlier: Sequence[Part], i: int, at: int) -> str:
    now = parts[i] if i < len(parts) else None
    was = earlier[i] if i < len(earlier) else None
    if was is None or now is None:
        return "history shortened" if was is not None and i else ""
    if not _same_conversation(parts, earlier, i, at):
        return ""
    if "tool" in (now.kind, was.kind):
        tools, before = (sorted(p for p in each if p.kind == "tool") for each in (parts, earlier))
        return "tools reordered" if tools == before else "tools changed"
    if was.kind == "thinking" and now.kind != "thinking":
        return "thinking removed"
    value = _changing(was, now, at)
    if now.kind == was.kind and now.kind in ("system", "developer"):
        return value or "system prompt changed"
    rest, later = parts[i:], earlier[i:]
    after = next((n for n in range(1, len(later)) if later[n] == rest[0]), None)
    if after is not None and (len(rest) == 1 or later[after : after + 2] == rest[:2] or after + 1 == len(later)):
        dropped = earlier[i : i + after]
        return "thinking removed" if all(p.kind == "thinking" for p in dropped) else "history shortened"
    if value and now.kind == was.kind and i < len(earlier) - 1:
        return value
    # The last message of the ancestor is its question: a request with another one is no change of history, unless it
    # has more messages than its ancestor.
    continues = len(parts) > len(earlier) > 1 and now.kind == was.kind
    questions = [n for n, part in enumerate(earlier) if part.kind not in ("assistant", "thinking")]
    if i >= (questions[-1] if questions else len(earlier) - 1) and not continues:
        return ""
    return value or "history changed"


def _same_conversation(parts: Sequence[Part], earlier: Sequence[Part], i: int, at: int) -> bool:
    """Returns whether two prompts that differ from part `i` on belong together: a later part is the same, or most of
    this part. Others only begin alike, such as two chats with one system prompt."""
    if not set(earlier[i:]).isdisjoint(parts[i:]):
        return True
    was, now = earlier[i], parts[i]
    alike = at + (0 if was.hashes else _alike_at_end(was.text[at:], now.text[at:]))
    return was.kind == now.kind and alike >= RELATED * max(len(was), len(now))


def _alike_at_end(a: str, b: str) -> int:
    """Returns the number of equal characters at the end of two texts."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _changing(was: Part, now: Part, at: int) -> str:
    """Returns whether a text differs in a date or a value only: the rest of both is alike."""
    if was.hashes or now.hashes or was.kind != now.kind:
        return ""
    a, b = was.text, now.text
    end = _alike_at_end(a[at:], b[at:])
    low = max(0, at - AROUND)
    spans = (text[low : len(text) - end + AROUND] for text in (a, b))
    middle = [text[at : len(text) - end] for text in (a, b)]
    if max(map(len, middle)) > 80:
        return ""
    if all(_dated(text, at - low, len(text) - AROUND if end >= AROUND else len(text)) for text in spans):
        return "date or time"
    wide = [_word(text, at, len(text) - end) for text in (a, b)]
    return "changing value" if all(VALUE.fullmatch(each) for each in wide) else ""


def _dated(text: str, begin: int, end: int) -> bool:
    """True if a date or time in the text touches the characters from `begin` to `end`."""
    return any(found.start() <= end and found.end() >= begin for found in DATE.finditer(text))


def _word(text: str, begin: int, end: int) -> str:
    while begin > 0 and (text[begin - 1].isalnum() or text[begin - 1] in "_-"):
        begin -= 1
    while end < len(text) and (text[end].isalnum() or text[end] in "_-"):
        end += 1
    return text[begin:end]


def _token_ms(turns: Sequence[Turn]) -> float | None:
    """Returns what a computed prompt token costs in ms, from the times to first byte; None if these do not tell it."""
    told = ((t.prompt, t.cached, t.first_ms) for t in turns)
    known = [(n - cached, ms) for n, cached, ms in told if n is not None and cached is not None and ms is not None]
    if len(known) < 4 or len({n for n, _ in known}) < 3:
        return None
    tokens, ms = np.array(known, float).T
    slope = float(np.polyfit(tokens, ms, 1)[0])
    return slope if 0 < slope < inf else None
