"""SamplingParams: how the tokens of a reply are drawn, and when the reply ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from enum import Enum
from typing import Annotated, Any

from engine.errors import InvalidRequest
from engine.parameters import EVERY_SERVER, OPEN_SERVERS, Biases, Flag, Ids, Integer, Number, Parameter, Texts, table

LARGEST = 1 << 31
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
        ]
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

    n: Annotated[int, Integer(1, 128, remote=False)] = 1
    temperature: Annotated[float, Number(
        0, 100, chat=True, recommended=True, servers=EVERY_SERVER,
        help="0 is greedy. Default: the checkpoint's value.",
    )] = 1.0
    top_p: Annotated[float, Number(
        0, 1, open_low=True, chat=True, recommended=True, servers=EVERY_SERVER,
        help="Sample from the smallest set of tokens with this total probability.",
    )] = 1.0
    top_k: Annotated[int, Integer(
        0, LARGEST, off=-1, chat=True, recommended=True, servers=OPEN_SERVERS,
        help="Sample from the k most likely tokens. 0 or -1: from all.",
    )] = 0
    min_p: Annotated[float, Number(
        0, 1, chat=True, recommended=True, servers=OPEN_SERVERS,
        help="Sample from the tokens with at least this share of the most likely token's probability.",
    )] = 0.0
    repetition_penalty: Annotated[float, Number(
        0, 100, open_low=True, chat=True, recommended=True, servers=OPEN_SERVERS,
        spellings={"generate": "rep_penalty", "llamacpp": "repeat_penalty"},
        help="Above 1: the tokens of the prompt and the answer become less likely.",
    )] = 1.0
    presence_penalty: Annotated[float, Number(
        -2, 2, chat=True, servers=EVERY_SERVER, help="Subtracted from the logits of the answer's tokens.",
    )] = 0.0
    frequency_penalty: Annotated[float, Number(
        -2, 2, chat=True, servers=EVERY_SERVER,
        help="Subtracted from the logits of the answer's tokens, once for each time that the token is there.",
    )] = 0.0
    logit_bias: Annotated[dict[int, float] | None, Biases(100, remote=False, words="a dict of token id to bias")] = None
    # Words whose tokens are never drawn in a row. They need a tokenizer.
    bad_words: Annotated[tuple[str, ...], Texts(MAX_BAD_WORDS, LONGEST_BAD_WORD, str.strip)] = ()
    # None: all tokens. End tokens are excluded too, unless they are listed.
    allowed_token_ids: Annotated[tuple[int, ...] | None, Ids(1)] = None
    # The reply is these tokens, whatever the model would draw; log-probabilities are the model's own.
    trace_decode_token_ids: Annotated[tuple[int, ...] | None, Ids(1, http=False, remote=False)] = None
    # No stop token or stop string ends a reply that has fewer tokens.
    min_tokens: Annotated[int, Integer(0, LARGEST)] = 0
    max_tokens: Annotated[int | None, Integer(  # None: as many as the context and the pool allow
        1, LARGEST, chat=True, http=False, servers=EVERY_SERVER,
        help="Maximum tokens of an answer. Default: as many as fit the context and the pool.",
    )] = 16
    seed: Annotated[int | None, Integer(  # None or -1: a random seed, chosen when the request is added
        -(1 << 63), (1 << 63) - 1, off=-1, chat=True, servers=EVERY_SERVER,
        help="The same seed gives the same answer; other requests do not change it.",
    )] = None
    stop: Annotated[tuple[str, ...], Texts(MAX_STOP_STRINGS, servers=EVERY_SERVER)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Ids(remote=False)] = ()
    ignore_eos: Annotated[bool, Flag(
        chat=True, servers=OPEN_SERVERS, help="Continue after an end token, until max_tokens."
    )] = False
    include_stop_str_in_output: Annotated[bool, Flag(remote=False)] = False
    skip_special_tokens: Annotated[bool, Flag()] = True
    # How many of the most likely tokens to report besides each sampled token, and besides each prompt token.
    logprobs: Annotated[int | None, Integer(0, MAX_LOGPROBS, http=False)] = None
    prompt_logprobs: Annotated[int | None, Integer(0, MAX_LOGPROBS, remote=False)] = None
    # Constraints of the reply; at most one of these four may be set. They need minitui's extra "structured" (pip).
    json_schema: Annotated[dict[str, Any] | str | None, Parameter(
        words="a dict, or JSON as a string", http=False, remote=False
    )] = None
    regex: Annotated[str | None, Parameter(words="a string", http=False, remote=False)] = None
    choice: Annotated[tuple[str, ...], Texts(valid=lambda _: True, http=False, remote=False)] = ()
    disable_additional_properties: Annotated[bool, Flag(
        remote=False, help="The objects of a JSON schema have only the properties that it declares.",
    )] = True
    # A context-free grammar in the notation of Lark or llama.cpp (GBNF).
    grammar: Annotated[str | None, Parameter(words="a string", http=False, remote=False)] = None
    output_kind: Annotated[RequestOutputKind, Parameter(  # LLM: always FINAL_ONLY
        words="a RequestOutputKind", http=False, remote=False
    )] = RequestOutputKind.CUMULATIVE
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
        for parameter in STORED_OTHERWISE:
            setattr(self, parameter.name, parameter.stored(getattr(self, parameter.name)))

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
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if value is not None or not parameter.optional:
                parameter.check(value, vocab_size)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if sum(getattr(self, name) not in (None, ()) for name in CONSTRAINTS) > 1:
            raise InvalidRequest(
                "only one of json_schema, regex, choice and grammar can constrain a reply", "json_schema"
            )
        if self.prompt_logprobs is not None and self.n > 1:
            raise InvalidRequest(f"prompt_logprobs needs n = 1; n is {self.n}", "prompt_logprobs")


PARAMETERS = table(SamplingParams)
RECOMMENDED = [name for name, parameter in PARAMETERS.items() if parameter.recommended]
STORED_OTHERWISE = [p for p in PARAMETERS.values() if p.off is not None or type(p).stored is not Parameter.stored]
