"""Expands a JSON schema into alternatives without `anyOf`, `not`, `if` and the like."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

from engine.text.json_schema.formats import PATTERNS
from engine.text.json_schema.negation import negate
from engine.text.json_schema.references import PLAIN, Schema, Unsupported
from engine.text.json_schema.values import TYPES, common_types, few_values, key_of, types_of

Part = dict[str, Any]  # a schema whose keywords are all in KEYWORDS
Branch = list[Part]  # a value follows a branch if it follows all of its parts

CHILDREN = {"properties", "patternProperties", "additionalProperties", "items", "prefixItems", "propertyNames"}
KEYWORDS = PLAIN - {"dependentRequired", "minContains", "maxContains"} | CHILDREN
REPLACED = {"propertyNames", "uniqueItems"}
SILENT = "silent"  # marks a part, such as a negated one, whose properties and items do not count as evaluated
MAX_BRANCHES = 1_000
MAX_STEPS = 20_000  # of the expansion; they take about 0.3 s, and the engine waits
MAX_SETS = 1_024
MAX_DEPTH = 4  # `disjoint` compares the properties of objects down to this depth


class Branches:
    """Expands schemas. `targets`: the schemas that references mean. `lenient`: ignore what is not supported."""

    def __init__(self, targets: dict[str, Schema], lenient: bool) -> None:
        self._targets = targets
        self._lenient = lenient
        self._steps = 0

    def of(self, schema: Schema, refs: frozenset[str] = frozenset()) -> list[Branch]:
        """Returns branches: a value follows the schema if it follows one of them. `refs`: the references that led to
        this schema. Raises Unsupported if one of them is met again."""
        self._step()
        if isinstance(schema, bool):
            return [[]] if schema else []
        found: list[Branch] = [[]]
        part = {keyword: value for keyword, value in schema.items() if keyword in KEYWORDS}
        for keyword in schema:
            if keyword in KEYWORDS and keyword != next(iter(part)):
                continue  # `part` has all of these keywords; it was added at the first of them
            try:
                found = self._both(found, self._part(part) if keyword in part else self._expand(keyword, schema, refs))
            except Unsupported:
                if not self._lenient:
                    raise
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema:
                found = [branch + rest_of(branch, keyword, schema[keyword]) for branch in found]
        return found

    def disjoint(self, options: list[Schema], refs: frozenset[str] = frozenset(), depth: int = 0) -> bool:
        """Returns True if it is certain that no value follows two of the options."""
        values = [few_values(option, self._targets) for option in options]
        if None not in values:
            keys = [key_of(value) for listed in values for value in listed or ()]
            return len(set(keys)) == len(keys)
        expanded = [self.of(option, refs) for option in options]
        pairs = combinations(expanded, 2)
        return all(self._apart(x, y, depth) for first, second in pairs for x in first for y in second)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Unsupported(f"the schema needs more than {MAX_STEPS:,} steps to expand: make it smaller")

    def _both(self, left: list[Branch], right: list[Branch]) -> list[Branch]:
        if len(left) * len(right) > MAX_BRANCHES:
            raise Unsupported(f"its options combine in more than {MAX_BRANCHES:,} ways: use fewer of them")
        both = [x + y for x in left for y in right]
        return [branch for branch in both if common_types(branch)]

    def _expand(self, keyword: str, schema: Part, refs: frozenset[str]) -> list[Branch]:
        """Returns the branches of one keyword of the schema."""
        value = schema[keyword]
        if keyword == "$ref":
            if value in refs:
                raise Unsupported("a $ref leads back to itself, so it describes no value")
            return self.of(self._targets[value], refs | {value})
        if keyword == "allOf":
            found: list[Branch] = [[]]
            for option in value:
                found = self._both(found, self.of(option, refs))
            return found
        if keyword == "anyOf":
            return [branch for option in value for branch in self.of(option, refs)]
        if keyword == "oneOf":
            return self._one_of(value, refs)
        if keyword == "not":
            return self._none_of(value)
        if keyword == "if":
            return self._conditional(schema, refs)
        if keyword in ("dependentRequired", "dependentSchemas"):
            found = [[]]
            for name, needed in value.items():
                present: Schema = {"required": [name, *needed]} if isinstance(needed, list) else needed
                with_it = self._both([[{"required": [name]}]], self.of(present, refs))
                found = self._both(found, [[{"properties": {name: False}, SILENT: True}], *with_it])
            return found
        if keyword == "contains" and (schema.get("minContains") != 0 or "maxContains" in schema):
            raise Unsupported("contains is not supported: remove it, or describe the items with items and prefixItems")
        return [[]]  # another keyword: it belongs to one of these, as "then" belongs to "if", or restricts nothing

    def _none_of(self, schema: Schema) -> list[Branch]:
        return [[{**part, SILENT: True} for part in branch] for branch in self.of(negate(schema, self._targets))]

    def _one_of(self, options: list[Schema], refs: frozenset[str]) -> list[Branch]:
        if self.disjoint(options, refs):
            return [branch for option in options for branch in self.of(option, refs)]
        expanded = [self.of(option, refs) for option in options]
        found: list[Branch] = []
        for number, mine in enumerate(expanded):
            for other_number, other in enumerate(options):
                theirs = expanded[other_number]
                if other_number == number or all(self._apart(x, y) for x in mine for y in theirs):
                    continue
                try:
                    mine = self._both(mine, self._none_of(other))
                except Unsupported as error:
                    raise Unsupported(
                        f"options {number + 1} and {other_number + 1} of oneOf may overlap: use anyOf, or give each "
                        f"option a required property with a const of its own ({error})"
                    ) from None
            found += mine
        return found

    def _conditional(self, schema: Part, refs: frozenset[str]) -> list[Branch]:
        if "then" not in schema and "else" not in schema:
            return [[]]
        true = self._both(self.of(schema["if"], refs), self.of(schema.get("then", True), refs))
        return true + self._both(self._none_of(schema["if"]), self.of(schema.get("else", True), refs))

    def _part(self, part: Part) -> list[Branch]:
        """Returns the branches of a part. Replaces keywords that llguidance does not have."""
        found: list[Branch] = [[{name: value for name, value in part.items() if name not in REPLACED}]]
        for keyword, replace in (("propertyNames", self._names), ("uniqueItems", self._sets)):
            if part.get(keyword) is not None:
                try:
                    found = self._both(found, replace(part))
                except Unsupported:
                    if not self._lenient:
                        raise
        return found

    def _names(self, part: Part) -> list[Branch]:
        """Returns what `propertyNames` means in other keywords."""
        schema: Schema = part["propertyNames"]
        while isinstance(schema, dict) and set(schema) == {"$ref"}:
            self._step()
            schema = self._targets[schema["$ref"]]
        if schema is True or "object" not in types_of(part):
            return [[]]
        if (values := few_values(schema, self._targets)) is not None:
            names = dict.fromkeys((value for value in values if isinstance(value, str)), True)
            return [[{"properties": names, "additionalProperties": False, SILENT: True}]]
        rest = {key: value for key, value in schema.items() if key != "type"} if isinstance(schema, dict) else {}
        if set(rest) == {"pattern"}:
            pattern = rest["pattern"]
        elif set(rest) == {"format"} and rest["format"] in PATTERNS:
            pattern = f"^(?:{PATTERNS[rest['format']]})$"
        elif set(rest) <= {"minLength", "maxLength"}:
            pattern = rf"^[\s\S]{{{rest.get('minLength', 0)},{rest.get('maxLength', '')}}}$"
        else:
            raise Unsupported("propertyNames needs an enum, a pattern, or minLength and maxLength: use one of them")
        return [[{"patternProperties": {pattern: True}, "additionalProperties": False, SILENT: True}]]

    def _sets(self, part: Part) -> list[Branch]:
        """Returns what `uniqueItems` means: all lists of different items, with their items in the schema's order."""
        low, high = part.get("minItems", 0), part.get("maxItems", math.inf)
        if not part["uniqueItems"] or "array" not in types_of(part) or high < 2:
            return [[]]
        values = None if part.get("prefixItems") else few_values(part.get("items", True), self._targets)
        sizes = range(low, min(high, len(values)) + 1) if values is not None else ()
        if values is None or sum(math.comb(len(values), size) for size in sizes) > MAX_SETS:
            raise Unsupported(
                "uniqueItems needs items from an enum of at most 10 values: leave uniqueItems out, and remove "
                "duplicates afterwards"
            )
        lists = [list(chosen) for size in sizes for chosen in combinations(values, size)]
        return [[{"type": [name for name in TYPES if name != "array"]}], [{"enum": lists}]]

    def _apart(self, left: Branch, right: Branch, depth: int = 0) -> bool:
        """Returns True if it is certain that no value follows both branches."""
        self._step()
        kinds = common_types([*left, *right])
        if not kinds:
            return True
        if (x := _values(left)) is not None and (y := _values(right)) is not None and not x & y:
            return True
        if kinds != {"object"} or depth == MAX_DEPTH:
            return False
        required = {name for part in (*left, *right) for name in part.get("required", ())}
        for name in required:
            first, second = ([p["properties"][name] for p in side if name in p.get("properties", {})]
                             for side in (left, right))
            if any(self.disjoint([x, y], depth=depth + 1) for x in first for y in second):
                return True
        return False


def rest_of(branch: Branch, keyword: str, schema: Schema) -> Branch:
    """Returns a part that applies the schema to all properties or items that the branch does not evaluate."""
    heard = [part for part in branch if SILENT not in part]
    if keyword == "unevaluatedItems":
        if any("items" in part for part in heard):
            return []
        places = max((len(part.get("prefixItems", ())) for part in heard), default=0)
        return [{"prefixItems": [True] * places, "items": schema}]
    if any("additionalProperties" in part for part in heard):
        return []
    return [{**names_of(branch), "additionalProperties": schema}]


def names_of(branch: Branch) -> Part:
    """Returns a part that allows any value for the properties that a branch evaluates."""
    heard = [part for part in branch if SILENT not in part]
    return {
        keyword: {name: True for part in heard for name in part.get(keyword, ())}
        for keyword in ("properties", "patternProperties")
    }


def _values(branch: Branch) -> set[str] | None:
    """Returns the keys of the values that a branch lists; None if it lists none."""
    found: set[str] | None = None
    for part in branch:
        if "const" in part or "enum" in part:
            values = {key_of(value) for value in ([part["const"]] if "const" in part else part["enum"])}
            found = values if found is None else found & values
    return found
