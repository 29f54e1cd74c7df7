"""The fields of POST /v1/responses, and their translation to chat messages.

Clients send items back as they received them, and OpenAI adds fields to them often. So unknown fields of an item or a
tool are ignored; those of the request are treated as in the other endpoints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from minitui.server.chat_schema import MAX_MESSAGES, MAX_TOOLS
from minitui.server.items import Open, Turns, Typed
from minitui.server.schema import MAX_METADATA, Sampled, StreamOptions
from minitui.server.strict import at_most

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
NEEDS = {  # type of an item -> the fields that it needs
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
REFUSED = {
    "background": "answers are not computed in the background: read a stream instead",
    "conversation": "this server has no conversations: use previous_response_id, or send the whole input",
    "prompt": "this server stores no prompts: send the text as input",
    "top_logprobs": "the Responses API of this server has no logprobs: use /v1/chat/completions",
}


def one_text(value: Any) -> Any:
    """Returns a single string as a list of one text part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def one_message(value: Any) -> Any:
    """Returns a single string as a list of one message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Part(Open):
    type: str = Field(max_length=64)
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Part:
        if self.type not in TEXTS:
            raise ValueError(f"a part of type {self.type!r} is not supported: this model reads text only")
        if self.text is None and self.refusal is None:
            raise ValueError(f"a part of type {self.type} has no text")
        return self


Parts = Annotated[
    list[Part], Field(fail_fast=True, max_length=MAX_MESSAGES),
    BeforeValidator(one_text, json_schema_input_type=str | list[Part]),
]  # fmt: skip


class InputItem(Typed):
    """A message, a tool call, its result, reasoning, or a reference to an item of a stored response."""

    kind = "an item"
    needs = NEEDS

    type: str = Field("message", max_length=64)
    id: str | None = Field(None, max_length=256)
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    summary: Parts | None = None
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, min_length=1, max_length=256)
    arguments: str | None = None
    output: Parts | None = None

    @model_validator(mode="before")
    @classmethod
    def _reference(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") is None:  # OpenAI's clients may leave the type out
            value = {**value, "type": "item_reference" if "id" in value and "role" not in value else "message"}
        return value

    def plain(self) -> dict[str, Any]:
        """Returns the item as JSON."""
        return self.model_dump(exclude_none=True)


class FunctionTool(Open):
    type: str = Field(max_length=64)
    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_function(self) -> FunctionTool:
        if self.type != "function":
            raise ValueError(f"a tool of type {self.type!r} is not supported: this server has function tools only")
        if self.name is None:
            raise ValueError("a function tool needs a name")
        return self


class ToolChoice(Open):
    type: Literal["function", "allowed_tools"]
    name: str | None = Field(None, max_length=256)
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _names_tools(self) -> ToolChoice:
        if (self.name if self.type == "function" else self.tools) is None:
            raise ValueError(f"the type {self.type} needs {'a name' if self.type == 'function' else 'tools'}")
        return self


class TextFormat(Open):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("the type json_schema needs a name and a schema")
        return self


class TextConfig(Open):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class Reasoning(Open):
    # No effect, except "none".
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # no effect: the reasoning itself is sent


class ResponsesRequest(Sampled):
    """POST /v1/responses."""

    n: Literal[1] | None = None
    input: Annotated[
        list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(one_message, json_schema_input_type=str | list[InputItem]),
    ]  # fmt: skip
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(max_length=MAX_METADATA)] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    # Fields of OpenAI's clients; no effect.
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    stream_options: StreamOptions | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=1 << 31)
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @field_validator(*REFUSED)
    @classmethod
    def _not_supported(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            raise ValueError(REFUSED[info.field_name or ""])
        return value

    @field_validator("truncation")
    @classmethod
    def _not_truncated(cls, value: str | None) -> str | None:
        if value == "auto":
            raise ValueError("this server does not shorten conversations: send 'disabled', and fewer items")
        return value

    @field_validator("include")
    @classmethod
    def _without_logprobs(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError(REFUSED["top_logprobs"])
        return value

    def tool_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat request that say which tools the model may call."""
        tools, choice = self.tools or [], self.tool_choice
        wanted: Any = choice
        if isinstance(choice, ToolChoice) and choice.type == "function":
            wanted = {"type": "function", "function": {"name": choice.name}}
        elif isinstance(choice, ToolChoice):
            allowed = {tool.get("name") for tool in choice.tools or ()}
            tools, wanted = [tool for tool in tools if tool.name in allowed], choice.mode
        written = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in tools
        ]
        return {"tools": written or None, "tool_choice": wanted, "parallel_tool_calls": self.parallel_tool_calls}

    def format_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat request that constrain the reply."""
        effort = "none" if self.reasoning and self.reasoning.effort == "none" else None
        shape = self.text.format if self.text else None
        wanted: dict[str, Any] | None = None
        if shape is not None and shape.type == "json_schema":
            schema = shape.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            wanted = {"type": "json_schema", "json_schema": schema}
        elif shape is not None:
            wanted = {"type": shape.type}
        return {"response_format": wanted, "reasoning_effort": effort, "max_tokens": self.max_output_tokens}


def messages(instructions: str | None, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the chat messages of a conversation. `items`: as InputItem.plain returns them, without references."""
    turns = Turns()
    if instructions:
        turns.say("system", instructions)
    for item in items:
        kind, content = item["type"], _joined(item.get("content"))
        if kind == "message":
            turns.say("system" if item["role"] == "developer" else item["role"], content)
        elif kind == "reasoning":
            turns.reason(content or _joined(item.get("summary")))
        elif kind == "function_call":
            turns.call(item["call_id"], item["name"], item["arguments"])
        else:
            turns.result(item["call_id"], _joined(item["output"]))
    return turns.messages


def _joined(parts: list[dict[str, Any]] | None) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts or ())
