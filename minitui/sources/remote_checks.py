"""Checks the types, ranges and sizes of data from a minitui server, before the data is stored or applied. Records and
snapshots get the same checks as in a trace (minitui/trace/check.py). This module adds checks of answers, and of sizes
that grow during a long connection; ServerInfo checks the facts about the engine. Data of an unexpected type, size or
order is a ValueError, and is not shown."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from sys import intern
from typing import Any

from engine.errors import EngineDead, EngineError
from engine.info import MOST_TEXT, is_name
from engine.trace.kind import MOST, MOST_NUMBER, MOST_RECORDS, kind_of, named, position
from engine.trace.records import Record
from engine.trace.state import State
from minitui.protocol import TOKENIZER_FILES, ServerInfo
from minitui.sources.http import LARGE, check, httpx, load_json, open_client, unreachable
from minitui.trace import check as trace_check
from minitui.trace.check import Follower

MOST_REQUESTS = 1 << 16
MOST_LOADS = 1 << 16  # expert loads (layers times experts) in a record; hundreds of these records are kept


def greeting(data: Any) -> tuple[str, int]:
    """Returns (the engine's name, the number of its last record) from the event that begins a record stream."""
    if type(data) is not dict or not is_name(data.get("began")) or not _count(data.get("seq")):
        raise ValueError("its greeting lacks the engine's name or the record number")
    return data["began"], data["seq"]


def records(data: Any) -> list[Record]:
    """Returns the records of one event. `Watch` checks later whether they fit the state."""
    if type(data) is not list:
        raise ValueError("its records are not a list")
    checked: list[Record] = []
    for row in data:
        if type(row) is not list or not row or not _count(row[0]) or (checked and row[0] <= checked[-1][0]):
            raise ValueError("its records are not numbered in order")
        record = trace_check.record(row[0], row[1:])
        if not all(is_name(field) for field in record if type(field) is str):
            raise ValueError(f"a text in record {row[0]:,} ({kind_of(record)}) has more than {MOST_TEXT:,} characters")
        if kind_of(record) == "experts" and sum(len(tokens) for _, tokens in named(record).load) > MOST_LOADS:
            raise ValueError(f"record {row[0]:,} has more than {MOST_LOADS:,} expert loads")
        seq, t, kind, *fields = record
        # Thousands of records are kept, so all records of a kind share one string.
        checked.append((seq, t, intern(kind), *fields))
    return checked


def snapshot(data: Any) -> dict[str, Any]:
    """Returns the checked snapshot: the fields of engine.trace.state, and "began"."""
    if type(data) is not dict or not is_name(data.get("began")):
        raise ValueError("its snapshot does not name the engine")
    try:
        return trace_check.snapshot(data)
    except ValueError as error:
        raise ValueError(str(error).replace("a trace has", "the allowed range is")) from error


class Watch(Follower):
    """Computes the state from a snapshot and the records that follow it."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        super().__init__(State.from_snapshot(snapshot))

    def take(self, record: Record) -> None:
        """Apply the next record. Raises ValueError if it contradicts the state."""
        super().take(record)
        if len(self.state.requests) > MOST_REQUESTS:
            raise ValueError(f"its state has more than {MOST_REQUESTS:,} requests")


def info(data: Any) -> ServerInfo:
    """Returns the answer of /minitui/info. Raises ValueError if a field is missing or not valid."""
    try:
        found = ServerInfo.from_json(data)
    except ValueError as error:
        raise ValueError(f"its /minitui/info {error}") from error
    for name in ("model", "began", "tokenizer_files"):
        if data.get(name) is None:
            raise ValueError(f"its /minitui/info has no valid {name!r}")
    return found


def accepted(event: dict[str, Any]) -> tuple[int, int | None]:
    """Returns (the request's id, its seed) from the event that begins an answer."""
    request, seed = event["request"], event.get("seed")
    if "seed" not in event or not _count(request) or not METRICS["seed"](seed):
        raise ValueError("its answer begins without the request's id and seed")
    return request, seed


def delta(event: Any) -> dict[str, Any]:
    """Returns the checked piece of an answer: text, ids, finish_reason (empty before the end) and metrics."""
    if type(event) is not dict or type(event.get("text")) is not str or not _tokens(event.get("ids")):
        raise ValueError("a piece of its answer has no text and ids")
    if not is_name(event.get("finish_reason") or ""):
        raise ValueError("the finish reason of its answer is not a short text")
    return {**event, "finish_reason": event.get("finish_reason") or "", "metrics": metrics(event.get("metrics"))}


def metrics(given: Any) -> dict[str, Any]:
    """Returns the known and valid metrics of an answer."""
    if type(given) is not dict:
        return {}
    figures = {name: value for name, value in given.items() if name in METRICS and METRICS[name](value)}
    if "accepted_tokens" not in figures:
        figures.pop("drafted_tokens", None)
    match = given.get("match")
    if type(match) is dict and is_name(match.get("stop")) and position.fits(match.get("at")):
        figures["match"] = {"stop": match["stop"], "at": match["at"], "detail": str(match.get("detail"))[:MOST_TEXT]}
    return figures


def count(value: Any) -> int | None:
    """Returns `value` if it is a valid number of tokens, else None."""
    return value if type(value) is int and 0 <= value <= MOST else None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_RECORDS


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST_NUMBER


def _within(least: int, most: int, optional: bool = False) -> Callable[[Any], bool]:
    return lambda value: (type(value) is int and least <= value <= most) or (optional and value is None)


def _tokens(value: Any) -> bool:
    return type(value) is list and all(type(token) is int and 0 <= token <= MOST for token in value)


_COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions", "drafted_tokens", "accepted_tokens")
_TIMES = ("queue_ms", "prefill_ms", "ttft_ms", "decode_tok_s")
METRICS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_COUNTS, _within(0, MOST)), **dict.fromkeys(_TIMES, _number),
    "seed": _within(-(1 << 63), (1 << 64) - 1, optional=True),
}


async def probe(url: str, key: str = "") -> ServerInfo | None:
    """Returns a server's /minitui/info; None if it is not a minitui server, an empty one if it is not ready yet (503).
    Raises EngineError if the server cannot be reached or refuses the key."""
    async with open_client(url, key) as client:
        try:
            response = await client.get("/minitui/info")
            if response.status_code in (404, 405):
                return None
            return read_info(url, (await check(response)).content)
        except EngineDead:
            return ServerInfo()
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(url, error) from error


def read_info(url: str, text: bytes) -> ServerInfo:
    """Returns the checked answer of /minitui/info. Raises EngineError if it is not valid."""
    try:
        return info(load_json(text))
    except ValueError as error:
        raise EngineError(f"{url} is not a minitui server of this version: {error}") from error


async def load_tokenizer(http: httpx.AsyncClient, url: str, files: dict[str, str], cache: Path) -> Path:
    """Returns the directory in `cache` with a server's tokenizer, after downloading the missing files. `files`: the
    SHA-256 of each file by name, from /minitui/info."""
    if not set(files) <= set(TOKENIZER_FILES):
        unknown = sorted(set(files) - set(TOKENIZER_FILES))
        raise EngineError(f"{url} offers files that do not belong to a tokenizer: {', '.join(unknown)}")
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    directory = cache / digest[:24]
    directory.mkdir(parents=True, exist_ok=True)
    for name, wanted in files.items():
        path = directory / name
        if path.is_file():
            continue
        response = await http.get(f"/minitui/tokenizer/{name}", extensions=LARGE)
        content = (await check(response)).content
        if hashlib.sha256(content).hexdigest() != wanted:
            raise EngineError(f"{url} sent a {name} that does not match its announced checksum: connect again")
        partial = directory / f"{name}.{uuid.uuid4().hex[:8]}"
        partial.write_bytes(content)
        partial.replace(path)
    return directory
