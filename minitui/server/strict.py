"""The base classes of request bodies: types are strict ("5" is not a number), and unknown fields are refused, as
OpenAI's and Anthropic's own servers do. A field that is ignored in silence gives an answer to another question, for
example with a misspelled temperature."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ModelWrapValidatorHandler, model_validator

from minitui.server.errors import ApiError
from minitui.server.notices import as_ascii, notice

MAX_NAMED = 10  # fields that one sentence names
LONGEST = 64  # characters of a field's name that are shown

ignoring: ContextVar[bool] = ContextVar("ignoring", default=False)  # True: they only cause a notice


def check_unknown_fields(body: BaseModel, raw: Any) -> None:
    """Raises ApiError if `raw`, from which `body` was made, has unknown fields. Fields that are null say nothing."""
    names: list[str] = []
    for part, name, path in islice(_unknown(body, raw), 10 * MAX_NAMED):
        if reason := _refused(part).get(name):
            raise ApiError(400, f"{path} is not supported: {reason}", path, "unsupported_field")
        shown = as_ascii(path).strip()[:LONGEST] or '""'
        near = difflib.get_close_matches(name[:LONGEST], _known(type(part)), 1)
        names.append(f"{shown} (did you mean {near[0]}?)" if near else shown)
    names = list(dict.fromkeys(names))
    if not names:
        return
    plural, more = "s" if names[1:] else "", ", ..." if len(names) > MAX_NAMED else ""
    listed = f"unknown field{plural} {', '.join(names[:MAX_NAMED])}{more}"
    if not ignoring.get():
        way = "leave them out" if plural else "leave it out"
        sentence = f"{listed}: {way}, or start the server with --ignore-unknown-fields"
        raise ApiError(400, sentence, names[0].partition(" (")[0], "unknown_field")
    notice(f"ignored {listed}")


def _unknown(value: Any, raw: Any, path: str = "") -> Iterator[tuple[BaseModel, str, str]]:
    """Yields (the part of the body, the field's name, its path)."""
    if not getattr(value, "refuses_unknown", True):
        return  # nor are its parts looked at: they may be a million
    if isinstance(value, BaseModel) and isinstance(raw, dict):
        known = _known(type(value))
        for key, item in raw.items():
            if key in known:
                yield from _unknown(getattr(value, known[key]), item, f"{path}{key}.")
            elif item is None or key in getattr(value, "ignored", ()):
                continue
            elif key not in _refused(value) or _asks_something(item):
                yield value, key, f"{path}{key}"
    elif isinstance(value, list) and isinstance(raw, list) and value and isinstance(value[0], BaseModel):
        for item, raw_item in zip(value, raw, strict=False):
            yield from _unknown(item, raw_item, path)


@cache
def _known(kind: type[BaseModel]) -> dict[str, str]:
    return {field.alias or name: name for name, field in kind.model_fields.items()}


def _refused(part: BaseModel) -> Mapping[str, str]:
    return getattr(part, "refused", {})


def _asks_something(value: Any) -> bool:
    """Returns False for false, empty values and 1: clients send defaults such as `best_of` 1."""
    return bool(value) and (value is True or value != 1)


MAX_FIELDS = 100  # in one object; the largest valid request has about 75


def at_most(count: int) -> BeforeValidator:
    """Returns a validator that refuses an object with more entries than `count` before it checks their values."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"it has {len(value):,} entries; the limit is {count:,}")
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """A part of a request body."""

    refuses_unknown: ClassVar[bool] = True
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields that clients send, without effect here
    refused: ClassVar[Mapping[str, str]] = {}  # fields that would change the reply, but are not supported -> the reason
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"the object has {len(value):,} fields; the limit is {MAX_FIELDS:,}")
        return value


class Open(Strict):
    """A part of a request whose unknown fields are ignored. These are parts that clients send back as they got them
    from this or another server, with its additions."""

    refuses_unknown: ClassVar[bool] = False


class Body(Strict):
    """A whole request body. Unknown fields, in the body and in its parts, are refused."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(value)
        check_unknown_fields(body, value)
        return body
