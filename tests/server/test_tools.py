"""Tools and schemas with nested models: the wire format, and the clients openai, instructor and pydantic-ai."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from minitui.server.openai.reply_parser import ForcedCallParser, Parts
from tests.support.server.events import chunks_of
from tests.support.server.serving import Running

CHAT = "/v1/chat/completions"
QUESTION: list[Any] = [{"role": "user", "content": "What is the KV cache?"}]
SHORT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}


class Block(pydantic.BaseModel):
    state: Literal["free", "cached"]
    users: Annotated[int, pydantic.Field(ge=0, le=9)]


class Pool(pydantic.BaseModel):
    """Report the pool's blocks."""

    blocks: Annotated[list[Block], pydantic.Field(min_length=1, max_length=2)]
    next: Pool | None = None


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    return server.answer(CHAT, {"messages": QUESTION, "max_tokens": 300, **fields})["choices"][0]


def fault(server: Running, **fields: Any) -> dict[str, Any]:
    return server.answer(CHAT, {"messages": QUESTION, "max_tokens": 4, **fields}, 400)["error"]


# ---- forced tools


@pytest.mark.parametrize("seed", range(3))
def test_tools_keep_their_definitions_apart_even_under_one_name(server: Running, seed: int) -> None:
    def holder(item: Any) -> Any:
        return {"type": "object", "properties": {"x": {"$ref": "#/$defs/Item"}}, "required": ["x"],
                "$defs": {"Item": item}}

    items = {"letters": {"enum": ["a", "b"]}, "digits": {"enum": [1, 2]}}
    tools = [tool(name, holder(item)) for name, item in items.items()]
    choice = ask(server, tools=tools, tool_choice="required", temperature=5, seed=seed)
    function = choice["message"]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"])["x"] in items[function["name"]]["enum"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_cut_at_the_limit_is_a_call_with_the_arguments_so_far(server: Running, stream: bool) -> None:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "minLength": 500}}, "required": ["text"]}
    named = {"type": "function", "function": {"name": "say"}}
    fields = {"tools": [tool("say", parameters), tool("nod", SHORT)], "tool_choice": named, "max_tokens": 40}
    if stream:
        answer = server.post(CHAT, {"messages": QUESTION, "stream": True, **fields})
        events = chunks_of(answer.text)
        [call] = [call for e in events for call in e["choices"][0]["delta"].get("tool_calls", ())]
        finish = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = ask(server, **fields)
        assert choice["message"]["content"] is None
        [call], finish = choice["message"]["tool_calls"], choice["finish_reason"]
    assert finish == "length" and call["function"]["name"] == "say"
    assert call["function"]["arguments"].startswith('{"text": "') and len(call["function"]["arguments"]) > 15


@pytest.mark.parametrize(("written", "name", "arguments"), [
    ('{"name": "f", "arguments": {"a": 1}}', "f", '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": [1, "x', "f", '{"a": [1, "x'),
    ('{"name": "f", "argu', "f", ""),
    ('{"na', "g", ""),
    ("", "g", ""),
])
def test_what_is_there_of_a_forced_call(written: str, name: str, arguments: str) -> None:
    def call(tools: list[Any]) -> Any:
        parser = ForcedCallParser(tools)
        assert parser.push(written) == Parts()
        return parser.flush()

    [found] = call([tool("g", {})]).calls
    assert (found["function"]["name"], found["function"]["arguments"]) == (name, arguments)
    several = call([tool("g", {}), tool("h", {})])
    assert not several.content
    assert [c["function"]["name"] for c in several.calls] == ([name] if name == "f" else [])


def test_a_tool_without_parameters_is_called_without_arguments(server: Running) -> None:
    choice = ask(server, tools=[{"type": "function", "function": {"name": "now"}}], tool_choice="required")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_fault_in_a_tool_names_the_tools_and_the_property(server: Running) -> None:
    tags = {"type": "object", "properties": {"tags": {"items": {"type": "string"}, "uniqueItems": True}}}
    error = fault(server, tools=[tool("tag", tags)], tool_choice="required")
    assert error["param"] == "tools"
    assert error["message"].startswith("tools cannot be used as a grammar: arguments.tags: uniqueItems needs")


# ---- schemas of replies


@pytest.mark.parametrize("spelling", ["guided_json", "response_format", "tools"])
def test_every_spelling_is_written_on_one_line_with_declared_properties_only(server: Running, spelling: str) -> None:
    schema = {"type": "object", "properties": {"a": SHORT, "b": SHORT}, "required": ["a"]}
    fields: dict[str, Any] = {
        "guided_json": {"guided_json": schema},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "tools": {"tools": [tool("f", schema)], "tool_choice": "required"},
    }[spelling]
    for temperature in (0, 3):
        choice = ask(server, temperature=temperature, seed=1, **fields)
        message = choice["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if spelling == "tools" else message["content"]
        assert choice["finish_reason"] != "length"
        value = json.loads(text)
        assert text == json.dumps(value) and "a" in value and set(value) <= {"a", "b"}
        assert all(set(inner) == {"n"} for inner in value.values())


def test_an_option_opens_objects(server: Running) -> None:
    only_others = {"type": "object", "properties": {"a": False}, "minProperties": 1}
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": only_others}}}
    error = fault(server, **wanted)
    assert error["param"] == "response_format" and "no reply can satisfy it" in error["message"]
    assert ask(server, disable_additional_properties=False, max_tokens=4, **wanted)["finish_reason"] == "length"


# ---- clients


def test_openais_helpers_for_models(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    tools = [openai.pydantic_function_tool(Pool)]
    answer = client.chat.completions.parse(
        model="tutor", messages=QUESTION, tools=tools, tool_choice="required", max_tokens=300, temperature=1
    )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pool) and call.function.name == "Pool"
    answer = client.chat.completions.parse(
        model="tutor", messages=QUESTION, response_format=Pool, max_tokens=300, temperature=1
    )
    assert isinstance(answer.choices[0].message.parsed, Pool)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(server: Running, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed (extra 'clients')")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    pool = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
        model="tutor", messages=QUESTION, response_model=Pool, max_tokens=300, temperature=1, max_retries=0
    )
    assert isinstance(pool, Pool) and pool.blocks[0].state in ("free", "cached")


@pytest.mark.parametrize("output", ["tool", "several tools", "native"])
def test_pydantic_ai(server: Running, output: str) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed (extra 'clients')")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    wanted: Any = {"tool": Pool, "several tools": [Pool, Block], "native": ai.NativeOutput(Pool)}[output]
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="unused")
    agent = ai.Agent(OpenAIChatModel("tutor", provider=provider), output_type=wanted)
    found = agent.run_sync("What is the KV cache?", model_settings={"max_tokens": 300, "temperature": 1.0}).output
    assert isinstance(found, (Pool, Block))
