"""Resolves the references of a JSON schema, so that its parts no longer depend on their places.

Keywords of older drafts are replaced by those of draft 2020-12, and annotations such as `title` are removed.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

Schema = dict[str, Any] | bool

# Keywords that contain one schema, a list of schemas, or an object of schemas.
ONE = {"additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
       "unevaluatedItems", "unevaluatedProperties"}
LIST = {"allOf", "anyOf", "oneOf", "prefixItems"}
MAP = {"properties", "patternProperties", "dependentSchemas"}
DEFINITIONS = {"$defs", "definitions"}
REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
# Keywords that restrict what is valid and contain no schemas. All keywords not listed here are annotations.
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties",
          "maxProperties"}
OTHERS = {"const": object, "enum": list, "type": (str, list), "pattern": str, "format": str, "uniqueItems": bool,
          "required": list, "dependentRequired": dict}
PLAIN = NUMBERS | COUNTS | set(OTHERS)
MAX_PARTS = 20_000  # of one schema; the limit keeps the time for hostile schemas below a second


class Unsupported(ValueError):
    """The schema cannot be enforced. `where`: the names of the properties that lead to the part at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.where: list[str] = []

    def __str__(self) -> str:
        return f"{'.'.join(self.where)}: {self.args[0]}" if self.where else str(self.args[0])


def resolve(document: Any) -> tuple[Schema, dict[str, Schema]]:
    """Returns (the schema, the schemas that it refers to). The value of each `$ref` is a key of the second."""
    resolver = _Resolver(document)
    return resolver.convert(document, ""), resolver.convert_targets()


class _Resolver:
    def __init__(self, document: Any) -> None:
        self._targets: dict[str, tuple[Any, str]] = {}  # key of a reference -> (the schema that it means, its base URI)
        self._places: dict[str, tuple[Any, str]] = {}  # URI of a resource or an anchor -> (its schema, its base URI)
        self._dynamic: list[str] = []  # the names of dynamic anchors
        self._parts = 0
        self._places[""] = (document, "")
        self._index(document, "")

    def convert(self, schema: Any, base: str) -> Schema:
        """Returns a copy of the schema. `base`: the URI that its references are relative to."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise Unsupported(f"the schema has more than {MAX_PARTS:,} parts: make it smaller")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Unsupported("a schema must be an object or a boolean")
        base = _base(schema, base)
        found: dict[str, Any] = {}
        for keyword, value in _modern(schema).items():
            if keyword in REFERENCES:
                found["$ref"] = self._target(keyword, value, base)
            elif keyword in ONE:
                found[keyword] = self.convert(value, base)
            elif keyword in LIST:
                found[keyword] = [self.convert(part, base) for part in _typed(keyword, value, list)]
            elif keyword in MAP:
                parts = _typed(keyword, value, dict)
                found[keyword] = {name: self.convert(part, base) for name, part in parts.items()}
            elif keyword in PLAIN:
                found[keyword] = _plain(keyword, value)
        return found

    def convert_targets(self) -> dict[str, Schema]:
        """Returns a copy of each schema that a reference means, also of references inside these schemas."""
        found: dict[str, Schema] = {}
        while len(found) < len(self._targets):
            for key, target in list(self._targets.items())[len(found) :]:
                found[key] = self.convert(*target)
        return found

    def _target(self, keyword: str, reference: Any, base: str) -> str:
        """Returns the key of the schema that a reference means."""
        if not isinstance(reference, str):
            raise Unsupported(f"{keyword} must be a string")
        uri = _join(base, reference)
        resource, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        if keyword != "$ref" and (keyword == "$recursiveRef" or self._dynamic.count(fragment) > 1):
            raise Unsupported(f"{keyword} {reference!r} depends on the path to it: use $ref")
        if uri in self._targets:
            return uri
        if fragment and not fragment.startswith("/"):
            resource, fragment = f"{resource}#{fragment}", ""
        if resource not in self._places:
            raise Unsupported(f"$ref {reference!r} is not a part of the schema: copy the schema that it means to $defs")
        schema, target_base = self._places[resource]
        for step in fragment.split("/")[1:]:
            target_base = _base(schema, target_base)
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(step)] if isinstance(schema, list) else schema[step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise Unsupported(f"$ref {reference!r} is not a part of the schema") from None
        self._targets[uri] = (schema, target_base)
        return uri

    def _index(self, schema: Any, base: str) -> None:
        """Note the URIs of all resources and anchors in this schema."""
        if not isinstance(schema, dict):
            return
        inner = _base(schema, base)
        if inner != base:
            self._add(inner, schema, inner)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._add(f"{inner}#{schema[keyword]}", schema, inner)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic.append(schema["$dynamicAnchor"])
        identifier = schema.get("$id")
        if isinstance(identifier, str) and identifier.startswith("#"):  # an anchor of draft 7
            self._add(base + identifier, schema, base)
        for keyword, value in schema.items():
            if isinstance(value, dict) and keyword in MAP | DEFINITIONS | {"dependencies"}:
                parts = list(value.values())
            elif keyword in ONE | LIST:
                parts = value if isinstance(value, list) else [value]
            else:
                continue
            for part in parts:
                self._index(part, inner)

    def _add(self, uri: str, schema: Any, base: str) -> None:
        if uri in self._places and self._places[uri][0] != schema:
            raise Unsupported(f"two different parts have the URI {uri!r}: change one of them")
        self._places[uri] = (schema, base)


def _base(schema: Any, base: str) -> str:
    identifier = schema.get("$id") if isinstance(schema, dict) else None
    if not isinstance(identifier, str) or identifier.startswith("#"):
        return base
    return _join(base, identifier).partition("#")[0]


def _join(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + reference
    try:
        return reference if urlsplit(reference).scheme else urljoin(base, reference)
    except ValueError:
        raise Unsupported(f"{reference!r} is not a URI") from None


def _typed(keyword: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise Unsupported(f"{keyword} is {json.dumps(value)[:40]}, which is not of the right type")
    return value


def _plain(keyword: str, value: Any) -> Any:
    """Returns the value of a keyword. Raises Unsupported if it is not of the keyword's type."""
    if keyword in OTHERS:
        _typed(keyword, value, OTHERS[keyword])
        lists = [value] if keyword == "required" else value.values() if keyword == "dependentRequired" else []
        for names in lists:
            for name in _typed(keyword, names, list):
                _typed(keyword, name, str)
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (value < 0 and keyword in COUNTS):
        raise Unsupported(f"{keyword} is {json.dumps(value)[:40]}: it must be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with the keywords of draft 2020-12 for lists of items, dependencies and exclusive limits."""
    found = dict(schema)
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and limit in found:
            found[exclusive] = found.pop(limit)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
    found.pop("additionalItems", None)
    dependencies = _typed("dependencies", found.pop("dependencies", {}), dict)
    for kind, keyword in ((list, "dependentRequired"), ((dict, bool), "dependentSchemas")):
        if some := {name: value for name, value in dependencies.items() if isinstance(value, kind)}:
            found[keyword] = {**found.get(keyword, {}), **some}
    return found
