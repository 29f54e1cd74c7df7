"""Reads the KV events that vLLM and SGLang publish: msgpack, `[time, [event, …], data parallel rank]`.

An event is a map or an array whose first element or key "type" is its kind. Fields that minitui does not know are
ignored, because newer versions add some. What is read is bounded and checked: a server may send anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgpack

MOST_BYTES = 4 << 20  # of one message
MOST_HASHES = 100_000  # in one event
MAX_BLOCK = 4096  # tokens
MAX_TOKEN = 1 << 31
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
          "extra_keys", "group_idx")  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx")
FIELDS: dict[str, tuple[str, ...]] = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
Hash = int | bytes


@dataclass
class Event:
    """One event. `where`: why the tree does not show it, in a few words; empty if the tree shows it."""

    kind: str
    hashes: list[Hash] = field(default_factory=list)
    parent: Hash | None = None
    ids: list[int] = field(default_factory=list)
    size: int = 0
    where: str = ""


def read(payload: bytes) -> tuple[float, list[Event], int]:
    """Returns the time, the events and the rank of one message. Raises ValueError if it is not valid."""
    if len(payload) > MOST_BYTES:
        raise ValueError(f"a message has {len(payload):,} bytes")
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False, max_str_len=4096, max_map_len=1000)
    except Exception as error:  # msgpack raises errors of many classes
        raise ValueError(f"a message is not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("a message is not a list of a time and events")
    t, rank = batch[0], batch[2] if len(batch) > 2 else None
    if type(t) not in (int, float) or not math.isfinite(t):
        raise ValueError("a message has no time")
    return float(t), [_event(event) for event in batch[1]], rank if type(rank) is int and rank >= 0 else 0


def _event(event: Any) -> Event:
    if isinstance(event, list) and event:
        kind = event[0]
        values = dict(zip(FIELDS.get(kind, ()) if isinstance(kind, str) else (), event[1:], strict=False))
    elif isinstance(event, dict):
        kind, values = event.get("type"), event
    else:
        raise ValueError("an event is neither a map nor a list")
    if not isinstance(kind, str):
        raise ValueError("an event has no kind")
    if kind not in FIELDS:
        return Event(kind[:40], where="events of an unknown kind")
    hashes = values.get("block_hashes", [])
    if kind != "AllBlocksCleared" and not (
        isinstance(hashes, list) and len(hashes) <= MOST_HASHES and all(type(h) in (int, bytes) for h in hashes)
    ):
        raise ValueError(f"a {kind} event has no valid hashes")
    where = ""
    if values.get("medium") not in (None, "GPU"):
        where = "blocks outside of the GPU's memory"
    elif values.get("group_idx") not in (None, 0):
        where = "blocks of other KV cache groups"
    if kind != "BlockStored":
        return Event(kind, hashes, where=where)
    parent, ids, size = values.get("parent_block_hash"), values.get("token_ids"), values.get("block_size")
    if not (parent is None or type(parent) in (int, bytes)) or type(size) is not int or not 0 < size <= MAX_BLOCK:
        raise ValueError("a BlockStored event has no valid parent or block size")
    if isinstance(ids, list) and ids and type(ids[0]) is list:  # SGLang with EAGLE: each token with the next one
        ids = [pair[0] if type(pair) is list and len(pair) == 2 else None for pair in ids]
    if not isinstance(ids, list) or any(type(token) is not int or not 0 <= token < MAX_TOKEN for token in ids):
        raise ValueError("a BlockStored event has no valid token ids")
    if len(ids) != len(hashes) * size:
        where = where or "blocks without all of their tokens"
    return Event(kind, hashes, parent, ids, size, where)
