"""Checks the lines of a trace: types and ranges, and that a keyframe's requests, tree and pool agree.

Each fault raises a ValueError with a short reason. Views and exports trust a trace that passes these checks and the
checks of minitui/trace/follow.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.trace.records import FIELDS, Record
from engine.trace.runs import blocks_of, number_of
from minitui.trace.lines import MOST_VALUES

MOST = (1 << 31) - 1  # largest count or id
MOST_NUMBER = 1e12  # largest duration, in the unit of its field
MOST_RECORDS = 1 << 53  # largest record number; every JSON reader reads integers up to here exactly
MOST_BLOCKS = 1 << 21  # blocks in a pool; a view keeps several copies of a pool, at 32 bytes per block
MOST_HELD = MOST_VALUES  # entries in the block tables of all requests together

Check = Callable[[Any], bool]


def _float(least: float) -> Check:
    return lambda value: type(value) in (int, float) and least <= value <= MOST_NUMBER


def _int(least: int, most: int = MOST) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _is(kind: type) -> Check:
    return lambda value: type(value) is kind


_number, _signed = _float(0), _float(-MOST_NUMBER)
_count, _positive, _step, _sequence = _int(0), _int(1), _int(-1), _int(0, MOST_RECORDS)
_text, _bool = _is(str), _is(bool)


def _one_of(*values: str) -> Check:
    return lambda value: type(value) is str and value in values


def _list(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _counts(value: Any) -> bool:
    """Returns True for a list of counts. The list may be long (a prompt), so no function is called for each item."""
    if type(value) is not list or not value:
        return value == []
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MOST


def _positives(value: Any) -> bool:
    return _counts(value) and 0 not in value


def _row(*checks: Check) -> Check:
    return lambda value: (
        type(value) in (list, tuple)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _rows(*checks: Check) -> Check:
    return _list(_row(*checks))


def _load(value: Any) -> bool:
    """Returns True for [(layer, [tokens of each expert])] with the same number of experts in each layer."""
    return _rows(_count, _counts)(value) and len({len(tokens) for _, tokens in value} - {0}) == 1 and all(
        tokens for _, tokens in value
    )  # fmt: skip


def _detail(value: Any) -> bool:
    return type(value) is str and re.match(r"[\d,]{1,16} of \d[\d,]{0,16} tokens", value) is not None


_STATES = ("waiting", "running", "preempted")

FIELD: dict[str, Check] = {
    "request": _count, "group": _text, "prompt_tokens": _count, "max_total": _count, "reason": _text,
    "queue": _counts, "row": _count, "tokens": _count, "stop": _text, "at": _step, "detail": _detail,
    "blocks": _positives, "output_tokens": _count, "node": _count, "dropped": _count, "parent": _count,
    "ids": _counts, "step": _step, "upper": _positive, "lower": _positive, "block": _positive,
    "nodes": _rows(_count, _count), "joined": _counts,
    "prefills": _rows(_count, _count, _positive, _bool), "left": _counts, "waiting": _count, "error": _text,
    "drafts": _rows(_count, _count, _count), "state": _one_of("open", "closed"),
    "factor": lambda value: _number(value) and 1 <= value <= 1000, "plan_us": _signed, "launch_us": _signed,
    "commit_us": _signed, "wall_ms": _number, "device_ms": lambda value: value is None or _number(value),
    "work": _one_of("decode", "prefill", "mixed"), "ranks": _positive, "ms": _signed, "load": _load,
    "queue_ms": _signed, "prefill_ms": _signed, "emit_us": _signed, "gate_us": _signed,
    "contents": _positives,
    "wait_us": _signed, "gc_us": _signed, "delayed_us": lambda value: value is None or _signed(value), "stops": _count,
}  # fmt: skip
SPECIAL: dict[tuple[str, str], Check] = {  # (kind of record, field) -> check, where FIELD does not apply
    ("preempt", "blocks"): _count, ("split", "blocks"): _positive, ("evict", "blocks"): _positive,
    ("draft", "drafts"): _rows(_count, _count), ("copy", "blocks"): _positives,
    ("time", "launch_us"): lambda value: value is None or _signed(value),
}  # fmt: skip
RECORDS: dict[str, tuple[Check, ...]] = {
    kind: tuple(SPECIAL.get((kind, name), FIELD[name]) for name in names) for kind, names in FIELDS.items()
}
SNAPSHOT: dict[str, Check] = {
    "seq": _sequence, "t": _number, "step": _step, "num_blocks": _positive, "block_size": _positive,
    "budget": _positive, "max_num_seqs": _positive, "gate": FIELD["state"], "pace": FIELD["factor"], "queue": _counts,
}  # fmt: skip
REQUEST: dict[str, Check] = {
    "group": _text, "prompt_tokens": _count, "max_total": _count, "state": _one_of(*_STATES), "row": _step,
    "table": _positives, "node": _count, "shared_blocks": _count, "computed": _count, "decoding": _bool,
    "cached_tokens": _count, "match": _row(_text, _step, _text), "preemptions": _count, "submitted": _number,
    "admitted": _number,
}  # fmt: skip
NODE: dict[str, Check] = {
    "parent": _count, "ids": _counts, "blocks": _positives, "users": _count, "last_used": _sequence,
}  # fmt: skip
WASTE = dict.fromkeys(("evicted", "preempted", "duplicate"), _sequence)
INFO: dict[str, Check] = {
    "model": _text, "device": _text, "dtype": _text, "num_blocks": _count, "block_size": _count,
}  # fmt: skip
UNKNOWN = {"model": "a model", "device": "a device", "dtype": "unknown precision"}


def _need(condition: object, fault: str) -> None:
    if not condition:
        raise ValueError(fault)


def _fields(what: str, value: Any, checks: dict[str, Check]) -> None:
    _need(type(value) is dict, f"{what} is not an object")
    for name, check in checks.items():
        _need(name in value, f"{what} has no {name!r}")
        _need(check(value[name]), f"{name!r} of {what} is {_short(value[name])}")


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > MOST:
        return "a number out of range"
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "…"


def header(value: Any) -> dict[str, Any]:
    """Checks the header, and returns it with its optional fields filled in."""
    _fields("the header", value, {"recorded": _text, "random_text": _bool})
    _need(type(value.get("info")) is dict, "the header has no 'info'")
    value["info"] = UNKNOWN | value["info"]
    _fields("the header's info", value["info"], {name: INFO[name] for name in INFO if name in value["info"]})
    return value


def short_line(line: Any) -> list[Any]:
    """Checks and returns a short line: words, names, a bookmark, or the end."""
    _need(type(line) is list and len(line) > 1, "not a list of a letter and values")
    kind, *rest = line
    if kind == "w":
        words = _rows(_count, lambda text: type(text) is str and all(map("\u0100".__gt__, text)))
        _need(len(rest) == 1 and words(rest[0]), "its words are not pairs of a token id and bytes")
    elif kind == "n":
        named = type(rest[0]) is dict and all(map(_text, rest[0].values()))
        _need(len(rest) == 1 and named, "its names are not texts")
    elif kind == "b":
        _need(_row(_step, _text)(rest), "its bookmark is not a step and a text")
    return line


def record(seq: int, row: Any) -> Record:
    """Checks a row `[t, kind, *fields]` and returns it as a record. Its chunks, nodes and drafts become tuples."""
    if type(row) is not list or len(row) < 2 or type(row[1]) is not str:
        raise ValueError(f"record {seq:,} is not a list of a time and a kind")
    t, kind, *fields = row
    if not _number(t):
        raise ValueError(f"the time of record {seq:,} is {_short(t)}")
    checks = RECORDS.get(kind)
    if checks is None:
        raise ValueError(f"record {seq:,} has a kind that this version does not know: {_short(kind)}")
    if kind == "first" and len(fields) == 4:
        fields.pop()  # older versions wrote the time for sampling, which was always 0
    if len(fields) != len(checks):
        raise ValueError(f"record {seq:,} ({kind}) has {len(fields)} fields, not {len(checks)}")
    for i, check in enumerate(checks):
        if not check(fields[i]):
            raise ValueError(f"{FIELDS[kind][i]!r} of record {seq:,} ({kind}) is {_short(fields[i])}")
    if kind == "step":
        fields[1] = [tuple(chunk) for chunk in fields[1]]
    elif kind in ("withdraw", "draft", "accept"):
        fields[1] = [tuple(part) for part in fields[1]]
    return (seq, t, kind, *fields)


def snapshot(value: Any) -> dict[str, Any]:
    """Checks the types of a snapshot, and that requests, tree and pool agree; returns it with numbers as keys."""
    _fields("the snapshot", value, SNAPSHOT)
    blocks = value["num_blocks"]
    _need(1 < blocks <= MOST_BLOCKS, f"its pool has {blocks - 1:,} blocks; a trace may have 1 to {MOST_BLOCKS - 1:,}")
    for name in ("requests", "nodes", "pending", *(["copies"] if "copies" in value else [])):
        table = value.get(name)
        _need(type(table) is dict, f"the snapshot has no {name!r}")
        _need(all(re.fullmatch(r"\d{1,10}", key) for key in table), f"a key of {name!r} is not a number")
        value[name] = {int(key): item for key, item in table.items()}
        _need(
            len(value[name]) == len(table) and max(value[name], default=0) <= MOST,
            f"a key of {name!r} is repeated or too large",
        )
    _tree(value)
    _requests(value)
    if "free" in value:  # older versions did not write the order of the free blocks
        _free(value)
    if "waste" in value:
        _fields("the waste", value["waste"], WASTE)
        _need(len(value["waste"]) == len(WASTE), "the waste has unknown fields")
    return value


def _free(value: dict[str, Any]) -> None:
    runs = value["free"]
    is_list = type(runs) is list and all(_positives(run) and len(run) == 2 if type(run) is list else _positives([run])
                                         for run in runs)  # fmt: skip
    _need(is_list, "'free' of the snapshot is not a list of blocks and of pairs of blocks")
    tables = (item["blocks"] for item in value["nodes"].values()), (r["table"] for r in value["requests"].values())
    free = set(range(1, value["num_blocks"])).difference(*tables[0], *tables[1], *value.get("copies", {}).values())
    is_same = number_of(runs) == len(free) and free == set(blocks_of(runs))  # a wrong number is not unpacked
    _need(is_same, "its free blocks differ from the pool's")


def _tree(value: dict[str, Any]) -> None:
    nodes, seen = value["nodes"], bytearray(value["num_blocks"])
    for id, node in nodes.items():
        _fields(f"node {id}", node, NODE)
        _need(id > 0, "the root is listed as a node")
        _need(node["parent"] == 0 or node["parent"] in nodes, f"the parent of node {id} is missing")
        _need(node["blocks"], f"node {id} has no block")
        tokens = len(node["blocks"]) * value["block_size"]
        _need(len(node["ids"]) == tokens, f"the ids of node {id} do not fill its blocks")
        _mark_used(node["blocks"], seen, f"node {id}")
    children: dict[int, list[int]] = {}
    for id, node in nodes.items():
        children.setdefault(node["parent"], []).append(id)
    reached = children.get(0, [])
    for id in reached:  # the loop appends to this list
        reached.extend(children.get(id, ()))
    _need(len(reached) == len(nodes), "a node is its own ancestor")
    owned = {block for node in nodes.values() for block in node["blocks"]}
    for block, copies in value.get("copies", {}).items():
        _need(block in owned and copies and _positives(copies), f"block {block} has copies but is not in the tree")
        _mark_used(copies, seen, f"the copies of block {block}")
    for block, step in value["pending"].items():
        _need(0 < block < len(seen) and seen[block] and _step(step), f"block {block} is pending but not in the tree")


def _mark_used(blocks: list[int], seen: bytearray, where: str) -> None:
    for block in blocks:
        _need(block < len(seen), f"block {block:,} of {where} is not in the pool")
        _need(not seen[block], f"block {block:,} of {where} is also used elsewhere")
        seen[block] = 1


def _requests(value: dict[str, Any]) -> None:
    nodes, seen, entries = value["nodes"], bytearray(value["num_blocks"]), 0
    users: dict[int, int] = {}
    for node in nodes.values():
        for block in node["blocks"]:
            seen[block] = 1
    original = {copy: block for block, copies in value.get("copies", {}).items() for copy in copies}
    for copy in original:
        seen[copy] = 1
    for id, request in value["requests"].items():
        _fields(f"request r{id}", request, REQUEST)
        lost, contents = request.get("lost", 0), request.get("contents", [])  # older versions did not write them
        _need(_count(lost) and _positives(contents), f"'lost' or 'contents' of r{id} is not valid")
        _need(len(contents) <= len(request["table"]), f"r{id} has more full blocks than blocks")
        _need(request["node"] == 0 or request["node"] in nodes, f"the node of r{id} is missing")
        table, shared = request["table"], request["shared_blocks"]
        entries += len(table)
        _need(entries <= MOST_HELD, f"the block tables of the requests have more than {MOST_HELD:,} entries")
        node, end = request["node"], shared
        while node and end > 0:
            blocks = nodes[node]["blocks"]
            held = [original.get(block, block) for block in table[max(0, end - len(blocks)) : end]]
            _need(held == blocks, f"the table of r{id} differs from the path to its node")
            users[node] = users.get(node, 0) + 1
            node, end = nodes[node]["parent"], end - len(blocks)
        _need(not node and not end, f"r{id} does not hold the whole path to its node")
        _need(request["state"] == "running" or not table, f"r{id} is waiting but holds blocks")
        _mark_used(table[shared:], seen, f"r{id}")
    for id, node in nodes.items():
        _need(node["users"] == users.get(id, 0), f"node {id} has {users.get(id, 0)} users, not {node['users']}")
    waiting = sorted(id for id, request in value["requests"].items() if request["state"] != "running")
    _need(sorted(value["queue"]) == waiting, "the queue differs from the waiting requests")
