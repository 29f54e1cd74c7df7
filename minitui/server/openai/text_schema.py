"""Defines the fields of the endpoints for plain text: completions, /generate, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from engine.params import MAX_LOGPROBS, PARAMETERS, SamplingParams
from minitui.server.openai.chat_schema import MAX_MESSAGES, ChatMessage
from minitui.server.schema import MAX_SEQUENCES, Prompt, Sampled, TokenIds, with_parameters
from minitui.server.strict import Body

MAX_TOKENIZED = 1_000_000  # characters that /tokenize accepts; encoding them takes one or two seconds and 200 MB


class CompletionRequest(Sampled):
    """POST /v1/completions: continues a text, without a chat template."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_SEQUENCES)]
        | Prompt
        | Annotated[list[Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_SEQUENCES)]
    )
    max_tokens: int | None = Field(16, ge=0, le=1 << 31)  # 0: only the prompt, with echo or prompt_logprobs
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("best_of", "suffix")
    @classmethod
    def _supported(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (None, "", 1):
            raise ValueError(f"{info.field_name} is not supported: leave it out")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise ValueError(f"echo with logprobs needs n to be 1; n is {self.n}")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0, which needs echo or prompt_logprobs")
        return self


GENERATE = {p.spellings.get("generate", name): p for name, p in PARAMETERS.items() if p.chat or name == "stop"}


class GenerateRequest(with_parameters(Body, GENERATE)):  # type: ignore[misc]
    """POST /generate: a simple endpoint for one prompt, with the parameters of chats. It streams a greedy reply."""

    prompt: str = Field(min_length=1)
    stream: bool | None = None

    def params(self) -> SamplingParams:
        """Returns the engine's parameters."""
        given = {p.name: value for name, p in GENERATE.items() if (value := getattr(self, name)) is not None}
        return SamplingParams(**{"max_tokens": 64, "temperature": 0.0} | given)


class TokenizeRequest(Body):
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


class DetokenizeRequest(Body):
    """POST /detokenize: decodes token ids."""

    model: str | None = Field(None, max_length=512)
    tokens: TokenIds
