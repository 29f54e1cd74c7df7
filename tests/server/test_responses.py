"""OpenAI's Responses API: the wire format, the store, and the official client openai."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from minitui.server.errors import ApiError
from minitui.server.responses.schema import InputItem, messages
from minitui.server.responses.store import ResponseStore, StoredItem
from minitui.server.responses.tools import Tool, functions
from minitui.server.settings import Role
from tests.support.server.events import events_of
from tests.support.server.serving import Running
from tests.support.waiting import wait_until

URL = "/v1/responses"
QUESTION = "What is the KV cache?"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"kind": {"enum": ["free", "cached"]}}, "required": ["kind"],
                          "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "name": "count_blocks", "parameters": SCHEMA, "strict": True}
CALL = '<tool_call>\n{"name": "count_blocks", "arguments": {"kind": "free"}}\n</tool_call>'
ALL_KINDS = {"guided_choice": [f"<think>\nhmm\n</think>\n\nOK.{CALL}"], "tools": [TOOL], "input": "go"}


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    return server.answer(URL, {"input": QUESTION, **fields})


def text_of(response: dict[str, Any]) -> str:
    return "".join(p["text"] for item in response["output"] if item["type"] == "message" for p in item["content"])


def shapes(response: dict[str, Any]) -> list[Any]:
    """The output without its random ids."""
    return json.loads(re.sub(r'"(?:msg|rs|fc|call)_[0-9a-f]+"', '"id"', json.dumps(response["output"])))


# ---- the wire format


@pytest.mark.parametrize(("sent", "is_"), [(5, "neither a string nor a list"), ([], "an empty list")])
def test_an_input_of_the_wrong_kind_is_told_both_that_are_accepted(server: Running, sent: Any, is_: str) -> None:
    error = server.post(URL, {"input": sent}).json()["error"]
    assert error["message"] == f"input: it is {is_}: send a string, or a list with at least one item"
    chat = server.post("/v1/chat/completions", {"messages": []}).json()["error"]
    assert chat["message"] == "messages: list should have at least 1 item, not 0"


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
    ]
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


def message_of(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "type": "message", "text": text}


def response_of(name: str, text: str = "", **more: Any) -> dict[str, Any]:
    return {"id": name, **more, "output": [message_of(f"msg_{name}", text)]}


def pack(name: str, text: str = "") -> StoredItem:
    return StoredItem.pack(message_of(name, text))


def test_the_store_is_bounded_by_count_and_drops_what_was_not_used_for_longest() -> None:
    store = ResponseStore(3, 1 << 20)
    for name in "abc":
        store.add(response_of(name), [pack(f"in_{name}")])
    assert [item.id for item in store.conversation("a")] == ["in_a", "msg_a"]
    store.add(response_of("d"), [])
    with pytest.raises(ApiError, match="the key's last 3 responses") as caught:
        store.conversation("b")
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    for gone in ("msg_b", "in_b"):
        with pytest.raises(ApiError, match=f"item '{gone}'"):
            store.item(gone)
    assert [json.loads(store.response(name))["id"] for name in "acd"] == ["a", "c", "d"]
    assert store.item("msg_c").plain() == message_of("msg_c") and store.item("in_c").id == "in_c"


def test_the_store_is_bounded_by_bytes() -> None:
    store = ResponseStore(1000, 10_000)
    for number in range(100):
        store.add(response_of(str(number), "x" * 1000), [pack("", "y" * 500)])
        assert 0 < store.used <= 10_000
    count = len(store)
    assert count == 10_000 // (store.used // count)
    store.add(response_of("large", "x" * 10_000), [])  # larger than everything
    assert len(store) == count, "a response that is not kept pushed out others"
    for number in range(100 - count, 100):
        store.delete(str(number))
    assert len(store) == store.used == 0
    nothing = ResponseStore(0, 10_000)
    nothing.add(response_of("a"), [])
    assert len(nothing) == nothing.used == 0


def test_the_items_before_a_response_are_listed_in_pages(server: Running) -> None:
    said = [{"role": role, "content": text} for role, text in (("developer", "Be kind."), ("user", "a"), ("user", "b"))]
    first = ask(server, input=said, max_output_tokens=1)
    second = ask(server, input="c", previous_response_id=first["id"], max_output_tokens=1)
    url = f"{URL}/{second['id']}/input_items"
    page = server.get(url).json()
    assert (page["object"], page["has_more"], len(page["data"])) == ("list", False, 5)
    assert page["data"][0]["content"][0]["text"] == "c" and page["data"][1] == first["output"][0]
    assert page["first_id"] == page["data"][0]["id"] and page["last_id"] == page["data"][-1]["id"]
    upwards = server.get(url, params={"order": "asc", "limit": 2}).json()
    assert upwards["has_more"] and upwards["data"] == page["data"][:2:-1]
    rest = server.get(url, params={"order": "asc", "after": upwards["last_id"]}).json()
    assert rest["data"] == page["data"][2::-1]
    again = ask(server, input=[{"type": "item_reference", "id": page["first_id"]}] * 3, max_output_tokens=1)
    once = server.get(f"{URL}/{again['id']}/input_items", params={"limit": 1}).json()
    assert once["data"] == page["data"][:1] and not once["has_more"]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_0"}):
        assert server.get(url, params=wrong).status_code == 400


def test_a_response_belongs_to_the_key_that_made_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"the-key-to-watch": Role.WATCH, "the-key-of-ann": Role.CHAT, "the-key-of-bob": Role.CHAT}
    server.set(monkeypatch, keys=keys, stored_responses=2)

    def send(key: str, method: str, path: str = "", **body: Any) -> Any:
        headers = {"Authorization": f"Bearer the-key-{key}"}
        return server.http.request(method, URL + path, headers=headers, json={"max_output_tokens": 1, **body})

    made = send("of-ann", "POST", input="x").json()
    path, item = f"/{made['id']}", made["output"][0]["id"]
    for _ in range(3):  # fills Bob's share, and only his
        assert send("of-bob", "POST", input="x").status_code == 200
    for method, where in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
        answers = {key: send(key, method, where).status_code for key in ("to-watch", "of-bob", "unknown")}
        assert answers == {"to-watch": 403, "of-bob": 404, "unknown": 401}
    chained, referring = {"input": "x", "previous_response_id": made["id"]}, {"type": "item_reference", "id": item}
    for body in (chained, {"input": [referring]}):
        assert send("of-bob", "POST", **body).status_code == 404
        assert send("of-ann", "POST", **body).status_code == 200
    assert send("of-ann", "DELETE", path).status_code == 404, "Ann has made two more, which is all that her share holds"


# ---- tools of other types than function

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes files.",
                         "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}}
NAMESPACE = {"type": "namespace", "name": "mcp__tiny", "description": "Small things.", "tools": [ADD, PATCH]}


def calling(name: str, arguments: Any) -> dict[str, Any]:
    """The fields of a request whose reply is this call."""
    call = json.dumps({"name": name, "arguments": arguments})
    return {"guided_choice": [f"<tool_call>\n{call}\n</tool_call>"], "input": "go"}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace_are_called_by_both_names(server: Running, stream: bool) -> None:
    body = {**calling("mcp__tiny__add", {"a": 1}), "tools": [TOOL, NAMESPACE], "stream": stream}
    answer = server.post(URL, body)
    response = events_of(answer.text)[-1]["response"] if stream else answer.json()
    [call] = response["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__tiny", "add")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    assert ask(server, input=[result], previous_response_id=response["id"], max_output_tokens=1)
    plain = ask(server, **calling("count_blocks", {}), tools=[TOOL, NAMESPACE])["output"][0]
    assert plain["name"] == "count_blocks" and "namespace" not in plain


def test_a_custom_tool_is_called_with_a_text(server: Running) -> None:
    body = {**calling("patch", {"input": 'a "b"\n'}), "tools": [PATCH], "stream": True}
    events = events_of(server.post(URL, body).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:-1] == ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
                           "output_item.done"]
    assert events[2]["item"]["input"] == "" and events[3]["delta"] == events[4]["input"] == 'a "b"\n'
    [call] = events[-1]["response"]["output"]
    assert call == events[5]["item"] and (call["type"], call["name"]) == ("custom_tool_call", "patch")
    assert call["input"] == 'a "b"\n' and call["id"].startswith("ctc_")
    chosen = {"type": "custom", "name": "patch"}
    forced = ask(server, tools=[PATCH, TOOL], tool_choice=chosen, temperature=0, max_output_tokens=200)
    assert forced["output"][0]["type"] == "custom_tool_call" and not forced["output"][0]["input"].startswith("{")


def test_the_model_reads_about_all_tools_and_earlier_calls() -> None:
    found = functions([Tool.model_validate(TOOL), Tool.model_validate(NAMESPACE)])
    described = {called.function: each["function"] for called, each in found.items()}
    assert list(described) == ["count_blocks", "mcp__tiny__add", "mcp__tiny__patch"]
    assert described["mcp__tiny__add"]["description"] == "Small things."
    assert described["mcp__tiny__patch"]["description"] == "Changes files."
    assert "lark grammar:\\nstart: WORD" in json.dumps(described["mcp__tiny__patch"]["parameters"])
    items: list[Any] = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "1", "namespace": "mcp__tiny", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "é"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "local_shell_call", "id": "3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "3", "output": "c"},
    ]
    said = messages(None, [InputItem.model_validate(item).plain() for item in items])
    calls = [message["tool_calls"][0]["function"] for message in said[::2]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("mcp__tiny__add", {}), ("patch", {"input": "é"}), ("local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    results = {message["tool_call_id"]: message["content"] for message in said[1::2]}
    assert results == {"1": "a", "2": "b", "3": "c"}


def test_allowed_tools_may_name_a_namespace(server: Running) -> None:
    options: dict[str, Any] = {"tools": [TOOL, NAMESPACE], "temperature": 1.0, "max_output_tokens": 60}
    for named in ({"type": "namespace", "name": "mcp__tiny"}, {**PATCH, "namespace": "mcp__tiny"}):
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [named, {"type": "web_search"}]}
        [call] = ask(server, tool_choice=allowed, **options)["output"]
        assert call["namespace"] == "mcp__tiny"


def test_what_other_servers_run_is_left_out_with_a_notice(server: Running) -> None:
    """The body is one of Codex, shortened."""
    said = {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Code."}]}
    items = [
        said, {**said, "role": "user"}, {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "compaction", "encrypted_content": "x"}, {**said, "role": "user"},
    ]
    body = {
        "input": items, "tools": [TOOL, NAMESPACE, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "none"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "1", "client_metadata": {"a": "b"},
        "max_output_tokens": 1,
    }
    answer = server.post(URL, body)
    assert answer.status_code == 200, answer.text
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function", "namespace"]
    left_out = "ignored input items of the types compaction, web_search_call; ignored tools of the types web_search"
    assert answer.headers["X-Minitui-Warning"].startswith(left_out)
    alone = server.post(URL, {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"})
    assert alone.status_code == 400 and "tool_choice needs tools" in alone.json()["error"]["message"]


# ---- errors


def test_an_error_in_mid_stream_is_an_error_and_a_failed_response(server: Running, monkeypatch: Any) -> None:
    server.set(monkeypatch, request_s=0.3)
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
        wait_until(lambda: server.snapshot()["requests"])
    server.wait_idle()
    assert server.get(f"{URL}/{name}").status_code == 404


# ---- the official clients


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=90)


def test_the_openai_client_accepts_every_field(client: Any, server: Running) -> None:
    chosen = {"type": "function", "name": "count_blocks"}
    others = {**calling("mcp__tiny__patch", {"input": "x"}), "tools": [NAMESPACE, PATCH]}
    for fields in ({}, ALL_KINDS, {"tools": [TOOL], "tool_choice": chosen, "temperature": 1.0}, others):
        Response.model_validate(ask(server, **fields))  # `client` itself would accept anything
    stored = ask(server)["id"]
    assert client.responses.retrieve(stored).output_text
    assert [item.content[0].text for item in client.responses.input_items.list(stored)] == [QUESTION]
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
