"""The doctor on a recording of minitui or vLLM: contents from the tree, causes from the records."""

from __future__ import annotations

from minitui.prefix.diagnose import Finding
from minitui.text import match_reason
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.cost_model import DETERMINED, PREFILL_TOKENS, fit
from minitui.viewmodel.history.steps import Steps
from minitui.whatif.asked import Asked, asked_in

STOPS = {"evicted": "eviction", "window": "window", "state": "checkpoint", "short": "too short for a block"}


def findings_of(reader: TraceReader) -> list[Finding]:
    """Returns a finding for each request that was admitted in a recording. Raises TraceError or EngineError."""
    recorded = asked_in(reader)
    cost = _token_ms(recorded_view(reader).history.steps)
    size = recorded.block_size
    seen: dict[tuple[int, int], Asked] = {}  # (hash of a text up to a block's end, salt) -> the last request with it
    findings: list[Finding] = []
    writing: list[tuple[Asked, list[int]]] = []  # requests whose replies had not ended
    for one in recorded.requests:
        for other, texts in [each for each in writing if each[0].ended is not None and each[0].ended <= one.at]:
            _remember(seen, other, texts)
            writing.remove((other, texts))
        hashes = _hashes(one, size)
        if one.match[0] and not one.before:
            findings.append(_one(one, hashes, seen, size, reader))
            if cost is not None:
                findings[-1].seconds = findings[-1].lost * cost / 1e3
        _remember(seen, one, hashes[: one.prompt // size])
        writing.append((one, hashes))
    return findings


def _one(
    one: Asked, hashes: list[int], seen: dict[tuple[int, int], Asked], size: int, reader: TraceReader
) -> Finding:
    usable = hashes[: (one.prompt - 1) // size]
    own = _depth(usable, seen, one.salt)
    other = _depth(usable, seen, -1)
    (stop, at, _), cached = one.match, one.cached
    could = max(own, other) * size
    found = Finding(one.id, one.prompt, could, cached, 0, "first")
    if could == 0:
        found.cause = "too short for a block" if stop == "short" and one.prompt > size else "first"
        return found
    ancestor = seen[usable[max(own, other) - 1], one.salt if own >= other else -1]
    found.ancestor, found.cause = ancestor.id, "none"
    lost = could - cached
    if lost >= size:
        found.lost = lost
        found.cause = "salt" if other > own and cached >= own * size else STOPS.get(stop, "unknown")
        found.where = match_reason(stop, at)
    elif one.after is not None and could < (one.after.prompt - 1) // size * size:
        # The chat's own history does not go on as it was.
        before = one.after.known[could : one.after.prompt]
        now = one.known[could : one.prompt]
        if before and now and before != now[: len(before)]:
            found.cause, found.lost = "history changed", min(one.after.total, one.prompt) - could
            found.ancestor, found.where = one.after.id, f"from token {could:,}"
            found.before, found.after = (reader.decode(text[:16].tolist()) for text in (before, now))
    return found


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
    if model is None:
        return None
    fitted = model.whole if model.whole is not None else model.device
    if fitted is None:
        return None
    cost, error = fitted.costs[PREFILL_TOKENS], fitted.covariance[PREFILL_TOKENS, PREFILL_TOKENS] ** 0.5
    return float(cost) if cost > 0 and error <= DETERMINED * cost else None
