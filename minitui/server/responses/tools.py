"""The tools of POST /v1/responses, which become the functions of a chat request.

    function     a function
    custom       a function with one text, `input`
    namespace    each of its tools is a function with the name NAMESPACE__NAME
    others       are dropped with a notice: OpenAI's server would run them (web_search), or trains its models for them
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from minitui.server.errors import ApiError
from minitui.server.items import Typed
from minitui.server.notices import notice
from minitui.server.openai.chat_schema import MAX_TOOLS
from minitui.server.strict import Open

Needs = dict[str, tuple[str, ...]]  # type of a tool -> the fields that it needs

NEEDS_IN_NAMESPACE: Needs = {"function": ("name",), "custom": ("name",)}
NEEDS: Needs = {**NEEDS_IN_NAMESPACE, "namespace": ("name", "tools")}


class Called(NamedTuple):
    """How the client knows a function."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def function(self) -> str:
        """The name of the function in the chat request."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class ToolFormat(Open):
    type: str = Field("text", max_length=64)
    syntax: str | None = Field(None, max_length=64)
    definition: str | None = None


class FunctionTool(Typed):
    """A function or a custom tool."""

    kind = "a tool"
    needs = NEEDS_IN_NAMESPACE

    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None

    def as_function(self, name: str, introduction: str | None) -> dict[str, Any]:
        """Returns the function of a chat request. `introduction`: a text before its description."""
        found = {"strict": self.strict, "parameters": self.parameters}
        if self.type == "custom":
            text = {"type": "string", **self._described_format()}
            found = {"parameters": {"type": "object", "properties": {"input": text}, "required": ["input"]}}
        texts = [text for text in (introduction, self.description) if text]
        function = {"name": name, "description": "\n\n".join(texts) or None, **found}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}

    def _described_format(self) -> dict[str, str]:
        if self.format is None or self.format.definition is None:
            return {}
        notice(f"the format of the custom tool {self.name} is described to the model, but not enforced")
        return {"description": f"a text that follows this {self.format.syntax} grammar:\n{self.format.definition}"}


class Tool(FunctionTool):
    needs = NEEDS

    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None  # of a namespace

    def functions(self) -> Iterator[tuple[Called, dict[str, Any]]]:
        """Yields each function: how the client knows it, and its form in a chat request."""
        namespace = self.name if self.type == "namespace" else None
        introduction = self.description if namespace else None
        for tool in [self] if namespace is None else self.tools or ():
            called = Called(tool.name or "", namespace, tool.type == "custom")
            yield called, tool.as_function(called.function, introduction)
            introduction = None  # the first tool introduces the namespace


def _supported(value: Any) -> Any:
    """Returns the list without the tools that this server does not have. Raises ValueError for too many tools."""
    if not isinstance(value, list):
        return value
    inner = [tool["tools"] for tool in value if isinstance(tool, dict) and isinstance(tool.get("tools"), list)]
    if (count := len(value) + sum(map(len, inner))) > MAX_TOOLS:
        raise ValueError(f"it has {count:,} tools, with those of its namespaces; the limit is {MAX_TOOLS}")
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value]
    dropped = [isinstance(kind, str) and kind not in NEEDS for kind in kinds]
    if names := sorted({str(kind)[:64] for kind, drop in zip(kinds, dropped, strict=True) if drop}):
        notice(f"ignored tools of the types {', '.join(names)}: this server has function, custom and namespace tools")
    return [tool for tool, drop in zip(value, dropped, strict=True) if not drop]


Tools = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_supported)]


class ToolChoice(Open):
    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = Field(None, max_length=256)
    namespace: str | None = Field(None, max_length=256)
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _names_tools(self) -> ToolChoice:
        if (self.tools if self.type == "allowed_tools" else self.name) is None:
            raise ValueError(f"the type {self.type} needs {'tools' if self.type == 'allowed_tools' else 'a name'}")
        return self

    def allows(self, called: Called) -> bool:
        """Returns whether the model may call this function."""
        return any(
            tool.get("name") == called.namespace if tool.get("type") == "namespace"
            else (tool.get("name"), tool.get("namespace")) == (called.name, called.namespace)
            for tool in self.tools or ()
        )


def functions(tools: Sequence[Tool]) -> dict[Called, dict[str, Any]]:
    """Returns the functions of a chat request. Raises ApiError 400 if two of them have the same name."""
    found: dict[str, tuple[Called, dict[str, Any]]] = {}
    for called, function in (each for tool in tools for each in tool.functions()):
        if called.function in found:
            raise ApiError(400, f"tools: two tools have the name {called.function[:128]!r}", "tools")
        found[called.function] = called, function
    return dict(found.values())


def as_arguments(text: str) -> str:
    """Returns the input of a custom tool as the arguments of its function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """Returns the input of a custom tool from the arguments of its function. They may be cut at the length limit."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
