"""Defines the fields of /v1/chat/completions: messages, tools, and the format of the reply."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from engine.params import MAX_LOGPROBS
from engine.text.chat_template import LONGEST_SOURCE
from minitui.server.schema import MAX_METADATA, Sampled
from minitui.server.strict import Open, Strict, at_most

MAX_MESSAGES = 4096
MAX_TOOLS = 128
RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "self"}
NOT_TEXT = {"image_url": "images", "input_image": "images", "image": "images", "input_audio": "audio",
            "audio_url": "audio", "video_url": "videos", "file": "files", "input_file": "files"}


class TextPart(Open):
    type: Literal["text", "input_text", "output_text", "refusal"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in NOT_TEXT:
            raise ValueError(f"{NOT_TEXT[kind]} are not supported: this server's models read text only")
        if kind == "refusal":
            return {**value, "text": value.get("refusal")}
        return value


class CalledFunction(Open):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Open):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Open):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    function_call: CalledFunction | None = None  # the form of tool_calls before 2023-11; its results have role function
    audio: None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if "content" not in self.model_fields_set and not (self.tool_calls or self.function_call):
            raise ValueError(f"a message with the role {self.role} has no content")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message for a chat template, with its content as one string."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": content}
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        for name, value in (("name", self.name), ("tool_call_id", self.tool_call_id), ("reasoning_content", reasoning)):
            if value is not None:
                message[name] = value
        calls = [call.model_dump(exclude={"index"}) for call in self.tool_calls or ()]
        if self.function_call is not None:
            function = self.function_call.model_dump()
            calls.append({"id": function["name"], "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message


class Function(Strict):
    ignored = frozenset({"cache_control"})

    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")  # OpenAI: 64, Anthropic: 128
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    ignored = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str = Field(max_length=128)


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Strict):
    """The model may call only some of the tools; the prompt still describes all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


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

    ignored = Sampled.ignored | {"prediction", "prompt_cache_options"}
    refused: ClassVar = {
        **Sampled.refused, "audio": "this server's models write text only",
        "web_search_options": "this server runs no tools itself",
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    # The form of tools before 2023-11; answers then have function_call instead of tool_calls.
    functions: Annotated[list[Function], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    chat_template: str | None = Field(None, min_length=1, max_length=LONGEST_SOURCE)  # only if the operator allows it
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template, such as enable_thinking
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the reply continues the last message
    add_special_tokens: bool | None = None  # templates usually write a BOS themselves
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None  # none: no reasoning
    # Fields of OpenAI's clients; no effect.
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(max_length=MAX_METADATA)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        reserved = RESERVED & set(value or ())
        if reserved:
            raise ValueError(f"{sorted(reserved)[0]} cannot be given: the server sets it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.functions and self.tools:
            raise ValueError("functions is the older form of tools: give only one of them")
        if isinstance(self.function_call, NamedFunction) and not self.functions:
            raise ValueError("function_call needs functions")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def field_names(self) -> dict[str, str]:
        tools = "tools" if self.functions is None else "functions"
        return super().field_names | ({"json_schema": tools} if self.callable_names()[1] else {})

    @property
    def limit(self) -> int | None:
        """The largest number of tokens of the reply; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    def described_tools(self) -> list[dict[str, Any]]:
        """Returns the tools that the prompt describes, as JSON."""
        if self.functions is not None and self.function_call != "none":
            return [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in self.functions]
        if self.tools is not None and self.tool_choice != "none":
            return [tool.model_dump(exclude_none=True) for tool in self.tools]
        return []

    def callable_names(self) -> tuple[list[str], bool]:
        """Returns (the names of the tools that the model may call, True if it must call one of them)."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [choice.function.name], True
        if isinstance(choice, AllowedToolsChoice):
            allowed = choice.allowed_tools
            return [tool.function.name for tool in allowed.tools], allowed.mode == "required"
        if isinstance(self.function_call, NamedFunction):
            return [self.function_call.name], True
        return [tool["function"]["name"] for tool in self.described_tools()], choice == "required"
