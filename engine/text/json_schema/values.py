"""Types and values of JSON, and schemas that only a few values follow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from engine.text.json_schema.references import Schema, Unsupported

TYPES = ("null", "boolean", "number", "string", "array", "object")
CONTAINERS: dict[type, str] = {list: "array", dict: "object"}
MAX_VALUES = 64


def type_of(value: Any) -> str:
    """Returns the type of a JSON value; integers are numbers here."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else CONTAINERS.get(type(value), "number")


def key_of(value: Any) -> str:
    """Returns a text that is equal for equal values: 1 equals 1.0, but not true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(key_of, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(json.dumps(name) + key_of(part) for name, part in value.items()))}}}"
    return json.dumps(value)


def types_of(schema: dict[str, Any]) -> set[str]:
    """Returns the types that a schema names, with "integer" apart from "number"; all types if it names none."""
    if "const" in schema:
        return {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {type_of(value) for value in schema["enum"]}
    names = schema.get("type", list(TYPES))
    names = {names} if isinstance(names, str) else set(names) if isinstance(names, list) else set()
    if not names or not names <= {*TYPES, "integer"}:
        raise Unsupported(f"{schema.get('type')!r} is not a type")
    return names


def common_types(schemas: Iterable[dict[str, Any]]) -> set[str]:
    """Returns the types, with integers as numbers, that all of these schemas allow."""
    found = set(TYPES)
    for schema in schemas:
        names = types_of(schema)
        found &= names | {"number"} if "integer" in names else names
    return found


def few_values(schema: Schema, targets: dict[str, Schema]) -> list[Any] | None:
    """Returns all values that follow a schema, or None if they are too many or not easy to list."""
    if isinstance(schema, bool):
        return None if schema else []
    keywords = set(schema)
    if keywords == {"$ref"} and not isinstance(target := targets[schema["$ref"]], bool) and "$ref" not in target:
        return few_values(target, targets)
    if (keywords <= {"type", "enum"} and "enum" in keywords) or (keywords <= {"type", "const"} and "const" in keywords):
        allowed = types_of({key: value for key, value in schema.items() if key == "type"})
        if "integer" in allowed:
            return None
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        found = {key_of(value): value for value in values if type_of(value) in allowed}
    elif schema in ({"type": "boolean"}, {"type": "null"}):
        found = {"true": True, "false": False} if schema["type"] == "boolean" else {"null": None}
    elif keywords == {"type", "minimum", "maximum"} and schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if not isinstance(low, int) or not isinstance(high, int) or high - low >= MAX_VALUES:
            return None
        found = {str(value): value for value in range(low, high + 1)}
    elif keywords == {"anyOf"}:
        parts = [few_values(option, targets) for option in schema["anyOf"]]
        if None in parts:
            return None
        found = {key_of(value): value for part in parts for value in part or ()}
    else:
        return None
    return list(found.values()) if len(found) <= MAX_VALUES else None
