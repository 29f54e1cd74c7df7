"""Reads the KV events that vLLM and SGLang publish: msgpack, `[time, [event, …], data parallel rank]`.

An event is a map or an array whose first element or key "type" is its kind. Fields that minitui does not know are
ignored, because newer versions add some. What is read is bounded and checked: a server may send anything. Events are
read one by one, so the caller can pause between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

MOST_EVENTS = 1 << 17  # of one message: one for each token of a long prompt, with SGLang's page size of 1
MOST_ITEMS = 1 << 18  # hashes or tokens of one event
MAX_BLOCK = 4096  # tokens
MAX_TOKEN = 1 << 31
MOST_GROUPS = 64  # KV cache groups
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
          "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
REMOVED = ("block_hashes", "medium", "group_idx")
FIELDS: dict[str, tuple[str, ...]] = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
Hash = int | bytes
FULL = (None, "", "full_attention", "mla_attention", "sink_full_attention")  # kinds that keep all of a text


@dataclass
class Event:
    """One event. `where`: why the tree does not show it, in a few words; empty if the tree shows it. `group`: the KV
    cache group; `spec`: its kind in vLLM's words, empty in older versions; `window`: tokens of a sliding window, or 0.
    """

    kind: str
    hashes: list[Hash] = field(default_factory=list)
    parent: Hash | None = None
    ids: list[int] = field(default_factory=list)
    size: int = 0
    where: str = ""
    group: int = 0
    spec: str = ""
    window: int = 0


def read(payload: bytes) -> tuple[float, Iterator[Event], int]:
    """Returns the time, the events and the rank of one message. Raises ValueError if it is not valid, and so may the
    events."""
    try:
        reader = _reader(payload)
        fields, t, found = reader.read_array_header(), reader.unpack(), reader.read_array_header()
        for _ in range(found if found <= MOST_EVENTS else 0):
            reader.skip()
        rank = reader.unpack() if fields > 2 and found <= MOST_EVENTS else None
    except Exception as error:  # msgpack raises errors of many classes
        raise ValueError(f"it is not a list of a time and events in msgpack ({error})") from error
    if found > MOST_EVENTS:
        raise ValueError(f"it has {found:,} events, and the limit is {MOST_EVENTS:,}")
    if type(t) not in (int, float) or not math.isfinite(t):
        raise ValueError("it has no time")
    return float(t), _events(payload), rank if type(rank) is int and rank >= 0 else 0


def _reader(payload: bytes) -> Any:
    reader = msgpack.Unpacker(
        strict_map_key=False, max_str_len=4096, max_bin_len=4096, max_map_len=1000, max_array_len=MOST_ITEMS
    )
    reader.feed(payload)
    return reader


def _events(payload: bytes) -> Iterator[Event]:
    reader = _reader(payload)
    reader.read_array_header()
    reader.skip()
    for _ in range(reader.read_array_header()):
        try:
            event = reader.unpack()
        except Exception as error:  # a part of it is beyond the limits of `_reader`
            raise ValueError(f"an event is beyond minitui's limits ({error})") from error
        yield _event(event)


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
    if kind != "AllBlocksCleared" and not (isinstance(hashes, list) and all(type(h) in (int, bytes) for h in hashes)):
        raise ValueError(f"a {kind} event has no valid hashes")
    where = ""
    if values.get("medium") not in (None, "GPU"):
        where = "blocks outside of the GPU's memory"
    group, spec, window = (values.get(name) for name in ("group_idx", *STORED[-2:]))
    for value, most in ((group, MOST_GROUPS - 1), (window, MAX_TOKEN)):
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise ValueError(f"a {kind} event has no valid KV cache group")
    if not (spec is None or (type(spec) is str and len(spec) <= 40)):
        raise ValueError(f"a {kind} event has no valid KV cache group")
    if kind != "BlockStored":
        return Event(kind, hashes, where=where, group=group or 0)
    parent, ids, size = values.get("parent_block_hash"), values.get("token_ids"), values.get("block_size")
    if not (parent is None or type(parent) in (int, bytes)) or type(size) is not int or not 0 < size <= MAX_BLOCK:
        raise ValueError("a BlockStored event has no valid parent or block size")
    if isinstance(ids, list) and ids and type(ids[0]) is list:  # SGLang with EAGLE: each token with the next one
        ids = [pair[0] if type(pair) is list and len(pair) == 2 else None for pair in ids]
    if not isinstance(ids, list) or any(type(token) is not int or not 0 <= token < MAX_TOKEN for token in ids):
        raise ValueError("a BlockStored event has no valid token ids")
    if len(ids) != len(hashes) * size and spec in FULL:
        where = where or "blocks without all of their tokens"
    return Event(kind, hashes, parent, ids, size, where, group or 0, spec or "", window or 0)
