"""The fields of POST /v1/responses, and their translation to chat messages. Clients send items back as they received
them, and OpenAI adds fields to them often. So unknown fields of an item or a tool are ignored; those of the request are
treated as in the other endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from minitui.server.items import Turns, Typed
from minitui.server.notices import notice
from minitui.server.openai.chat_schema import MAX_MESSAGES
from minitui.server.responses.tools import Called, ToolChoice, Tools, as_arguments
from minitui.server.schema import MAX_METADATA, Sampled, StreamOptions
from minitui.server.strict import Strict, at_most

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
NEEDS = {  # type of an item -> the fields that it needs
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call": ("call_id", "action"),
    "local_shell_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
DROPPED = {  # types of items that tell the model nothing: calls of tools that another server ran, encrypted texts
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output",
    "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call",
    "tool_search_output", "additional_tools", "program", "program_output", "compaction", "context_compaction",
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


def known_items(value: Any) -> Any:
    """Returns a single string as a list of one message, and a list without the items that tell the model nothing."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        sent = "an empty list" if value == [] else "neither a string nor a list"
        raise ValueError(f"it is {sent}: send a string, or a list with at least one item")
    kinds = [item.get("type") if isinstance(item, dict) else None for item in value]
    if found := sorted({kind for kind in kinds if isinstance(kind, str) and kind in DROPPED}):
        notice(f"ignored input items of the types {', '.join(found)}")
    return [item for item, kind in zip(value, kinds, strict=True) if kind not in found]


class Part(Typed):
    kind = "a part"
    needs: ClassVar = dict.fromkeys(TEXTS, ("text",)) | {"refusal": ("refusal",)}

    text: str | None = None
    refusal: str | None = None


Parts = Annotated[
    list[Part], Field(fail_fast=True, max_length=MAX_MESSAGES),
    BeforeValidator(one_text, json_schema_input_type=str | list[Part]),
]


class InputItem(Typed):
    """A message, a tool call, its result, reasoning, or a reference to an item of a stored conversation."""

    kind = "an item"
    needs = NEEDS

    type: str = Field("message", max_length=64)
    id: str | None = Field(None, max_length=256)
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    summary: Parts | None = None
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, min_length=1, max_length=256)
    namespace: str | None = Field(None, min_length=1, max_length=256)
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: Parts | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("type") is None:  # OpenAI's clients may leave the type out
            return {**value, "type": "item_reference" if "id" in value and "role" not in value else "message"}
        if str(value["type"]).startswith("local_shell") and value.get("call_id") is None:
            return {**value, "call_id": value.get("id")}
        return value

    def plain(self) -> dict[str, Any]:
        """Returns the item as JSON."""
        return self.model_dump(exclude_none=True)


class TextFormat(Strict):
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


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class Reasoning(Strict):
    ignored = frozenset({"context", "generate_summary", "mode"})

    # No effect, except "none".
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None  # no effect: the reasoning itself is sent


class ResponsesRequest(Sampled):
    """POST /v1/responses."""

    ignored = Sampled.ignored | {"access_programs", "background_options", "image"}
    refused: ClassVar = {
        **Sampled.refused, "context_management": "this server does not shorten conversations: send fewer items",
    }

    n: Literal[1] | None = None
    input: Annotated[
        list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(known_items, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Tools | None = None
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
    client_metadata: dict[str, Any] | None = None

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

    def tool_fields(self, offered: Mapping[Called, dict[str, Any]]) -> dict[str, Any]:
        """Returns the fields of a chat request that say which tools the model may call. `offered`: of `functions`."""
        choice, written = self.tool_choice, list(offered.values())
        wanted: Any = choice
        if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
            written, wanted = [offered[called] for called in offered if choice.allows(called)], choice.mode
        elif isinstance(choice, ToolChoice):
            name = Called(choice.name or "", choice.namespace).function
            wanted = {"type": "function", "function": {"name": name}}
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
            if text := content or _joined(item.get("summary")):  # else it is encrypted, for another server
                turns.reason(text)
        elif kind == "function_call":
            turns.call(item["call_id"], Called(item["name"], item.get("namespace")).function, item["arguments"])
        elif kind == "custom_tool_call":
            name = Called(item["name"], item.get("namespace")).function
            turns.call(item["call_id"], name, as_arguments(item["input"]))
        elif kind == "local_shell_call":
            turns.call(item["call_id"], "local_shell", json.dumps(item["action"], ensure_ascii=False))
        else:
            turns.result(item["call_id"], _joined(item["output"]))
    return turns.messages


def _joined(parts: list[dict[str, Any]] | None) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts or ())
