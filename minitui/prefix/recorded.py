"""The doctor on a recording of minitui or vLLM: contents from the tree, causes from the records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from engine.info import EngineInfo
from engine.trace.kind import Record
from minitui.prefix.diagnose import Finding, difference
from minitui.prefix.session import Part
from minitui.text import match_reason
from minitui.trace.reader import TraceReader
from minitui.viewmodel.explain.cost_model import DETERMINED, PREFILL_TOKENS, fit
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.state.annotated_state import AnnotatedState
from minitui.viewmodel.state.tree import ROLES
from minitui.whatif.asked import Asked, Recorded, asked_in, asked_of, hides_texts

INSIDE = re.compile(r"<tools>(?P<tools>.*?)</tools>|<think>(?P<thinking>.*?)</think>", re.S)
STOPS = {"evicted": "eviction", "window": "window", "state": "checkpoint", "short": "too short for a block"}
Decode = Callable[[list[int]], str]


def findings_in(reader: TraceReader) -> list[Finding]:
    """Returns the findings of a recording. Raises TraceError or EngineError."""
    return findings_of(asked_in(reader), reader.decode)


def findings_since(first: AnnotatedState, records: Iterator[Record], info: EngineInfo, decode: Decode) -> list[Finding]:
    """Returns the findings of a run that goes on: of the records since a state."""
    kept = [(first.state.snapshot(), list(records))]
    return findings_of(asked_of(kept, hides_texts(kept), not info.engine and not info.overlap), decode)


def findings_of(recorded: Recorded, decode: Decode) -> list[Finding]:
    """Returns a finding for each request that was admitted. `decode`: returns the text of ids."""
    cost, size = _token_ms(recorded.steps), recorded.block_size
    seen: dict[tuple[int, int], Asked] = {}  # (hash of a text up to a block's end, salt) -> the last request with it
    findings: list[Finding] = []
    writing: list[tuple[Asked, list[int]]] = []  # requests whose replies had not ended
    for one in recorded.requests:
        for other, texts in [each for each in writing if each[0].ended is not None and each[0].ended <= one.at]:
            _remember(seen, other, texts)
            writing.remove((other, texts))
        hashes = _hashes(one, size)
        if one.match[0] and not one.before:
            findings.append(_one(one, hashes, seen, size, None if recorded.hidden else decode))
            if cost is not None:
                findings[-1].seconds = findings[-1].lost * cost / 1e3
        _remember(seen, one, hashes[: one.prompt // size])
        writing.append((one, hashes))
    return findings


def _one(
    one: Asked, hashes: list[int], seen: dict[tuple[int, int], Asked], size: int, decode: Decode | None
) -> Finding:
    usable = hashes[: (one.prompt - 1) // size]
    own = _depth(usable, seen, one.salt)
    other = _depth(usable, seen, -1)
    (stop, at, detail), cached = one.match, one.cached
    could = max(own, other) * size
    found = Finding(one.id, one.prompt, could, cached, 0, "first")
    if could == 0:
        found.cause = STOPS["short"] if stop == "short" else "first"
        if one.after is not None and decode is not None:
            _changed(found, one, one.after, size, decode)
        return found
    ancestor = seen[usable[max(own, other) - 1], one.salt if own >= other else -1]
    found.ancestor, found.cause = ancestor.id, "none"
    lost = could - cached
    if lost >= size:
        found.lost = lost
        found.cause = "salt" if other > own and cached >= own * size else STOPS.get(stop, "unknown")
        found.where = match_reason(stop, at, cached, detail)
    elif decode is not None:
        for earlier in (one.after, ancestor):  # what its own chat said before explains most
            if earlier is not None and not found.lost and could < (earlier.prompt - 1) // size * size:
                _changed(found, one, earlier, size, decode)
    return found


def _changed(found: Finding, one: Asked, earlier: Asked, size: int, decode: Decode) -> None:
    """Note what a request changed of the prompt of an earlier one, if it did."""
    now, before = (parts_of_text(decode(each.known[: each.prompt].tolist())) for each in (one, earlier))
    cause, where, was, shown = difference(now, before)
    again = min(earlier.prompt, one.prompt) - found.could
    if cause and again >= size:
        found.cause, found.lost, found.ancestor = cause, again, earlier.id
        found.where, found.before, found.after = f"from token {found.could:,}, {where}", was, shown


def parts_of_text(text: str) -> list[Part]:
    """Returns the parts of a prompt as a template wrote it: messages, with tools and thinking by themselves."""
    found, kind, at = [], "prompt", 0
    for marker in [*ROLES.finditer(text), None]:
        message = text[at : marker.start() if marker else len(text)]
        last = 0
        for piece in INSIDE.finditer(message):
            found += [Part(kind, message[last : piece.start()])]
            last = piece.end()
            lines = (piece["tools"] or "").split("\n")
            found += [Part("tool", line) for line in lines if line] or [Part("thinking", piece["thinking"] or "")]
        found.append(Part(kind, message[last:]))
        if marker:
            kind, at = next(name for name in marker.groups() if name), marker.end()
    return [part for part in found if part.text.strip()]


def _remember(seen: dict[tuple[int, int], Asked], one: Asked, hashes: list[int]) -> None:
    for each in hashes:
        seen[each, one.salt] = seen[each, -1] = one


def _depth(hashes: list[int], seen: dict[tuple[int, int], Asked], salt: int) -> int:
    return next((i for i, each in enumerate(hashes) if (each, salt) not in seen), len(hashes))


def _hashes(one: Asked, size: int) -> list[int]:
    hashes, before = [], 0
    for i in range(min(len(one.known), one.total) // size):
        before = hash((before, one.known[i * size : (i + 1) * size].tobytes()))
        hashes.append(before)
    return hashes


def _token_ms(steps: Steps) -> float | None:
    """Returns what a prompt token costs in ms by the model of the timings panel; None if the fit does not tell it."""
    model = fit(steps, steps.committed)
    fitted = None if model is None else model.whole or model.device
    if fitted is None:
        return None
    cost, error = fitted.costs[PREFILL_TOKENS], fitted.covariance[PREFILL_TOKENS, PREFILL_TOKENS] ** 0.5
    return float(cost) if cost > 0 and error <= DETERMINED * cost else None
