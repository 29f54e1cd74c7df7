"""The fields of POST /v1/messages, and their translation to chat messages. Unknown fields of a message, a content block
or a tool are ignored, for example cache_control: every prompt is cached here."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from engine.errors import InvalidRequest
from minitui.server.errors import ApiError
from minitui.server.items import Turns, Typed
from minitui.server.openai.chat_schema import MAX_MESSAGES, MAX_TOOLS
from minitui.server.schema import Sampled, Stop
from minitui.server.strict import Open, Strict

MAX_USER = 256  # characters of metadata.user_id that the records keep
NEEDS = {  # type of a content block -> the fields that it needs
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
PARAGRAPH = "\n\n"  # between the text blocks of a message


def one_block(value: Any) -> Any:
    """Returns a single string as a list of one text block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Typed):
    kind = "a block"
    needs: ClassVar = {"text": ("text",)}

    text: str | None = None


TextBlocks = Annotated[
    list[TextBlock], Field(fail_fast=True, max_length=MAX_MESSAGES),
    BeforeValidator(one_block, json_schema_input_type=str | list[TextBlock]),
]


class Block(Typed):
    """A content block of a message."""

    kind = "a block"
    needs = NEEDS

    text: str | None = None
    thinking: str | None = None
    id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, min_length=1, max_length=256)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, max_length=256)
    content: TextBlocks | None = None
    is_error: bool | None = None


class InputMessage(Open):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], Field(fail_fast=True, max_length=MAX_MESSAGES),
        BeforeValidator(one_block, json_schema_input_type=str | list[Block]),
    ]


class ToolDefinition(Open):
    type: str | None = Field(None, max_length=64)
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_custom(self) -> ToolDefinition:
        if self.type not in (None, "custom"):
            raise ValueError(f"a tool of type {self.type!r} is not supported: describe it with an input_schema")
        if self.input_schema is None:
            raise ValueError("a tool needs an input_schema")
        return self

    def chat_tool(self) -> dict[str, Any]:
        """Returns the tool in the form of a chat request."""
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1, max_length=256)
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("the type tool needs a name")
        return self

    def chat_choice(self) -> Any:
        """Returns the choice in the form of a chat request."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Strict):
    ignored = frozenset({"display", "block_binding"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, le=1 << 31)  # no effect


class Metadata(Open):
    user_id: str | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    ignored = frozenset({"task_budget"})

    effort: str | None = Field(None, max_length=64)  # no effect
    format: OutputFormat | None = None


class Conversation(Sampled):
    """The fields that /v1/messages and /v1/messages/count_tokens share."""

    ignored = Sampled.ignored | {
        "anthropic_beta", "anthropic_version", "betas", "billing_policy", "diagnostics", "fallback_credit_token",
        "fallbacks", "inference_geo", "user_profile_id", "workspace_id",
    }
    refused: ClassVar = {
        **Sampled.refused, "compaction": "this server does not summarize conversations",
        **dict.fromkeys(("container", "mcp_servers"), "this server runs no tools itself: run them in the client"),
    }

    n: Literal[1] | None = None
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Fields of Anthropic's clients; no effect.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = Field(None, max_length=64)
    # Refused, but not as unknown: the SDK's tool runners begin with `thread`, and send everything after this refusal.
    thread: dict[str, Any] | None = None

    @field_validator("thread")
    @classmethod
    def _no_threads(cls, value: Any) -> None:
        if value is not None:
            raise ApiError(
                400, "thread is not supported: send the whole conversation in messages, without thread", "thread",
                details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
            )

    @field_validator("messages")
    @classmethod
    def _can_be_continued(cls, value: list[InputMessage]) -> list[InputMessage]:
        last = value[-1]
        if last.role == "assistant" and not (last.content and last.content[-1].type == "text"):
            raise ValueError("the last message is the assistant's, but does not end with text that can be continued")
        return value

    @model_validator(mode="after")
    def _results_have_calls(self) -> Self:
        called: set[str | None] = set()
        for number, message in enumerate(self.messages):
            for place, block in enumerate(message.content):
                if block.type == "tool_use":
                    called.add(block.id)
                elif block.type == "tool_result" and block.tool_use_id not in called:
                    raise ApiError(  # Anthropic's sentence: clients look for it
                        400,
                        f"messages.{number}.content.{place}: unexpected `tool_use_id` found in `tool_result` blocks: "
                        f"{block.tool_use_id}. Each `tool_result` block must have a corresponding `tool_use` block in "
                        "the previous message.", "messages",
                    )
        return self

    def chat_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat request besides the sampling parameters."""
        choice, shape = self.tool_choice, self.output_config.format if self.output_config else None
        wanted = {"name": "output", "schema": shape.schema_} if shape is not None else None
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return {
            "messages": chat_messages(self.system, self.messages),
            "continue_final_message": True if self.messages[-1].role == "assistant" else None,
            "tools": [tool.chat_tool() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.chat_choice() if choice is not None else None,
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "response_format": {"type": "json_schema", "json_schema": wanted} if wanted else None,
            # Without `thinking`, replies of this API begin with text, and clients rely on that.
            "reasoning_effort": None if thinks else "none",
        }


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=1 << 31)
    stop_sequences: Stop = None
    metadata: Metadata | None = None
    service_tier: str | None = Field(None, max_length=64)  # no effect

    def chat_fields(self) -> dict[str, Any]:
        user = self.metadata.user_id[:MAX_USER] if self.metadata and self.metadata.user_id else None
        return {**super().chat_fields(), "max_tokens": self.max_tokens, "stop": self.stop_sequences, "user": user}


def chat_messages(system: list[TextBlock] | None, given: list[InputMessage]) -> list[dict[str, Any]]:
    """Returns the messages of a chat request. The results of tools become messages of their own."""
    turns = Turns()
    if system:
        turns.say("system", _joined(system))
    for message in given:
        words: list[str] = []
        for block in message.content:
            if block.type == "text":
                words.append(block.text or "")
                continue
            if words:
                turns.say(message.role, PARAGRAPH.join(words))
                words = []
            if block.type == "thinking":
                turns.reason(block.thinking or "")
            elif block.type == "tool_use":
                turns.call(block.id or "", block.name or "", _written(block.input))
            elif block.type == "tool_result":
                turns.result(block.tool_use_id or "", ("Error: " if block.is_error else "") + _joined(block.content))
        if words or not message.content:
            turns.say(message.role, PARAGRAPH.join(words))
    return turns.messages


def _written(arguments: Any) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("messages: the input of a tool_use block is nested too deeply", "messages") from None


def _joined(blocks: list[TextBlock] | None) -> str:
    return PARAGRAPH.join(block.text or "" for block in blocks or ())
