"""Checks the lines of a trace: types and ranges, that a keyframe's requests, tree and pool agree, and that each record
is possible in the state before it. Each fault raises a ValueError with a short reason. State.apply, views and exports
trust a trace that passes these checks. What is possible is part of each kind of record (engine/trace/kinds.py)."""

from __future__ import annotations

import re
from typing import Any

from engine.info import EngineInfo
from engine.trace import kind
from engine.trace.eviction import RECORDED_POLICIES
from engine.trace.kind import FAULTS, KINDS, MOST, Bound, Record, later, named, one_of, row, rows
from engine.trace.runs import blocks_of, number_of
from engine.trace.side_pool import GROUP, SideGroup, SidePool
from engine.trace.state import State
from engine.trace.views import BLOCKS, NODE, REQUEST, WASTE
from minitui.trace.lines import MOST_VALUES

MOST_BLOCKS = 1 << 21  # blocks in a pool; a view keeps several copies of a pool, at 32 bytes per block
MOST_GROUPS = 16  # vLLM's largest models have ten
MOST_HELD = MOST_VALUES  # entries in the block tables of all requests together

SNAPSHOT: dict[str, Bound] = {
    "seq": kind.sequence, "t": kind.duration, "step": kind.position, "num_blocks": kind.positive,
    "block_size": kind.positive, "budget": kind.positive, "max_num_seqs": kind.positive,
    "eviction_policy": later(one_of(*RECORDED_POLICIES)), "gate": kind.gate_state, "pace": kind.factor,
    "queue": kind.counts,
}
WORDS = rows(kind.count, Bound(lambda word: type(word) is str and all(map("\u0100".__gt__, word))))

UNKNOWN = {"model": "a model", "device": "a device", "dtype": "unknown precision"}


def _need(condition: object, fault: str) -> None:
    if not condition:
        raise ValueError(fault)


def _fields(what: str, value: Any, bounds: dict[str, Bound]) -> None:
    _need(type(value) is dict, f"{what} is not an object")
    for name, bound in bounds.items():  # of each request and node: no text is made for what is right
        if name not in value:
            _need(bound.later, f"{what} has no {name!r}")
        elif not bound.fits(value[name]):
            raise ValueError(f"{name!r} of {what} is {_short(value[name])}")


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > MOST:
        return "a number out of range"
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "…"


def header(value: Any) -> dict[str, Any]:
    """Checks the header, and returns it with its optional fields filled in."""
    _fields("the header", value, {"recorded": kind.text, "random_text": kind.boolean})
    _need(type(value.get("info")) is dict, "the header has no 'info'")
    try:
        value["info"] = EngineInfo.from_json(UNKNOWN | value["info"])
    except ValueError as error:
        raise ValueError(f"the header's info {error}") from error
    return value


def short_line(line: Any) -> list[Any]:
    """Checks and returns a short line: words, names, a bookmark, or the end."""
    _need(type(line) is list and len(line) > 1, "not a list of a letter and values")
    letter, *rest = line
    if letter == "w":
        _need(len(rest) == 1 and WORDS.fits(rest[0]), "its words are not pairs of a token id and bytes")
    elif letter == "n":
        named = type(rest[0]) is dict and all(map(kind.text.fits, rest[0].values()))
        _need(len(rest) == 1 and named, "its names are not texts")
    elif letter == "b":
        _need(row(kind.position, kind.text).fits(rest), "its bookmark is not a step and a text")
    return line


def record(seq: int, line: Any) -> Record:
    """Checks a list `[t, kind, *fields]` and returns it as a record. Its chunks, nodes and drafts become tuples."""
    if type(line) is not list or len(line) < 2 or type(line[1]) is not str:
        raise ValueError(f"record {seq:,} is not a list of a time and a kind")
    t, name, *fields = line
    if not kind.duration.fits(t):
        raise ValueError(f"the time of record {seq:,} is {_short(t)}")
    cls = KINDS.get(name)
    if cls is None:
        raise ValueError(f"record {seq:,} has a kind that this version does not know: {_short(name)}")
    if name == "first" and len(fields) == 4:
        fields.pop()  # older versions wrote the time for sampling, which was always 0
    if len(fields) != len(cls.fields):
        missing = cls.defaults(len(cls.fields) - len(fields))
        if missing is None:
            raise ValueError(f"record {seq:,} ({name}) has {len(fields)} fields, not {len(cls.fields)}")
        fields += missing
    for i, (fits, _, convert, _) in enumerate(cls.bounds.values()):
        value = fields[i]
        if not fits(value):
            raise ValueError(f"{cls.fields[i]!r} of record {seq:,} ({name}) is {_short(value)}")
        if convert is not None:
            fields[i] = convert(value)
    return (seq, t, name, *fields)


def snapshot(value: Any) -> dict[str, Any]:
    """Checks the types of a snapshot, and that requests, tree and pool agree; returns it with numbers as keys."""
    _fields("the snapshot", value, SNAPSHOT)
    size = value["num_blocks"]
    _need(1 < size <= MOST_BLOCKS, f"its pool has {size - 1:,} blocks; a trace may have 1 to {MOST_BLOCKS - 1:,}")
    older = {name for name, bound in BLOCKS.items() if bound.later and name not in value}
    for name in ("requests", "nodes", *(name for name in BLOCKS if name not in older)):
        table = value.get(name)
        _need(type(table) is dict, f"the snapshot has no {name!r}")
        _need(all(re.fullmatch(r"\d{1,10}", key) for key in table), f"a key of {name!r} is not a number")
        value[name] = {int(key): item for key, item in table.items()}
        _need(
            len(value[name]) == len(table) and max(value[name], default=0) <= MOST,
            f"a key of {name!r} is repeated or too large",
        )
    for name in BLOCKS.keys() - older:
        for block, item in value[name].items():
            _need(0 < block < size and BLOCKS[name].fits(item), f"{name!r} of block {block:,} is not valid")
    _tree(value)
    _requests(value)
    _groups(value)
    if "free" in value:  # older versions did not write the order of the free blocks
        _free(value)
    if "waste" in value:
        _fields("the waste", value["waste"], WASTE)
        _need(value["waste"].keys() <= WASTE.keys(), "the waste has unknown fields")
    return value


def _groups(value: dict[str, Any]) -> None:
    """Checks the side groups: each page is free, idle or held, and what is kept is kept for blocks of the tree."""
    groups = value.get("groups", [])
    _need(type(groups) is list and len(groups) <= MOST_GROUPS, f"it has more than {MOST_GROUPS} side groups")
    requests = value["requests"].items()
    sides = {id: request.get("side", []) for id, request in requests}
    for id, side in sides.items():
        _need(len(side) == len(groups), f"r{id} has pages of {len(side)} side groups, not of {len(groups)}")
    in_tree = {block for node in value["nodes"].values() for block in node["blocks"]}
    used = in_tree.union(*(request["table"] for _, request in requests), *value.get("copies", {}).values())
    for i, group in enumerate(groups):
        what = f"side group {i}"
        bounds = {"idle": kind.blocks, "kept": rows(kind.positive, kind.positive), "free": Bound(_is_runs)}
        _fields(what, group, GROUP | bounds)
        size = group["num_blocks"]
        _need(1 < size <= MOST_BLOCKS, f"{what} has {size - 1:,} pages; a trace may have 1 to {MOST_BLOCKS - 1:,}")
        _need(number_of(group["free"]) < size, f"{what} has more free pages than pages")
        held = [page for side in sides.values() for _, page in side[i]]
        kept, of = {page for _, page in group["kept"]}, {block for block, _ in group["kept"]}
        _need(len(of) == len(kept) == len(group["kept"]), f"{what} keeps a page twice")
        _need(of <= in_tree, f"{what} keeps a page for a block outside the tree")
        _need(max([*held, *kept], default=0) < size, f"a page of {what} is not in its pool")
        if group["shared"]:
            _need(size == value["num_blocks"] and not group["free"], f"{what} has another pool than the blocks")
            _need(not used & {*held, *kept}, f"{what} has blocks that another group has")
            _need({*group["idle"]} == kept - {*held}, f"the idle pages of {what} are not those without a holder")
            used |= {*held, *kept}
            continue
        pool = SidePool(SideGroup(**{name: group[name] for name in GROUP}))
        pool.fill(group, held)
        _need(not (fault := next(pool.check(held), "")), fault)


def _is_runs(value: Any) -> bool:
    """Returns True for a list of blocks and of pairs of blocks."""
    return type(value) is list and all(
        kind.blocks.fits(run) and len(run) == 2 if type(run) is list else kind.blocks.fits([run]) for run in value
    )


def _free(value: dict[str, Any]) -> None:
    runs = value["free"]
    _need(_is_runs(runs), "'free' of the snapshot is not a list of blocks and of pairs of blocks")
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
        _need(block in owned and copies, f"block {block} has copies but is not in the tree")
        _mark_used(copies, seen, f"the copies of block {block}")
    for block in value["pending"]:
        _need(seen[block], f"block {block} is pending but not in the tree")


def _mark_used(blocks: list[int], seen: bytearray, where: str) -> None:
    for block in blocks:
        if block >= len(seen) or seen[block]:
            fault = "also used elsewhere" if block < len(seen) else "not in the pool"
            raise ValueError(f"block {block:,} of {where} is {fault}")
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
        _fields(f"request r{id}", request, REQUEST | {"computed": kind.count, "decoding": kind.boolean})
        _need(len(request.get("contents", ())) <= len(request["table"]), f"r{id} has more full blocks than blocks")
        _need(request["node"] == 0 or request["node"] in nodes, f"the node of r{id} is missing")
        table, shared = request["table"], request["shared_blocks"]
        entries += len(table)
        _need(entries <= MOST_HELD, f"the block tables of the requests have more than {MOST_HELD:,} entries")
        node, end = request["node"], shared
        while node and end > 0:
            own = nodes[node]["blocks"]
            held = [original.get(block, block) for block in table[max(0, end - len(own)) : end]]
            _need(held == own, f"the table of r{id} differs from the path to its node")
            users[node] = users.get(node, 0) + 1
            node, end = nodes[node]["parent"], end - len(own)
        _need(not node and not end, f"r{id} does not hold the whole path to its node")
        _need(request["state"] == "running" or not table, f"r{id} is waiting but holds blocks")
        _mark_used(table[shared:], seen, f"r{id}")
    for id, node in nodes.items():
        _need(node["users"] == users.get(id, 0), f"node {id} has {users.get(id, 0)} users, not {node['users']}")
    waiting = sorted(id for id, request in value["requests"].items() if request["state"] != "running")
    _need(sorted(value["queue"]) == waiting, "the queue differs from the waiting requests")


STATEFUL = {
    kind: [(3 + i, bound.fault) for i, bound in enumerate(cls.bounds.values()) if bound.fault is not None]
    for kind, cls in KINDS.items()
}  # kind -> (place, fault) of each field whose values depend on the state
REQUESTS = {kind: 3 + cls.fields.index("request") for kind, cls in KINDS.items() if "request" in cls.fields}


class Follower:
    """Checks each record, then folds it into the state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._youngest = max(state.requests, default=-1)  # the highest request id so far
        self._held = sum(len(request.table) for request in state.requests.values())  # blocks in all block tables

    def take(self, record: Record) -> None:
        """Fold a record that `check.record` returned. Raises ValueError with the reason if the record is impossible."""
        state, kind = self.state, record[2]
        reason = self._fault(record)
        if reason:
            raise ValueError(f"record {record[0]:,} ({kind}) is impossible: {reason}")
        place = REQUESTS.get(kind)
        request = state.requests.get(record[place]) if place is not None else None
        before = len(request.table) if request is not None else 0
        state.apply(record)
        if request is not None:
            self._held += len(request.table) - before
            if self._held > MOST_HELD:
                raise ValueError(f"the block tables of the requests have more than {MOST_HELD:,} entries")

    def _fault(self, record: Record) -> str:
        state, kind = self.state, record[2]
        for place, fault in STATEFUL[kind]:
            if reason := fault(state, record[place]):
                return reason
        if kind == "submit":
            id = named(record).request
            if id <= self._youngest:
                return f"r{id} is not newer than r{self._youngest}"
            self._youngest = id
        faults = FAULTS.get(kind)
        return "" if faults is None else next(faults(state, record), "")
