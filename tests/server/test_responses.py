"""OpenAI's Responses API: the wire format, the store, and the official clients openai and openai-agents."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal

import pytest

from minitui.server.settings import Role
from tests.support.events import events_of
from tests.support.serving import Running

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

from minitui.server.errors import ApiError
from minitui.server.responses.store import ResponseStore

URL = "/v1/responses"
QUESTION = "What is the KV cache?"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"kind": {"enum": ["free", "cached"]}}, "required": ["kind"],
                          "additionalProperties": False}  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "name": "count_blocks", "parameters": SCHEMA, "strict": True}
CALL = '<tool_call>\n{"name": "count_blocks", "arguments": {"kind": "free"}}\n</tool_call>'
ALL_KINDS = {"guided_choice": [f"<think>\nhmm\n</think>\n\nOK.{CALL}"], "tools": [TOOL], "input": "go"}


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    answer = server.post(URL, {"input": QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(response: dict[str, Any]) -> str:
    return "".join(p["text"] for item in response["output"] if item["type"] == "message" for p in item["content"])


def shapes(response: dict[str, Any]) -> list[Any]:
    """The output without its random ids."""
    return json.loads(re.sub(r'"(?:msg|rs|fc|call)_[0-9a-f]+"', '"id"', json.dumps(response["output"])))


# ---- the wire format


def test_a_response_has_the_text_the_settings_and_the_usage(server: Running) -> None:
    response = ask(server, instructions="Be short.", metadata={"a": "b"}, max_output_tokens=200, temperature=0)
    assert response["id"].startswith("resp_") and response["object"] == "response"
    assert (response["status"], response["model"], response["incomplete_details"]) == ("completed", "tutor", None)
    assert response["instructions"] == "Be short." and response["metadata"] == {"a": "b"}
    assert response["text"] == {"format": {"type": "text"}} and response["tools"] == []
    [message] = response["output"]
    assert message["role"] == "assistant" and message["status"] == "completed" and len(text_of(response)) > 20
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again = ask(server, instructions="Be short.", max_output_tokens=200, temperature=0)
    assert text_of(again) == text_of(response)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 16


def test_a_reply_cut_by_its_length_is_incomplete(server: Running) -> None:
    response = ask(server, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete" and response["usage"]["output_tokens"] == 3
    last = events_of(server.post(URL, {"input": QUESTION, "max_output_tokens": 3, "stream": True}).text)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"


def test_a_stream_has_all_events_in_order_with_numbers(server: Running) -> None:
    whole = ask(server, **ALL_KINDS)
    events = events_of(server.post(URL, {**ALL_KINDS, "stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    order = []
    for event in events:  # repeated deltas count once
        if not order or order[-1] != event["type"]:
            order.append(event["type"])
    begin, end = "response.output_item.added", "response.output_item.done"
    part = ("response.content_part.added", "response.content_part.done")
    assert order == [
        "response.created", "response.in_progress",
        begin, part[0], "response.reasoning_text.delta", "response.reasoning_text.done", part[1], end,
        begin, part[0], "response.output_text.delta", "response.output_text.done", part[1], end,
        begin, "response.function_call_arguments.delta", "response.function_call_arguments.done", end,
        "response.completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert shapes(final) == shapes(whole) and final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert [event["item"] for event in events if event["type"] == end] == final["output"]
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        done = next(e for e in own if e["type"].endswith(("text.done", "arguments.done")))
        written = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert written == done.get("text", done.get("arguments")) != ""
    assert server.get(f"{URL}/{final['id']}").json() == final


def test_reasoning_text_and_calls_are_items_and_can_be_sent_back(server: Running) -> None:
    first = ask(server, **ALL_KINDS)
    reasoning, message, call = first["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"].strip()) == ("reasoning", "hmm")
    assert (message["content"][0]["text"], call["name"]) == ("OK.", "count_blocks")
    assert json.loads(call["arguments"]) == {"kind": "free"}
    tokens = server.post("/tokenize", {"prompt": "<think>\nhmm\n</think>"}).json()["count"]
    assert first["usage"]["output_tokens_details"]["reasoning_tokens"] == tokens
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "17"}
    said = {"role": "user", "content": "go"}
    sent = ask(server, input=[said, *first["output"], result], tools=[TOOL], temperature=0)
    stored = ask(server, input=[result], previous_response_id=first["id"], tools=[TOOL], temperature=0)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    referred = ask(server, input=[said, *references, result], tools=[TOOL], temperature=0)
    assert text_of(sent) == text_of(stored) == text_of(referred) != ""
    assert sent["usage"]["input_tokens"] == stored["usage"]["input_tokens"] == referred["usage"]["input_tokens"]


def test_a_conversation_reaches_the_model_as_chat_messages() -> None:
    from minitui.server.responses.schema import InputItem, messages

    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages("Be short.", [InputItem.model_validate(item).plain() for item in items]) == [
        {"role": "system", "content": "Be short.\n\nBe kind."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ]


def test_only_allowed_tools_are_called_and_one_at_most_without_parallel_calls(server: Running) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "count_blocks"}]}
    tools = [TOOL, {**TOOL, "name": "other"}]
    [call] = ask(server, tools=tools, tool_choice=allowed, temperature=1.0)["output"]
    assert call["name"] == "count_blocks"
    two = {"guided_choice": [f"{CALL}\n{CALL}"], "tools": [TOOL]}
    assert len(ask(server, **two)["output"]) == 2 and len(ask(server, **two, parallel_tool_calls=False)["output"]) == 1


# ---- stored responses


def test_a_response_is_continued_read_and_deleted_by_its_id(server: Running) -> None:
    first = ask(server, temperature=0)
    second = ask(server, input="What is prefill?", previous_response_id=first["id"], instructions="Be short.")
    assert second["previous_response_id"] == first["id"]
    third = ask(server, input="And paging?", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > first["usage"]["total_tokens"] + second["usage"]["output_tokens"]
    assert server.get(f"{URL}/{first['id']}").json() == first
    dropped = server.http.delete(f"{URL}/{first['id']}").json()
    assert dropped == {"id": first["id"], "object": "response", "deleted": True}
    for answer in (server.get(f"{URL}/{first['id']}"), server.http.delete(f"{URL}/{first['id']}")):
        assert answer.status_code == 404 and "was deleted" in answer.json()["error"]["message"]
    assert ask(server, input="Go on.", previous_response_id=second["id"], max_output_tokens=1)  # it has its own copy


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_stored_cannot_be_continued(server: Running, stream: bool) -> None:
    answer = server.post(URL, {"input": QUESTION, "store": False, "max_output_tokens": 2, "stream": stream})
    response = events_of(answer.text)[-1]["response"] if stream else answer.json()
    assert response["store"] is False
    refused = server.post(URL, {"input": "x", "previous_response_id": response["id"]})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def response_of(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "text": text}]}


def test_the_store_is_bounded_by_count_and_drops_what_was_not_used_for_longest() -> None:
    store = ResponseStore(3, 1 << 20)
    for name in "abc":
        store.add(response_of(name), [{"said": name}])
    assert store.history("a") == [{"said": "a"}, {"id": "msg_a", "text": ""}]
    store.add(response_of("d"), [])
    with pytest.raises(ApiError, match="the last 3 responses") as caught:
        store.history("b")
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    with pytest.raises(ApiError, match="item 'msg_b'"):
        store.item("msg_b")
    assert [store.response(name)["id"] for name in "acd"] == ["a", "c", "d"] and store.item("msg_c")["id"] == "msg_c"


def test_the_store_is_bounded_by_bytes() -> None:
    store = ResponseStore(1000, 10_000)
    for number in range(100):
        store.add(response_of(str(number), "x" * 1000), [{"said": "y" * 500}])
        assert 0 < store.used <= 10_000
    assert len(store) == 10_000 // (store.used // len(store))
    store.add(response_of("large", "x" * 10_000), [])  # larger than everything
    assert len(store) == store.used == 0
    store.add(response_of("a"), [])
    store.delete("a")
    assert len(store) == store.used == 0
    nothing = ResponseStore(0, 10_000)
    nothing.add(response_of("a"), [])
    assert len(nothing) == nothing.used == 0


def test_a_watcher_may_not_read_what_others_have_asked(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    response = ask(server, max_output_tokens=1)
    keys = {"the-key-to-watch": Role.WATCH, "the-key-to-chat": Role.CHAT}
    monkeypatch.setattr(server.service, "settings", dataclasses.replace(server.service.settings, keys=keys))
    for key, status in (("the-key-to-watch", 403), ("the-key-to-chat", 200), ("nothing-known", 401)):
        answer = server.get(f"{URL}/{response['id']}", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status


# ---- errors


def test_an_error_in_mid_stream_is_an_error_and_a_failed_response(server: Running, monkeypatch: Any) -> None:
    limited = dataclasses.replace(server.service.settings, request_s=0.3)
    monkeypatch.setattr(server.service, "settings", limited)
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 3000, "ignore_eos": True}
    events = events_of(server.post(URL, body).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error, failed = events[-2:]
    assert error["type"] == "error" and "longer than 0.3 s" in error["message"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert server.get(f"{URL}/{failed['response']['id']}").status_code == 404
    server.wait_idle()


def test_a_dropped_stream_frees_its_blocks_and_is_not_stored(server: Running) -> None:
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 3000, "ignore_eos": True}
    with server.http.stream("POST", URL, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        name = json.loads(next(lines).partition(": ")[2])["response"]["id"]
        server.wait_until(lambda: server.snapshot()["requests"])
    server.wait_idle()
    assert server.get(f"{URL}/{name}").status_code == 404


# ---- the official clients


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30)


def test_the_openai_client_accepts_every_field(client: Any, server: Running) -> None:
    from openai.types.responses import Response

    chosen = {"type": "function", "name": "count_blocks"}
    for fields in ({}, ALL_KINDS, {"tools": [TOOL], "tool_choice": chosen, "temperature": 1.0}):
        Response.model_validate(ask(server, **fields))  # `client` itself would accept anything
    assert client.responses.retrieve(ask(server)["id"]).output_text
    with pytest.raises(Exception, match="no stored response"):
        client.responses.retrieve("resp_0")


def test_the_openai_client_streams(client: Any) -> None:
    options: Any = {"model": "tutor", "input": QUESTION, "temperature": 0}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text and deltas
    following = client.responses.create(model="tutor", input="Why?", previous_response_id=whole.id, store=False)
    assert following.usage.input_tokens > whole.usage.total_tokens


def test_the_openai_client_fills_a_model_of_pydantic(client: Any) -> None:
    from pydantic import BaseModel, ConfigDict

    class Count(BaseModel):
        model_config = ConfigDict(extra="forbid")
        kind: Literal["free", "cached"]

    answer = client.responses.parse(model="tutor", input=QUESTION, text_format=Count, temperature=1.0)
    assert isinstance(answer.output_parsed, Count)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_runs_an_agent_with_a_tool(server: Running, stream: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    asked: list[str] = []

    @agents.function_tool
    def count_blocks(kind: Literal["free", "cached"]) -> str:
        """How many blocks there are of a kind."""
        asked.append(kind)
        return "17"

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        model = agents.OpenAIResponsesModel(model="tutor", openai_client=client)
        agent = agents.Agent(
            name="Counter", instructions="Count.", tools=[count_blocks], model=model,
            model_settings=agents.ModelSettings(tool_choice="required", temperature=1.0, max_tokens=200),
        )  # fmt: skip
        config = agents.RunConfig(tracing_disabled=True)
        if stream:
            result = agents.Runner.run_streamed(agent, QUESTION, run_config=config)
            kinds = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in kinds
        else:
            result = await agents.Runner.run(agent, QUESTION, run_config=config)
    assert asked[0] in ("free", "cached") and result.final_output
