"""JSON schemas: what a reply may be, whatever the model would rather say."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.text.structured import Grammar, Grammars
from engine.text.tokenizer import Tokenizer
from minitui.tutor import model_dir

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")
pydantic = pytest.importorskip("pydantic")

SUITE: dict[str, list[Any]] = json.loads((Path(__file__).parent / "json_schema_suite/draft2020-12.json").read_text())
GROUPS = [(name, group) for name, groups in SUITE.items() for group in groups]
DATES = [(name, group) for name, group in GROUPS if name.startswith("optional")]
MAIN = [(name, group) for name, group in GROUPS if not name.startswith("optional")]
ENDINGS = (b'"', b"}", b"]", b"0", b"1")


class Writer:
    """Checks and writes replies that follow JSON schemas. Every Writer draws the same random numbers."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._random = np.random.default_rng(0)
        starts = [tokenizer.token_bytes(token)[:1] for token in range(tokenizer.vocab_size)]
        self._endings = np.array([start in ENDINGS for start in starts])

    def compile(self, schema: Any, **params: Any) -> Grammar:
        """Raises InvalidRequest if the schema is refused."""
        return self._grammars.compile(SamplingParams(json_schema=schema, **params))

    def accepts(self, schema: Any, text: str, **params: Any) -> bool:
        """Returns True if the text is a complete reply."""
        grammar = self.compile(schema, **params)
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            if not _bits(grammar.mask())[token]:
                return False
            grammar.advance(token)
        return any(_bits(grammar.mask())[token] for token in self._tokenizer.eos_ids)

    def write(self, schema: Any, most: int = 100, **params: Any) -> str | None:
        """Returns a reply; None if it was not complete after `most` tokens. Half of the draws prefer short replies."""
        grammar = self.compile(schema, **params)
        ids: list[int] = []
        while len(ids) < most:
            allowed = _bits(grammar.mask())[: len(self._endings)].astype(bool)
            assert not grammar.failed, grammar.failed
            end = next((token for token in self._tokenizer.eos_ids if allowed[token]), None)
            short = allowed & self._endings if self._random.random() < 0.5 else allowed
            token = int(self._random.choice(np.flatnonzero(short if short.any() else allowed)))
            if token == end or (end is not None and self._random.random() < 0.5):
                return self._tokenizer.decode(ids)
            ids.append(token)
            if grammar.advance(token):
                return self._tokenizer.decode(ids)
        return None


def _bits(mask: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_dir())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.fixture
def writer(tokenizer: Tokenizer, grammars: Grammars) -> Writer:
    return Writer(tokenizer, grammars)


def one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def finite(value: Any) -> bool:
    """False if a number of the value is larger than Python's floats, which validators cannot judge."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not (isinstance(value, float) and math.isinf(value)) and all(map(finite, parts))


# ---- JSON Schema's own test suite


@pytest.mark.parametrize("closed", [True, False])
def test_of_the_official_suite_most_schemas_are_accepted_and_every_reply_to_them_is_valid(
    closed: bool, writer: Writer
) -> None:
    groups = MAIN[1::6] if closed else MAIN[::3]
    accepted, replies, wrong = 0, 0, []
    for name, group in groups:
        schema = json.dumps(group["schema"])
        options = {"disable_additional_properties": closed}
        try:
            writer.compile(schema, **options)
        except InvalidRequest as error:
            assert " " in str(error) and len(str(error)) < 400
            continue
        accepted += 1
        for test in group["tests"]:
            if not closed and not test["valid"] and writer.accepts(schema, one_line(test["data"]), **options):
                wrong.append((name, group["description"], one_line(test["data"])))
        validator = jsonschema_rs.Draft202012Validator(group["schema"])
        for _ in range(1 if closed else 2):
            text = writer.write(schema, **options)
            if text is None or not finite(json.loads(text)):
                continue
            replies += 1
            if not validator.is_valid(json.loads(text)):
                wrong.append((name, group["description"], text))
    print(f"{accepted} of {len(groups)} schemas accepted, {replies} replies")
    assert not wrong
    assert replies > accepted * 0.9
    assert accepted / len(groups) > 0.75


@pytest.mark.parametrize(("name", "group"), DATES, ids=[name for name, _ in DATES])
def test_a_string_of_a_format_is_of_this_format(name: str, group: Any, writer: Writer) -> None:
    schema = {"type": "string", **group["schema"]}
    texts = [(one_line(test["data"]), test["valid"]) for test in group["tests"] if isinstance(test["data"], str)]
    accepted = [text for text, _ in texts if writer.accepts(schema, text)]
    assert set(accepted) <= {text for text, valid in texts if valid}
    assert accepted, "all were refused"


# ---- one rule after the other

ITEM = {"type": "object", "properties": {"a": {"type": "integer"}}}
NODE = {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}, "v": {"type": "integer"}}, "required": ["v"]}
TREE = {"$ref": "#/$defs/t", "$defs": {"t": NODE}}
PET = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name.lower()}, "of": value}, "required": ["kind"]}
        for name, value in (("Cat", {"type": "integer"}), ("Dog", {"type": "boolean"}))
    },
}
DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
CLOSED_TWICE = {
    "allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
    "$defs": {"b": {"properties": {"b": {"type": "integer"}}}},
    "type": "object",
}
IF = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
    "required": ["kind"],
    "if": {"properties": {"kind": {"const": "x"}}},
    "then": {"required": ["n"]},
    "else": {"properties": {"n": False}},
}
TWO_BASES = {
    "type": "array",
    "prefixItems": [
        {"$id": f"tool:{n}", "$ref": "#/$defs/Item", "$defs": {"Item": {"type": kind}}}
        for n, kind in enumerate(("integer", "string"))
    ],
    "items": False,
    "minItems": 2,
}
CASES: dict[str, tuple[Any, list[str], list[str]]] = {  # schema, replies, what is no reply
    "one line": (ITEM, ['{"a": 1}', "{}"], ['{ "a": 1}', '{"a":1}', '{"a": 1}\n', '{"a":\n1}']),
    "declared properties are all": (ITEM, ["{}"], ['{"b": 1}', '{"a": 1, "b": 1}', '{"\\u0061": 1}']),
    "additionalProperties is obeyed": (
        {**ITEM, "additionalProperties": {"type": "string"}}, ['{"b": "x"}', '{"a": 1, "b": ""}'],
        ['{"b": 1}', '{"\\u0061": "x"}', '{"a": "x"}']),
    "an object without declared properties is open": ({"type": "object"}, ['{"b": 1}'], ["1"]),
    "a required property that is not declared": ({**ITEM, "required": ["b"]}, ['{"b": 1}'], ["{}"]),
    "names by pattern": (
        {"patternProperties": {"^x": {"type": "null"}}}, ['{"xa": null}', "3"], ['{"xa": 1}', '{"a": 1}']),
    "allOf is closed as a whole": (CLOSED_TWICE, ['{"a": 1, "b": 2}', '{"a": 1}'], ['{"a": 1, "c": 2}', '{"b": 1}']),
    "each property is closed as a whole": (
        {"allOf": [{"properties": {"x": ITEM}}, {"properties": {"x": {"properties": {"b": True}}}}], "type": "object"},
        ['{"x": {"a": 1, "b": 2}}'], ['{"x": {"c": 1}}', '{"y": 1}']),
    "recursion": (TREE, ['{"l": {"l": {"v": 1}, "v": 2}, "v": 3}'], ['{"l": {}, "v": 3}', '{"w": 1, "v": 1}']),
    "equal names of definitions": (TWO_BASES, ['[1, "a"]'], ['["a", "a"]', "[1, 1]"]),
    "a discriminated union": (
        PET, ['{"kind": "cat", "of": 1}', '{"kind": "dog", "of": true}'], ['{"kind": "cat", "of": true}', "{}"]),
    "oneOf that overlaps": (
        {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]}, ["2", "6"], ["3", "5"]),
    "not a value": (
        {"type": "string", "not": {"enum": ["ab", "é-", ""]}}, ['"a"', '"abc"', '"é"', '"b"'], ['"ab"', '"é-"', '""']),
    "not a number": ({"type": "integer", "not": {"enum": [3, 5]}}, ["4", "-1", "6"], ["3", "5"]),
    "not required": ({**ITEM, "not": {"required": ["a"]}}, ["{}"], ['{"a": 1}']),
    "not these together": ({"not": {"type": ["object", "array"]}}, ["1", "null"], ["[]", "{}"]),
    "if, then, else": (IF, ['{"kind": "x", "n": 1}', '{"kind": "y"}'], ['{"kind": "x"}', '{"kind": "y", "n": 1}']),
    "dependentRequired": (
        {"properties": {"a": True, "b": True}, "type": "object", "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 2}'], ['{"a": 1}']),
    "a set": (
        {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 1},
        ['["x"]', '["x", "z"]'], ["[]", '["x", "x"]', '["w"]']),
    "names from a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": "1"}']),
    "names of a length": ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
    "unevaluatedProperties": (
        {"$ref": "#/$defs/a", "properties": {"b": True}, "unevaluatedProperties": False, "$defs": {"a": ITEM}},
        ['{"a": 1}', '{"b": 1}'], ['{"c": 1}', "2"]),
    "unknown formats are remarks": ({"type": "string", "format": "path"}, ['"/tmp/x"'], ["1"]),
    "an address": ({"type": "string", "format": "ipvanyaddress"}, ['"1.2.3.4"', '"::1"'], ['"1.2.3"', '"x"']),
    "a time": (
        {"type": "string", "format": "time"}, ['"12:30:00Z"'], ['"12:30"', '"24:00:00Z"', '"12:30:60Z"', '"noon"']),
    "a date": (
        {"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"']),
    "a decimal number": (DECIMAL, ['"1.5"', '"-.5"', '"7"'], ['"."', '"-"', '""', '"1.5.2"']),
    "draft 7": ({"items": [{"type": "integer"}], "additionalItems": False}, ["[1]", "[]", "1"], ['["a"]', "[1, 2]"]),
    "draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reply_follows_the_schema(name: str, writer: Writer) -> None:
    schema, replies, others = CASES[name]
    assert [text for text in replies if not writer.accepts(schema, text)] == []
    assert [text for text in others if writer.accepts(schema, text)] == []


def test_an_option_opens_objects(writer: Writer) -> None:
    nested = {"type": "array", "items": ITEM}
    assert not writer.accepts(nested, '[{"a": 1, "b": 2}]')
    assert writer.accepts(nested, '[{"a": 1, "b": 2}]', disable_additional_properties=False)
    closed = {**ITEM, "additionalProperties": False}
    assert not writer.accepts(closed, '{"b": 2}', disable_additional_properties=False)


def test_keywords_that_are_not_supported_can_be_ignored(writer: Writer) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    assert writer.accepts({**schema, "x-guidance": {"lenient": True}}, '["a", "a"]')
    assert not writer.accepts({**schema, "x-guidance": {"lenient": True}}, "[1]")


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"tags": {"items": {"type": "string"}, "uniqueItems": True}}}, r"tags: uniqueItems needs items"),
    ({"contains": {"type": "integer"}}, "contains is not supported"),
    ({"not": {"pattern": "a"}}, "pattern cannot be negated"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "options 1 and 2 of oneOf may overlap"),
    ({"type": "object", "minProperties": 2}, "declare 2 required properties"),
    ({"const": "a\0b"}, "control character"),
    ({"$ref": "http://example.com/schema"}, "is not a part of the schema"),
    ({"allOf": [{"$ref": "#"}], "type": "object"}, "leads back to itself"),
    ({"$defs": {"a": {"$id": "x:a", "type": "null"}, "b": {"$id": "x:a"}}}, "have the URI 'x:a'"),
    ({"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(4)]} for n in range(9)]}, "more than 1,000 ways"),
    ({"enum": 5}, "enum is 5"),
    ({"minLength": "a"}, "minLength is \"a\""),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_the_reason(schema: Any, reason: str, writer: Writer) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        writer.compile(schema)
    assert caught.value.field == "json_schema"


def test_a_long_chain_of_definitions_is_no_deep_nesting(writer: Writer) -> None:
    steps = 300
    chain = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(steps)}
    assert writer.accepts({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{steps}": {"type": "null"}}}, '{"a": {"a": {}}}')


# ---- the types of pydantic


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Node(pydantic.BaseModel):
    value: int
    colour: Colour | None = None
    children: list[Node] = pydantic.Field([], max_length=2)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=1, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    born: datetime.date


class Household(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    others: list[Cat | Dog] = pydantic.Field(max_length=2)


class Point(NamedTuple):
    x: float
    label: Annotated[str, pydantic.StringConstraints(max_length=4)]


TYPES: list[Any] = [
    Node, Household, Point, set[Colour], frozenset[bool], bytes, Path, pydantic.SecretStr, pydantic.IPvAnyAddress,
    pydantic.IPvAnyNetwork, ipaddress.IPv4Network, ipaddress.IPv6Interface, dict[Literal["a", "b"], int],
    dict[Colour, bool], dict[pydantic.UUID4, None],
    dict[Annotated[str, pydantic.StringConstraints(pattern="^[a-z]{1,3}$")], bool],
    Annotated[dict[str, bool], pydantic.Field(min_length=1)], datetime.time, datetime.date, datetime.datetime,
    pydantic.AwareDatetime, datetime.timedelta, pydantic.UUID7, pydantic.Base64Bytes, tuple[int, Colour, None],
    Annotated[int, pydantic.Field(multiple_of=3, ge=-9, le=90)], Literal[1, "a", None],
    Annotated[float, pydantic.Field(gt=0, lt=1)],
]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: str(kind)[:50])
def test_replies_can_be_read_as_the_type_of_the_schema(kind: Any, writer: Writer) -> None:
    adapter = pydantic.TypeAdapter(kind)
    schema = adapter.json_schema()
    replies = [text for _ in range(8) if (text := writer.write(schema)) is not None]
    assert replies, "no reply was complete"
    for text in replies:
        adapter.validate_json(text)


def test_decimals_of_older_pydantic_are_numbers(writer: Writer) -> None:
    for _ in range(8):
        Decimal(json.loads(writer.write(DECIMAL) or '"0"'))
