"""What a kind of record is: its fields with their bounds, its effect on a state, and the states in which it can occur.

A record is a plain tuple `(seq, t, kind, *fields)`. Each kind is a subclass of Kind (engine/trace/kinds.py); all other
code reads fields by name: a method of a Reader gets the fields that it names, and `named(record)` has attributes.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_type_hints

Record = tuple[Any, ...]
HEAD = ("seq", "t", "kind")
seq_of, time_of, kind_of = itemgetter(0), itemgetter(1), itemgetter(2)

MOST = (1 << 31) - 1  # largest count or id
MOST_NUMBER = 1e12  # largest duration, in the unit of its field
MOST_RECORDS = 1 << 53  # largest record number; every JSON reader reads integers up to here exactly


class Bound(NamedTuple):
    """The values of a field. `fits(value)` is True for a valid value. `fault(state, value)` returns why a valid value
    is impossible in a state; empty: it is possible. `convert`: makes the field's value from its JSON. `later`: older
    recordings lack this field of a snapshot."""

    fits: Callable[[Any], bool]
    fault: Callable[[Any, Any], str] | None = None
    convert: Callable[[Any], Any] | None = None
    later: bool = False


def bounds_of(cls: type) -> dict[str, Bound]:
    """Returns the bounds of a class's annotated fields, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: bound for name, hint in hints.items() for bound in get_args(hint)[1:] if isinstance(bound, Bound)}


class Kind:
    """A kind of record: a subclass annotates its fields, in the order in which records have them. A value in the class
    body is a default: recordings of older versions, which lack the field, have this value."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    bounds: ClassVar[dict[str, Bound]]

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__.lower()
        cls.bounds = bounds_of(cls)
        cls.fields = tuple(cls.bounds)
        KINDS[cls.name] = cls
        FIELDS[cls.name] = cls.fields
        if "apply" in vars(cls):
            CHANGES[cls.name] = by_name(cls.apply, cls)
        if "faults" in vars(cls):
            FAULTS[cls.name] = by_name(cls.faults, cls)

    # A subclass may define, as functions of a state and of the fields that they name:
    apply: ClassVar[Callable[..., Any]]  # changes the state
    faults: ClassVar[Callable[..., Iterator[str]]]  # yields why the record is impossible, beyond the fields' own faults

    @classmethod
    def defaults(cls, missing: int) -> list[Any] | None:
        """Returns the values of the last `missing` fields, for a record of an older version; None if it has none."""
        names = cls.fields[len(cls.fields) - missing :] if missing > 0 else ()
        given = [vars(cls)[name] for name in names if name in vars(cls)]
        return given if missing == len(given) else None


KINDS: dict[str, type[Kind]] = {}
FIELDS: dict[str, tuple[str, ...]] = {}  # kind -> the names of its fields
CHANGES: dict[str, Callable[[Any, Record], Any]] = {}  # kind -> its change, called with the state and the record
FAULTS: dict[str, Callable[[Any, Record], Iterator[str]]] = {}


def by_name(function: Callable[..., Any], kind: type[Kind]) -> Callable[[Any, Record], Any]:
    """Returns a function of (owner, record) that calls `function` with the owner and the fields that it names."""
    code = function.__code__
    names, all_names = code.co_varnames[1 : code.co_argcount], HEAD + kind.fields
    unknown = set(names) - set(all_names)
    if unknown:
        raise TypeError(f"{function.__qualname__} reads {sorted(unknown)}: {kind.name!r} has {', '.join(all_names)}")
    # Written out: as a call with unpacked fields, each of a million records would take a third longer.
    fields = "".join(f", record[{all_names.index(name)}]" for name in names)
    return eval(f"lambda owner, record: function(owner{fields})", {"function": function})


class Reader:
    """A class that reads records. Its methods `on_KIND(self, …)` get the fields that they name, HEAD included."""

    READS: ClassVar[dict[str, Callable[[Any, Record], Any]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {
            name.removeprefix("on_"): by_name(method, KINDS[name.removeprefix("on_")])
            for name, method in vars(cls).items() if name.startswith("on_")
        }
        cls.READS = cls.READS | own

    def read(self, record: Record) -> Any:
        """Call the method for this kind of record, if there is one, and return its result."""
        method = self.READS.get(kind_of(record))
        return None if method is None else method(self, record)


def named(record: Record) -> Any:
    """Returns the record with its fields as attributes."""
    return _tuple(kind_of(record))(*record)


@cache
def _tuple(kind: str) -> Any:
    defaults = [vars(KINDS[kind])[name] for name in FIELDS[kind] if name in vars(KINDS[kind])]
    return namedtuple(kind, HEAD + FIELDS[kind], defaults=defaults)


def as_dict(record: Record) -> dict[str, Any]:
    """Returns the record with named fields."""
    return named(record)._asdict()


# ---- the values of fields


def _float(least: float, most: float = MOST_NUMBER) -> Bound:
    return Bound(lambda value: type(value) in (int, float) and least <= value <= most)


def _int(least: int, most: int = MOST, fault: Callable[[Any, Any], str] | None = None) -> Bound:
    return Bound(lambda value: type(value) is int and least <= value <= most, fault)


def one_of(*values: str) -> Bound:
    return Bound(lambda value: type(value) is str and value in values)


def optional(bound: Bound) -> Bound:
    return bound._replace(fits=lambda value: value is None or bound.fits(value))


def later(bound: Bound) -> Bound:
    return bound._replace(later=True)


def row(*bounds: Bound) -> Bound:
    """The bound of a list or tuple with one value for each bound."""
    return Bound(
        lambda value: type(value) in (list, tuple)
        and len(value) == len(bounds)
        and all(bound.fits(item) for bound, item in zip(bounds, value, strict=True))
    )


def rows(*bounds: Bound, fault: Callable[[Any, Any], str] | None = None) -> Bound:
    """The bound of a list of rows; each row becomes a tuple."""
    one = row(*bounds).fits
    return Bound(
        lambda value: type(value) is list and all(map(one, value)), fault, lambda value: [tuple(each) for each in value]
    )


def _counts(value: Any) -> bool:
    # The list may be long (a prompt), so no function is called for each item.
    if type(value) is not list or not value:
        return value == []
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MOST


def _load(value: Any) -> bool:
    """Returns True for [(layer, [tokens of each expert])] with the same number of experts in each layer."""
    return rows(count, counts).fits(value) and len({len(tokens) for _, tokens in value}) == 1 and bool(value[0][1])


def _detail(value: Any) -> bool:
    return type(value) is str and re.match(r"[\d,]{1,16} of \d[\d,]{0,16} tokens", value) is not None


def _pages(value: Any) -> bool:
    """Returns True for a list with the pages of each side group: [[index of a block or a state's place, page], …]."""
    return type(value) is list and all(map(_places.fits, value))


_places = rows(_int(-MOST), _int(1))
pages = Bound(_pages, convert=lambda value: [dict(each) for each in value])
count, positive, position, sequence = _int(0), _int(1), _int(-1), _int(0, MOST_RECORDS)
text, boolean = Bound(lambda value: type(value) is str), Bound(lambda value: type(value) is bool)
counts, blocks = Bound(_counts), Bound(lambda value: _counts(value) and 0 not in value)
duration, factor, gate_state = _float(0), _float(1, 1000), one_of("open", "closed")

Count = Annotated[int, count]
Positive = Annotated[int, positive]
OrNone = Annotated[int, position]  # a step, row or position; -1: none
Sequence = Annotated[int, sequence]
Whole = Annotated[int, _int(-MOST_RECORDS, MOST_RECORDS)]
Text = Annotated[str, text]
Counts = Annotated[list[int], counts]
Blocks = Annotated[list[int], blocks]
Duration = Annotated[float, duration]
Signed = Annotated[float, _float(-MOST_NUMBER)]  # a duration that two clocks may make slightly negative
MaybeDuration = Annotated[float | None, optional(duration)]
MaybeSigned = Annotated[float | None, optional(_float(-MOST_NUMBER))]
Factor = Annotated[float, factor]
GateState = Annotated[str, gate_state]
Flag = Annotated[bool, boolean]
Work = Annotated[str, one_of("decode", "prefill", "mixed")]
Load = Annotated[list[tuple[int, list[int]]], Bound(_load, None, lambda value: [tuple(each) for each in value])]
Detail = Annotated[str, Bound(_detail)]
RequestState = Annotated[str, one_of("waiting", "running", "preempted")]
Match = Annotated[tuple[str, int, str], row(text, position, text)._replace(convert=tuple)]

# ---- values that depend on the state


def known(state: Any, id: int) -> str:
    return "" if id in state.requests else f"there is no request r{id}"


def running(state: Any, id: int) -> str:
    return known(state, id) or ("" if state.requests[id].state == "running" else f"r{id} is not running")


def _node(state: Any, id: int) -> str:
    return "" if id in state.nodes else f"there is no node {id}"


def _planned(state: Any, step: int) -> str:
    return f"step {step:,} has not been planned" if step > state.step else ""


def _all_known(place: int | None) -> Callable[[Any, list[Any]], str]:
    def fault(state: Any, items: list[Any]) -> str:
        ids = items if place is None else [item[place] for item in items]
        return next((known(state, id) for id in ids if id not in state.requests), "")

    return fault


Request = Annotated[int, _int(0, fault=known)]
Running = Annotated[int, _int(0, fault=running)]
RunningOrNone = Annotated[int, _int(-1, fault=lambda state, id: running(state, id) if id >= 0 else "")]
Node = Annotated[int, _int(0, fault=_node)]
PlannedStep = Annotated[int, _int(-1, fault=_planned)]
Requests = Annotated[list[int], Bound(_counts, _all_known(None))]
Chunks = Annotated[
    list[tuple[int, int, int, bool]], rows(count, count, positive, boolean, fault=_all_known(0))
]  # (request, start, number of tokens, whether its last token is sampled)
Drafted = Annotated[list[tuple[int, int]], rows(count, count, fault=_all_known(0))]  # (request, draft tokens)
Accepted = Annotated[list[tuple[int, int, int]], rows(count, count, count, fault=_all_known(0))]
def _group(state: Any, group: int) -> str:
    return "" if group < len(state.groups) else f"there is no side group {group}"


SideGroup = Annotated[int, _int(0, fault=_group)]
Pages = Annotated[list[tuple[int, int]], _places]  # (index of a block or a state's place, page)
Places = Annotated[list[int], Bound(lambda value: type(value) is list and all(map(_int(-MOST).fits, value)))]
CutNodes = Annotated[list[tuple[int, int]], rows(count, count)]  # (node, blocks kept)
