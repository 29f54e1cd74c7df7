"""Writes the schema for llguidance from the branches of the given schema."""

from __future__ import annotations

import json
import re
from typing import Any

from engine.text.json_schema.branches import SILENT, Branch, Branches, Part, names_of
from engine.text.json_schema.formats import of_format, of_pattern
from engine.text.json_schema.references import Schema, Unsupported, resolve
from engine.text.json_schema.values import types_of

# One line, because a small model may write spaces inside JSON until its reply reaches the length limit. No \u escapes,
# because llguidance does not recognise the name of a declared property in them, and would allow any value for it.
OPTIONS = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "json_allowed_escapes": 'nrbtf\\"',
}
MAX_LEVELS = 200  # of nested lists and objects; nested schemas reach Python's recursion limit earlier
CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")  # a control character as JSON escapes it


def rewrite(document: Any, closed: bool) -> dict[str, Any]:
    """Returns an equivalent schema for llguidance. The document's own "x-guidance" options take precedence over ours.
    `closed`: objects that declare properties have no others, unless their schema says additionalProperties. Raises
    Unsupported, with the reason, if llguidance cannot enforce the schema."""
    own = document.get("x-guidance", {}) if isinstance(document, dict) else {}
    if not isinstance(own, dict):
        raise Unsupported("x-guidance must be an object")
    try:
        if _levels(document) > MAX_LEVELS:
            raise RecursionError
        root, targets = resolve(document)
        writer = _Writer(targets, closed, lenient=own.get("lenient") is True)
        written = writer.write(root)
        definitions = writer.write_definitions()
    except RecursionError:
        raise Unsupported(f"the schema is nested too deeply (at most {MAX_LEVELS} levels): use $defs") from None
    if written is False:
        raise Unsupported("no reply can satisfy it")
    whole = {"x-guidance": {**OPTIONS, **own}, **({} if written is True else written), "$defs": definitions}
    if CONTROL.search(json.dumps(whole)):
        raise Unsupported(r"it contains a control character: only \b, \f, \n, \r and \t can be used")
    return whole


class _Writer:
    def __init__(self, targets: dict[str, Schema], closed: bool, lenient: bool) -> None:
        self._targets = targets
        self._closed = closed
        self._branches = Branches(targets, lenient)
        self._names: dict[str, str] = {}  # key of a target -> its name in `definitions`

    def write(self, schema: Schema) -> Schema:
        """Returns the schema of one place in the reply."""
        if isinstance(schema, bool):
            return schema
        keywords = set(schema)
        if keywords == {"$ref"}:
            name = self._names.setdefault(schema["$ref"], str(len(self._names)))
            return {"$ref": f"#/$defs/{name}"}
        if keywords == {"anyOf"} or (keywords == {"oneOf"} and self._branches.disjoint(schema["oneOf"])):
            return {"anyOf": [self.write(option) for option in schema[keywords.pop()]]}
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self.write(schema["allOf"][0])
        branches = [self._branch(branch) for branch in self._branches.of(schema)]
        return branches[0] if len(branches) == 1 else {"anyOf": branches} if branches else False

    def write_definitions(self) -> dict[str, Schema]:
        """Returns the definitions that the written schemas refer to."""
        found: dict[str, Schema] = {}
        while len(found) < len(self._names):
            for key, name in list(self._names.items())[len(found) :]:
                found[name] = self.write(self._targets[key])
        return found

    def _branch(self, branch: Branch) -> Schema:
        if self._closed and not any("additionalProperties" in part for part in branch):
            branch = [*branch, *_closing(branch)]
        least = max((part.get("minProperties", 0) for part in branch), default=0)
        closed = any(part.get("additionalProperties") is False for part in branch)
        if least > max(1, len(_required(branch))) and not (closed and not names_of(branch)["patternProperties"]):
            # llguidance may write one undeclared name twice, which counts as one property.
            raise Unsupported(f"minProperties is {least}: declare {least} required properties instead")
        parts = [self._part(part) for part in _merged(branch)]
        return parts[0] if len(parts) == 1 else {"allOf": parts}

    def _part(self, part: Part) -> Part:
        found: Part = {}
        strings: list[Part] = []
        for keyword, value in part.items():
            if keyword in ("properties", "patternProperties"):
                found[keyword] = {name: self._child(name, child) for name, child in value.items()}
            elif keyword in ("additionalProperties", "items"):
                found[keyword] = self._child("*", value)
            elif keyword == "prefixItems":
                found[keyword] = [self._child(str(place), child) for place, child in enumerate(value)]
            elif keyword in ("format", "pattern"):
                strings += of_format(value) if keyword == "format" else of_pattern(value)
            elif keyword != SILENT:
                found[keyword] = value
        if strings and "string" in types_of(part):
            found["allOf"] = strings
        return found

    def _child(self, name: str, schema: Schema) -> Schema:
        try:
            return self.write(schema)
        except Unsupported as error:
            error.where.insert(0, name)
            raise


def _levels(document: Any) -> int:
    """Returns how deep the lists and objects of a document are nested."""
    levels, layer = 0, [document]
    while layer:
        levels += 1
        lists = [list(value.values()) if isinstance(value, dict) else value for value in layer]
        layer = [part for parts in lists if isinstance(parts, list) for part in parts]
    return levels


def _required(branch: Branch) -> set[str]:
    return {name for part in branch for name in part.get("required", ())}


def _closing(branch: Branch) -> Branch:
    """Returns a part that excludes undeclared properties; none if the branch needs such properties."""
    names = names_of(branch)
    if names["patternProperties"] or (names["properties"] and _required(branch) <= set(names["properties"])):
        return [{**names, "additionalProperties": False}]
    return []


def _merged(branch: Branch) -> Branch:
    """Returns the branch with all schemas of a property in one part, so that `closed` applies to them together."""
    children: dict[str, list[Schema]] = {}
    for part in branch:
        for name, child in part.get("properties", {}).items():
            if child is not True and child not in children.setdefault(name, []):
                children[name].append(child)
    merged: Branch = []
    for part in branch:
        own: dict[str, Schema] = {}
        for name in part.get("properties", ()):
            schemas = children.pop(name, [])
            own[name] = {"allOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else True
        merged.append({**part, "properties": own} if own else part)
    return merged
