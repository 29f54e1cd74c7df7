"""The kinds of sampling parameters: which values are valid, who may set them, and which servers know them.

The fields of SamplingParams are the table of all parameters. The HTTP API, chats with other servers, /set, the command
line, settings.toml and the reading of generation_config.json are made from it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from engine.errors import InvalidRequest
from engine.fields import shown

OPEN_SERVERS = ("vllm", "sglang", "llamacpp")  # as these servers call themselves in their lists of models
EVERY_SERVER = ("openai", *OPEN_SERVERS)
ON, OFF = ("on", "true", "1", "yes"), ("off", "false", "0", "no")  # what a user types for True and False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One sampling parameter. `table` fills in `name`, `default`, `types` and `optional` (None is a valid value).

    chat         a chat may set it: /set, the command line, settings.toml, /generate
    recommended  generation_config.json may recommend a value
    http         a body of the OpenAI and Anthropic endpoints has a field of this name
    remote       chats with a minitui server may use it
    servers      the other servers whose API has it; "openai": also any server with OpenAI's endpoints
    spellings    its name in the API of some servers, and in /generate ("generate")
    off          another value that means the default
    words        the types in words
    """

    help: str = ""
    chat: bool = False
    recommended: bool = False
    http: bool = True
    remote: bool = True
    servers: Collection[str] = ("vllm",)
    spellings: Mapping[str, str] = field(default_factory=dict)
    off: int | None = None
    name: str = ""
    default: Any = None
    optional: bool = False
    types: tuple[type, ...] = ()
    words: str = "a bool"

    def known_to(self, server: str) -> bool:
        """Returns True if the API of a server has this parameter. `server`: as in `servers`, or "minitui"."""
        return server == "minitui" or server in self.servers

    def refusal(self, sentence: str) -> InvalidRequest:
        """Returns the error for a wrong value; `sentence` continues the parameter's name."""
        return InvalidRequest(f"{self.name} {sentence}", self.name)

    def stored(self, value: Any) -> Any:
        """Returns the value in the form in which SamplingParams keeps it."""
        return self.default if self.off is not None and value == self.off else value

    def parse(self, text: str) -> Any:
        """Returns the value that a user typed. Raises InvalidRequest."""
        try:
            return self.types[0](text)
        except ValueError:
            self.check(text, 0)  # says what it must be
            raise

    def check(self, value: Any, vocab_size: int) -> None:
        """Raises InvalidRequest if the engine cannot use the value."""
        if not isinstance(value, self.types):
            raise self.refusal(f"is of type {type(value).__name__}: it must be {self.words}")


@dataclass(frozen=True)
class Number(Parameter):
    """A number from `low` to `high`. With `open_low`, `low` itself is refused."""

    low: float
    high: float
    open_low: bool = False

    def check(self, value: Any, vocab_size: int) -> None:
        is_nan = value != value  # math.isnan raises OverflowError for very large integers
        if not isinstance(value, (int, float)) or isinstance(value, bool) or is_nan or abs(value) == math.inf:
            raise self.refusal(f"is {shown(value)}: it must be a finite number")
        if value > self.high or value < self.low or (self.open_low and value == self.low):
            bound = "above" if self.open_low else "at least"
            raise self.refusal(f"is {shown(value)}: it must be {bound} {self.low:g} and at most {self.high:g}")


@dataclass(frozen=True)
class Integer(Parameter):
    """A whole number from `low` to `high`."""

    low: int
    high: int

    def check(self, value: Any, vocab_size: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(f"is {shown(value)}: it must be a whole number")
        if not self.low <= value <= self.high:
            raise self.refusal(f"is {shown(value)}: it must be from {self.low:,} to {self.high:,}")


class Flag(Parameter):
    """True or False."""

    def parse(self, text: str) -> bool:
        if text.lower() not in (*ON, *OFF):
            raise self.refusal(f"is {shown(text)}: it must be on or off")
        return text.lower() in ON


@dataclass(frozen=True)
class Texts(Parameter):
    """At most `most` texts of at most `longest` characters; None: any number. `valid` returns a true value for a valid
    text."""

    most: int | None = None
    longest: int | None = None
    valid: Callable[[str], object] = bool

    def stored(self, value: Any) -> tuple[str, ...]:
        """Returns a tuple. Lists and single strings are accepted, as in vLLM."""
        return (value,) if isinstance(value, str) else tuple(value or ())

    def check(self, value: Any, vocab_size: int) -> None:
        many = self.most is not None and len(value) > self.most
        if many or any(not isinstance(text, str) or not self.valid(text) for text in value):
            must = "strings" if self.most is None else f"at most {self.most:,} strings, none of them empty"
            raise self.refusal(f"must be {must}; it is {shown(value)}")
        if self.longest is not None and (longest := max(map(len, value), default=0)) > self.longest:
            raise self.refusal(f"has a string of {longest:,} characters; the limit is {self.longest:,}")


@dataclass(frozen=True)
class Ids(Parameter):
    """Token ids of the vocabulary, at least `least`."""

    least: int = 0

    def stored(self, value: Any) -> tuple[int, ...] | None:
        """Returns a tuple. Ids of numpy's and torch's types are accepted."""
        if value is None:
            return None if self.optional else ()
        return tuple(plain_ids(value))

    def check(self, value: Any, vocab_size: int) -> None:
        if len(value) < self.least:
            raise self.refusal(f"is empty: it must allow at least {self.least} token")
        token_id = Integer(0, vocab_size - 1, name=self.name)
        for token in value:
            token_id.check(token, vocab_size)


@dataclass(frozen=True)
class Biases(Parameter):
    """Token id -> what is added to its logit, from -most to most."""

    most: float

    def check(self, value: Any, vocab_size: int) -> None:
        super().check(value, vocab_size)
        token_id, number = Integer(0, vocab_size - 1, name=self.name), Number(-self.most, self.most, name=self.name)
        for token, bias in value.items():
            token_id.check(token, vocab_size)
            number.check(bias, vocab_size)


def table(params: Any) -> dict[str, Parameter]:
    """Returns the parameters of a dataclass by name: its fields are Annotated with a Parameter."""
    hints, rows = get_type_hints(params, include_extras=True), {}
    for row in fields(params):
        whole, kind = get_args(hints[row.name])
        types = get_args(whole) if isinstance(whole, UnionType) else (whole,)
        plain = tuple(get_origin(each) or each for each in types if each is not NoneType)
        rows[row.name] = replace(kind, name=row.name, default=row.default, types=plain, optional=NoneType in types)
    return rows


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
