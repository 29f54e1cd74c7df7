"""Negates a JSON schema: the result has no `not` and describes all values that do not follow the schema."""

from __future__ import annotations

import itertools
import json
from typing import Any

from engine.text.json_schema.formats import none_of
from engine.text.json_schema.references import Schema, Unsupported
from engine.text.json_schema.values import TYPES, type_of, types_of

# keyword -> (the type that it restricts, the keyword of the opposite limit, the step between the two limits)
LIMITS = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}
MAX_DEPTH = 50  # of references inside a negated schema


def negate(schema: Schema, targets: dict[str, Schema], depth: int = 0) -> Schema:
    """Returns the negation. Raises Unsupported if JSON schemas without `not` cannot express it."""
    if isinstance(schema, bool):
        return not schema
    if depth > MAX_DEPTH:
        raise Unsupported("the negation of a schema that refers to itself is not supported")
    options: list[Schema] = []
    for keyword, value in schema.items():
        options += _options(keyword, value, targets, depth)
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


def _options(keyword: str, value: Any, targets: dict[str, Schema], depth: int) -> list[Schema]:
    """Returns schemas: a value violates the keyword if it follows one of them."""
    if keyword in LIMITS and isinstance(value, (int, float)):
        kind, opposite, step = LIMITS[keyword]
        return [{"type": kind, opposite: value + step}] if step >= 0 or value > 0 else []
    if keyword == "type":
        names = types_of({"type": value})
        if "integer" not in names or "number" in names:
            return [{"type": others}] if (others := [name for name in TYPES if name not in names]) else []
    if keyword in ("const", "enum"):
        return _others([value] if keyword == "const" else value)
    if keyword == "required":
        return [{"type": "object", "properties": {name: False}} for name in value]
    if keyword == "properties":
        return [
            {"type": "object", "required": [name], "properties": {name: negate(part, targets, depth + 1)}}
            for name, part in value.items()
            if part is not True
        ]
    if keyword == "anyOf":
        return [{"allOf": [negate(part, targets, depth + 1) for part in value]}]
    if keyword == "allOf":
        return [negate(part, targets, depth + 1) for part in value]
    if keyword == "not":
        return [value]
    if keyword == "$ref":
        return [negate(targets[value], targets, depth + 1)]
    raise Unsupported(
        f"{keyword} cannot be negated, but not, if or oneOf requires that here: state what is allowed instead"
    )


def _others(values: list[Any]) -> list[Schema]:
    """Returns schemas for all values except these."""
    kinds = {type_of(value) for value in values}
    if kinds & {"array", "object"}:
        raise Unsupported(f"the values {json.dumps(values)[:80]} cannot be negated: only scalars are supported")
    found: list[Schema] = [{"type": name} for name in TYPES if name not in kinds]
    if "boolean" in kinds:
        found += [{"const": value} for value in (True, False) if not any(other is value for other in values)]
    if "string" in kinds:
        texts = {value for value in values if isinstance(value, str)}
        found.append({"type": "string", "pattern": f"^(?:{none_of(texts)})$"})
    if "number" in kinds:
        numbers = sorted({value for value in values if type_of(value) == "number"})
        bounds = [(None, numbers[0]), *itertools.pairwise(numbers), (numbers[-1], None)]
        for low, high in bounds:
            limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            found.append({"type": "number", **{key: value for key, value in limits.items() if value is not None}})
    return found
