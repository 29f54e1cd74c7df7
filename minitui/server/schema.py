"""Defines the fields that several requests share. Types are strict: "5" is not a number.

Unknown fields are refused (strict.py). Some fields that clients send are accepted but
have no effect; comments mark them.

A body may have a million faults, and collecting all of them would take longer than a reply. So checking a list stops at
its first fault, and an object with too many fields is refused before its fields are checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, create_model, field_validator, model_validator

from engine.errors import InvalidRequest
from engine.parameters import Flag, Integer, Number, Parameter
from engine.params import LONGEST_BAD_WORD, MAX_BAD_WORDS, MAX_STOP_STRINGS, PARAMETERS, SamplingParams
from minitui.server.constraints import Choices, Constraint, GrammarText, JsonSchema, Regex, StructuredOutputs, only_one
from minitui.server.strict import Body, Strict, at_most

MAX_SEQUENCES = 128
MAX_BIASES = 1024
MAX_METADATA = 16
MAX_ALLOWED = 1 << 16  # ids in allowed_token_ids

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Prompt = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Salt = Annotated[str, Field(min_length=1, max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None
BadWord = Annotated[str, Field(min_length=1, max_length=LONGEST_BAD_WORD)]
LISTS: dict[str, Any] = {  # the types of the parameters that are lists or objects
    "logit_bias": Annotated[dict[TokenKey, Bias], at_most(MAX_BIASES), Field(max_length=MAX_BIASES)],
    "stop": Stop,
    "stop_token_ids": Annotated[list[TokenId], Field(fail_fast=True, max_length=64)],
    "bad_words": Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)],
    "allowed_token_ids": Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED)],
}
CONSTRAINTS = {  # field of a request -> of SamplingParams
    "guided_json": "json_schema", "json_schema": "json_schema", "guided_regex": "regex", "regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar", "ebnf": "grammar",
}
BODY = {name: parameter for name, parameter in PARAMETERS.items() if parameter.http}


def type_of(parameter: Parameter) -> Any:
    """Returns the type of a parameter in a request."""
    match parameter:
        case Number():
            low: dict[str, Any] = {"gt" if parameter.open_low else "ge": parameter.low}
            return Annotated[float, Field(allow_inf_nan=False, le=parameter.high, **low)]
        case Integer():
            least = parameter.low if parameter.off is None else min(parameter.low, parameter.off)
            return Annotated[int, Field(ge=least, le=parameter.high)]
        case Flag():
            return bool
    return LISTS[parameter.name]


def with_parameters(base: type[BaseModel], parameters: Mapping[str, Parameter]) -> Any:
    """Returns `base` with these fields for parameters. null means the default."""
    fields: dict[str, Any] = {
        name: (type_of(parameter) | None, Field(None, description=parameter.help or None))
        for name, parameter in parameters.items()
    }
    return create_model("Parameters", __base__=base, __module__=__name__, **fields)


class StreamOptions(Strict):
    """`continuous_usage_stats`: every event has the usage so far. `include_usage`: the last event has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # no effect


class Sampled(with_parameters(Body, BODY)):  # type: ignore[misc]
    """Sampling parameters, and the other fields that chats and completions share. null means the default."""

    refused: ClassVar = dict.fromkeys(
        ("use_beam_search", "length_penalty", "early_stopping", "best_of", "documents", "echo",
         "return_tokens_as_token_ids"),
        "leave it out",
    )  # their defaults are accepted: clients of vLLM send them

    model: str | None = Field(None, max_length=512)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=1 << 31)  # keep the last tokens; -1: what fits
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(1 << 31), le=1 << 31)  # the lowest first, with --scheduling-policy priority
    cache_salt: Salt | None = None  # only requests with the same salt share cached blocks
    # Constraints of the reply; at most one of them.
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: str | None = Field(None, min_length=1)  # this and the next two: SGLang's names
    regex: Regex | None = None
    ebnf: GrammarText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    # No effect: every request has a header X-Request-Id, and errors of the grammar are always errors.
    request_id: str | None = Field(None, max_length=256)
    spaces_between_special_tokens: bool | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("it is 0: it must be at least 1, or -1 for as many tokens as fit")
        return value

    @model_validator(mode="after")
    def _whole_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs needs stream to be false")
        return self

    def params(
        self, max_tokens: int | None, defaults: dict[str, Any],
        constraints: Sequence[Constraint] = (), **more: Any,
    ) -> SamplingParams:
        """Returns the engine's parameters. `defaults`: the checkpoint's generation_config. `constraints`: further
        constraints of the reply. `more`: fields of SamplingParams that take precedence over the request; a value of
        None is ignored."""
        chosen: dict[str, Any] = {key: value for key, value in defaults.items() if value is not None}
        chosen |= {name: value for name in BODY if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            chosen["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs and self.structured_outputs.disable_additional_properties is not None:
            chosen["disable_additional_properties"] = self.structured_outputs.disable_additional_properties
        chosen |= {constraint.name: constraint.value for constraint in only_one([*self.constraints(), *constraints])}
        if isinstance(chosen.get("json_schema"), dict):
            try:
                chosen["json_schema"] = json.dumps(chosen["json_schema"])  # deep objects cannot be sent to the engine
            except RecursionError:
                raise InvalidRequest("json_schema is nested too deeply", "json_schema") from None
        chosen |= {name: value for name, value in more.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, **chosen)

    def constraints(self) -> list[Constraint]:
        """Returns the constraints of the reply that the request has, under all of their names."""
        given = [Constraint(name, getattr(self, field), field) for field, name in CONSTRAINTS.items()]
        given += self.structured_outputs.constraints() if self.structured_outputs else []
        return [constraint for constraint in given if constraint.value is not None]

    @property
    def field_names(self) -> dict[str, str]:
        """Maps the engine's field names to the request's field names, where the two differ."""
        return {"json_schema": "response_format"} | {found.name: found.field for found in self.constraints()}
