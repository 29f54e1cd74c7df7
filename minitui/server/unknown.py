"""Finds the fields of a request that the server does not know. They are ignored; the caller gets a notice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import BaseModel

from minitui.server.notices import as_ascii, notice

MAX_NAMED = 10  # fields that one notice names
LONGEST = 64  # characters of a field's name that are shown


def tell_of_unknown_fields(body: BaseModel, raw: Any) -> None:
    """Add a notice that names the unknown fields: those in `raw`, from which `body` was made, but not in `body`."""
    found = islice(_unknown(body, raw), 10 * MAX_NAMED)
    names = list(dict.fromkeys(as_ascii(name).strip()[:LONGEST] or '""' for name in found))
    if names:
        more = ", ..." if len(names) > MAX_NAMED else ""
        notice(f"ignored unknown field{'s' if names[1:] else ''} {', '.join(names[:MAX_NAMED])}{more}")


def _unknown(value: Any, raw: Any, path: str = "") -> Iterator[str]:
    if not getattr(value, "reports_unknown", True):
        return
    if isinstance(value, BaseModel) and isinstance(raw, dict):
        known = {field.alias or name: name for name, field in type(value).model_fields.items()}
        for key, item in raw.items():
            if key in known:
                yield from _unknown(getattr(value, known[key]), item, f"{path}{key}.")
            else:
                yield f"{path}{key}"
    elif isinstance(value, list) and isinstance(raw, list) and value and isinstance(value[0], BaseModel):
        for item, raw_item in zip(value, raw, strict=False):
            yield from _unknown(item, raw_item, path)
