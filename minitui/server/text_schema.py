"""Defines the fields of the endpoints for plain text: completions, /generate, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from engine.params import MAX_LOGPROBS, SamplingParams
from minitui.server.chat_schema import MAX_MESSAGES, ChatMessage
from minitui.server.schema import MAX_SEQUENCES, Finite, Prompt, Sampled, Stop, TokenIds
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


class GenerateRequest(Body):
    """POST /generate: a simple endpoint for one prompt, with few parameters. By default it streams a greedy reply."""

    prompt: str = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: Finite | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    top_p: Finite | None = Field(None, gt=0, le=1)
    rep_penalty: Finite | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stop = None
    stream: bool | None = None

    def params(self, vocab_size: int) -> SamplingParams:
        """Returns the engine's parameters."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=self.max_tokens or 64, temperature=self.temperature or 0.0, seed=self.seed,
            top_p=1.0 if self.top_p is None else self.top_p, top_k=min(self.top_k or 0, vocab_size),
            repetition_penalty=1.0 if self.rep_penalty is None else self.rep_penalty, stop=stop,
        )  # fmt: skip


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
