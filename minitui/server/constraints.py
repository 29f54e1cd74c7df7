"""The constraints of a reply, under the names of vLLM and SGLang: JSON schema, regular expression, choices, grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from engine.errors import InvalidRequest
from minitui.server.strict import Strict

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=1024)]
Regex = Annotated[str, Field(min_length=1, max_length=8192)]
GrammarText = Annotated[str, Field(min_length=1, max_length=65536)]  # in Lark's or llama.cpp's notation
JsonSchema = dict[str, Any] | Annotated[str, Field(min_length=1)]


class Constraint(NamedTuple):
    """One constraint. `name`: its field of SamplingParams; `field`: its field of the request."""

    name: str
    value: Any
    field: str


class StructuredOutputs(Strict):
    """vLLM's field structured_outputs: one constraint. `json_object`: any JSON object."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None  # as in the request
    # No effect: JSON is always on one line, and there is one library for grammars.
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None

    def constraints(self) -> list[Constraint]:
        """Returns the constraints that are given."""
        schema = {"type": "object"} if self.json_object else self.json_
        values = {"json_schema": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        if self.json_object and self.json_ is not None:
            raise InvalidRequest("structured_outputs: give either json or json_object", "structured_outputs")
        return [Constraint(name, value, "structured_outputs") for name, value in values.items() if value is not None]


def only_one(constraints: Sequence[Constraint]) -> Sequence[Constraint]:
    """Returns the constraints. Raises InvalidRequest if there is more than one."""
    if len(constraints) > 1:
        first, second = constraints[:2]
        both = first.field if first.field == second.field else f"{first.field} and {second.field}"
        raise InvalidRequest(f"{both} constrain the reply in two ways: use only one", second.field)
    return constraints
