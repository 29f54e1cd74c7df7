"""SamplingParams: how the tokens of a reply are drawn, and when the reply ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any

from engine.errors import InvalidRequest
from engine.fields import shown

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
LONGEST_BAD_WORD = 256  # characters
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")


class RequestOutputKind(Enum):
    """What the outputs of a reply that is still growing contain."""

    CUMULATIVE = 0  # the reply so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # there is one output: the whole reply


TYPES: dict[str, tuple[type | UnionType, str]] = {  # field -> (its type, the type in words)
    "logit_bias": (dict | None, "a dict of token id to bias"),
    "ignore_eos": (bool, "a bool"),
    "include_stop_str_in_output": (bool, "a bool"),
    "skip_special_tokens": (bool, "a bool"),
    "json_schema": (dict | str | None, "a dict, or JSON as a string"),
    "regex": (str | None, "a string"),
    "disable_additional_properties": (bool, "a bool"),
    "grammar": (str | None, "a string"),
    "output_kind": (RequestOutputKind, "a RequestOutputKind"),
}


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """vLLM's form of a constraint, for `SamplingParams(structured_outputs=…)`. One of the first five may be given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None  # any JSON object
    disable_additional_properties: bool | None = None  # None: as SamplingParams says
    # No effect: JSON is always on one line, and there is one library for grammars.
    disable_any_whitespace: bool = False
    disable_fallback: bool = False

    def fields(self) -> dict[str, Any]:
        """Returns the constraint as fields of SamplingParams. Raises InvalidRequest if there is more than one."""
        schema = {"type": "object"} if self.json_object else None
        given = [
            (name, value)
            for name, value in (
                ("json_schema", self.json), ("json_schema", schema), ("regex", self.regex),
                ("choice", self.choice), ("grammar", self.grammar),
            ) if value is not None
        ]  # fmt: skip
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs has {len(given)} constraints: give one of json, regex, choice, grammar and "
                "json_object",
                "structured_outputs",
            )
        closed = self.disable_additional_properties
        return dict(given) | ({} if closed is None else {"disable_additional_properties": closed})


@dataclass(slots=True)
class SamplingParams:
    """How a reply is drawn and when it ends. Names, meanings and defaults are the same as in vLLM.

    The fields can be changed; a request has a copy of its own.

    Logits are processed in this order: grammar mask, `allowed_token_ids` and `bad_words`, `logit_bias`, `min_tokens`,
    penalties, `temperature`, `top_k`, `top_p`, `min_p`, then a draw by Gumbel-max. `temperature=0` is an exact argmax.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()  # words whose tokens are never drawn in a row; needs a tokenizer
    allowed_token_ids: tuple[int, ...] | None = None  # None: all. End tokens are excluded too, unless they are listed
    min_tokens: int = 0  # no stop token or stop string ends a reply that has fewer tokens
    max_tokens: int | None = 16  # None: as many as the context and the pool allow
    seed: int | None = None  # None or -1: a random seed, chosen when the request is added
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many of the most likely tokens to report besides each sampled token
    prompt_logprobs: int | None = None  # how many to report besides each prompt token
    # Constraints of the reply; at most one of these four may be set. They need minitui's extra "structured" (pip).
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    disable_additional_properties: bool = True  # objects of json_schema have only the properties that it declares
    grammar: str | None = None  # a context-free grammar in the notation of Lark or llama.cpp (GBNF)
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # LLM: always FINAL_ONLY
    # Arguments, not fields. structured_outputs sets the fields of one constraint; the next two are refused, and the
    # last two have no effect.
    structured_outputs: InitVar[StructuredOutputsParams | dict[str, Any] | None] = None
    guided_decoding: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    detokenize: InitVar[bool] = True
    spaces_between_special_tokens: InitVar[bool] = True

    def __post_init__(self, structured_outputs: Any, guided_decoding: Any, logits_processors: Any, *_: Any) -> None:
        if guided_decoding is not None:
            raise InvalidRequest("guided_decoding is vLLM's old name: use structured_outputs", "guided_decoding")
        if logits_processors:
            raise InvalidRequest(
                "logits_processors are not supported: use logit_bias, allowed_token_ids, bad_words, a penalty or a "
                "constraint (json_schema, regex, choice, grammar)",
                "logits_processors",
            )
        if structured_outputs is not None:
            self._constrain(structured_outputs)
        # Lists and single strings are accepted, as in vLLM, and are stored as tuples.
        for name in ("stop", "choice", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            setattr(self, name, tuple(value or ()))
        if self.stop_token_ids is None:
            self.stop_token_ids = ()
        for name in ("stop_token_ids", "allowed_token_ids"):  # of numpy or torch, too
            if (value := getattr(self, name)) is not None:
                setattr(self, name, tuple(plain_ids(value)))
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None

    def _constrain(self, given: Any) -> None:
        if isinstance(given, dict):
            try:
                given = StructuredOutputsParams(**given)
            except TypeError as error:
                known = ", ".join(StructuredOutputsParams.__dataclass_fields__)
                sentence = f"structured_outputs: {error}; its fields are {known}"
                raise InvalidRequest(sentence, "structured_outputs") from None
        if not isinstance(given, StructuredOutputsParams):
            kind = type(given).__name__
            sentence = f"structured_outputs is of type {kind}: it must be StructuredOutputsParams or a dict"
            raise InvalidRequest(sentence, "structured_outputs")
        for name, value in given.fields().items():
            if name in CONSTRAINTS and self.constraint is not None:
                raise InvalidRequest(
                    f"structured_outputs and {self.constraint} constrain the reply in two ways: use only one",
                    "structured_outputs",
                )
            setattr(self, name, value)

    def clone(self, **changes: Any) -> SamplingParams:
        """Returns a copy with some fields changed, such as `params.clone(temperature=0)`."""
        return replace(self, **changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def structured(self) -> bool:
        return self.constraint is not None

    @property
    def constraint(self) -> str | None:
        """The name of the field that constrains the reply, or None."""
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, ())]
        return given[0] if given else None

    @property
    def has_penalties(self) -> bool:
        """True if a penalty is set, so the tokens of the prompt and the reply must be counted."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest, with the name of the field, for values that the engine cannot use."""
        for name, (kind, words) in TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InvalidRequest(f"{name} is of type {type(value).__name__}: it must be {words}", name)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("n", self.n, 1, 128)
        _integer("top_k", self.top_k, 0, vocab_size)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})", "min_tokens"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest(
                f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty; it is {self.stop!r}", "stop"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)
        bad = self.bad_words
        if len(bad) > MAX_BAD_WORDS or any(not isinstance(word, str) or not word.strip() for word in bad):
            sentence = f"bad_words must be at most {MAX_BAD_WORDS:,} strings, none of them empty"
            raise InvalidRequest(sentence, "bad_words")
        if (longest := max(map(len, bad), default=0)) > LONGEST_BAD_WORD:
            raise InvalidRequest(f"a bad word has {longest:,} characters; the limit is {LONGEST_BAD_WORD}", "bad_words")
        if self.allowed_token_ids == ():
            raise InvalidRequest("allowed_token_ids is empty: it must allow at least one token", "allowed_token_ids")
        for token in self.allowed_token_ids or ():
            _integer("allowed_token_ids", token, 0, vocab_size - 1)
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0, vocab_size - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        if any(not isinstance(choice, str) for choice in self.choice):
            raise InvalidRequest("choice must contain only strings", "choice")
        if sum(getattr(self, name) not in (None, ()) for name in CONSTRAINTS) > 1:
            raise InvalidRequest(
                "only one of json_schema, regex, choice and grammar can constrain a reply", "json_schema"
            )
        if self.prompt_logprobs is not None and self.n > 1:
            raise InvalidRequest(f"prompt_logprobs needs n = 1; n is {self.n}", "prompt_logprobs")


def plain_ids(ids: Iterable[Any]) -> list[Any]:
    """Returns ids of any integer type, such as numpy's or torch's, as a list of int. Other values stay as they are."""
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if set(map(type, values)) <= {int}:  # quicker than the next line, for long prompts
        return values
    return [value if isinstance(value, (int, str)) else _whole(value) for value in values]


def _whole(value: Any) -> Any:
    try:
        return value if getattr(value, "ndim", 0) else operator.index(value)  # an array is not an id
    except TypeError:
        return value


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    is_nan = value != value  # math.isnan raises OverflowError for very large integers
    if not isinstance(value, (int, float)) or isinstance(value, bool) or is_nan or abs(value) == math.inf:
        raise InvalidRequest(f"{name} is {shown(value)}: it must be a finite number", name)
    if value > high or value < low or (open_low and value == low):
        bound = "above" if open_low else "at least"
        raise InvalidRequest(f"{name} is {shown(value)}: it must be {bound} {low:g} and at most {high:g}", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}: it must be a whole number", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {shown(value)}: it must be from {low:,} to {high:,}", name)
