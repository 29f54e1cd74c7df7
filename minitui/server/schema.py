"""Defines the fields of requests and answers. Types are strict ("5" is not a number), and unknown fields are errors.

Some fields that OpenAI's clients send are accepted but have no effect; comments mark them.

A body may have a million faults, and collecting all of them would take longer than a reply. So checking a list stops at
its first fault, and an object with too many fields is refused before its fields are checked.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from engine.errors import InvalidRequest
from engine.params import LONGEST_BAD_WORD, MAX_BAD_WORDS, MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams

MAX_SEQUENCES = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_FIELDS = 100  # in one object; the largest valid request has fewer than half as many
MAX_BIASES = 1024
MAX_METADATA = 16
MAX_ALLOWED = 1 << 16  # ids in allowed_token_ids
MAX_TOKENIZED = 1_000_000  # characters that /tokenize accepts; encoding them takes one or two seconds and 200 MB

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Prompt = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None
BadWord = Annotated[str, Field(min_length=1, max_length=LONGEST_BAD_WORD)]
BadWords = Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)]
AllowedTokens = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED)]


def at_most(count: int) -> BeforeValidator:
    """Returns a validator that refuses an object with more entries than `count` before it checks their values."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"it has {len(value):,} entries; the limit is {count:,}")
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """A request body or a part of one."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"the object has {len(value):,} fields; the limit is {MAX_FIELDS:,}")
        return value


class Sampled(Strict):
    """Sampling parameters, and the other fields that chats and completions share. null means the default."""

    model: str | None = Field(None, max_length=512)
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    temperature: Finite | None = Field(None, ge=0, le=100)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: Finite | None = Field(None, ge=0, le=1)
    repetition_penalty: Finite | None = Field(None, gt=0, le=100)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], at_most(MAX_BIASES), Field(max_length=MAX_BIASES)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stop = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=1 << 31)
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedTokens | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=8192)
    guided_choice: Choices | None = None
    disable_additional_properties: bool | None = None  # false: objects of a schema may have undeclared properties
    stream: bool | None = None
    user: str | None = Field(None, max_length=256)

    def params(self, max_tokens: int | None, defaults: dict[str, Any], vocab_size: int, **more: Any) -> SamplingParams:
        """Returns the engine's parameters. `defaults`: the checkpoint's generation_config.

        `more`: fields of SamplingParams that take precedence over the request; a value of None is ignored.
        """
        chosen: dict[str, Any] = {key: value for key, value in defaults.items() if value is not None}
        for name in AS_IN_ENGINE:
            if (value := getattr(self, name)) is not None:
                chosen[name] = value
        chosen["top_k"] = min(chosen.get("top_k", 0), vocab_size)
        if self.logit_bias:
            chosen["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        grammar = {"json_schema": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice}
        chosen |= {name: value for name, value in grammar.items() if value is not None}
        for name, value in more.items():
            if value is not None:
                if name == "json_schema" and any(chosen.get(other) for other in grammar):
                    raise InvalidRequest("use only one of response_format, tool_choice and guided_*",
                                         "response_format")  # fmt: skip
                chosen[name] = value
        if chosen.get("min_tokens", 0) > (max_tokens or 1 << 31):
            raise InvalidRequest(
                f"min_tokens is {chosen['min_tokens']}, more than max_tokens ({max_tokens})", "min_tokens"
            )
        return SamplingParams(max_tokens=max_tokens, **chosen)

    @property
    def field_names(self) -> dict[str, str]:
        """Maps the engine's field names to the request's field names, where the two differ."""
        schema = "response_format" if self.guided_json is None else "guided_json"
        return {"regex": "guided_regex", "choice": "guided_choice", "json_schema": schema}


# The fields that have the same name and type in SamplingParams.
AS_IN_ENGINE = {field.name for field in fields(SamplingParams)} & set(Sampled.model_fields) - {"logit_bias"}


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # no effect


# ---- chat


class TextPart(Strict):
    type: Literal["text", "input_text"]
    text: str


class CalledFunction(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Strict):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    # Fields of an answer that clients send back with the message; no effect.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content_or_calls(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message with the role {self.role} has no content")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message for a chat template, with its content as one string."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return message


class Function(Strict):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")  # OpenAI: 64, Anthropic: 128
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str = Field(max_length=128)


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"the type is {self.type}: type json_schema needs a json_schema, other types exclude it")
        return self

    def grammar(self) -> dict[str, Any] | None:
        """Returns the JSON schema that the reply must follow; None if any text is allowed."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template, such as enable_thinking
    # Fields of OpenAI's clients; no effect, but reasoning_effort "none" turns off reasoning.
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(max_length=MAX_METADATA)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        reserved = {"messages", "tools", "add_generation_prompt", "self"} & set(value or ())
        if reserved:
            raise ValueError(f"{sorted(reserved)[0]} cannot be given: the server sets it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.requires_call and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self

    @property
    def requires_call(self) -> bool:
        """True if the reply must call a tool."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def field_names(self) -> dict[str, str]:
        return super().field_names | ({"json_schema": "tools"} if self.requires_call else {})


# ---- completions


class CompletionRequest(Sampled):
    """POST /v1/completions: continues a text, without a chat template."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_SEQUENCES)]
        | Prompt
        | Annotated[list[Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_SEQUENCES)]
    )
    max_tokens: int | None = Field(16, ge=1, le=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool = True
    best_of: Literal[1] | None = None
    suffix: None = None


class GenerateRequest(Strict):
    """POST /generate: a simple endpoint for one prompt, with few parameters."""

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(128, ge=1, le=1 << 31)
    temperature: Finite | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    top_p: Finite | None = Field(None, gt=0, le=1)
    rep_penalty: Finite | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stop = None
    stream: bool = False

    def sampled(self) -> Sampled:
        """Returns the same parameters with the field names of the other endpoints."""
        values = self.model_dump(include={"temperature", "top_k", "top_p", "seed", "stop"})
        return Sampled.model_validate({**values, "repetition_penalty": self.rep_penalty})


# ---- text


class TokenizeRequest(Strict):
    """POST /tokenize: encodes a text or a conversation."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _exactly_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        size = sum(len(m.plain()["content"]) for m in self.messages or ()) + len(self.prompt or "")
        if size > MAX_TOKENIZED:
            raise ValueError(f"the text has {size:,} characters; the limit is {MAX_TOKENIZED:,}")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize: decodes token ids."""

    model: str | None = Field(None, max_length=512)
    tokens: TokenIds


# ---- answers


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class OpenAIResponse(BaseModel):
    """The fields in the answers of all OpenAI endpoints."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class Generated(BaseModel):
    text: str
    finish_reason: str
    usage: Usage


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
