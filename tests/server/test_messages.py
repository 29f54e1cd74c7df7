"""Anthropic's Messages API: the wire format, and the official client anthropic."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import Message

from minitui.server.messages.schema import MessagesRequest
from minitui.server.settings import Role
from tests.support.server.events import events_of
from tests.support.server.serving import Running

URL = "/v1/messages"
QUESTION: list[Any] = [{"role": "user", "content": "What is the KV cache?"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"kind": {"enum": ["free", "cached"]}}, "required": ["kind"],
                          "additionalProperties": False}
TOOL: dict[str, Any] = {"name": "count_blocks", "description": "How many blocks there are.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "count_blocks", "arguments": {"kind": "free"}}\n</tool_call>'
ALL_KINDS = {"guided_choice": [f"<think>\nhmm\n</think>\n\nOK.{CALL}"], "tools": [TOOL]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "17"}
ASK: dict[str, Any] = {"model": "tutor", "messages": QUESTION, "max_tokens": 200}


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    return server.answer(URL, {**ASK, **fields})


# ---- the wire format


def test_a_message_has_text_stop_reason_and_usage_with_the_cached_tokens(server: Running) -> None:
    system = [{"type": "text", "text": "Be short and say what is cached.", "cache_control": {"type": "ephemeral"}}]
    first = ask(server, system=system, temperature=0)
    assert first["id"].startswith("msg_") and (first["type"], first["role"], first["model"]) == (
        "message", "assistant", "tutor")
    assert (first["stop_reason"], first["stop_sequence"]) == ("end_turn", None)
    [block] = first["content"]
    assert block["type"] == "text" and len(block["text"]) > 20
    again = ask(server, system=system[0]["text"], temperature=0)
    assert again["content"] == first["content"]
    usage = again["usage"]
    assert usage["cache_read_input_tokens"] >= 16 and usage["input_tokens"] > 0
    prompt = {**ASK, "system": system}
    del prompt["max_tokens"]
    counted = server.post(f"{URL}/count_tokens", prompt).json()
    assert counted == {"input_tokens": usage["cache_read_input_tokens"] + usage["input_tokens"]}


def test_each_stop_reason_is_reported(server: Running) -> None:
    text = ask(server, temperature=0)["content"][0]["text"]
    cut = ask(server, max_tokens=3, temperature=0)
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3
    word = text[10:14]
    stopped = ask(server, stop_sequences=["never said", word], temperature=0)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    assert stopped["content"][0]["text"] == text[: text.index(word)]
    assert ask(server, **ALL_KINDS)["stop_reason"] == "tool_use"


def test_the_reply_continues_the_assistants_last_message(server: Running) -> None:
    text = ask(server, temperature=0)["content"][0]["text"]
    start = text[: text.index(" ", 20)]
    messages = [*QUESTION, {"role": "assistant", "content": start}]
    assert start + ask(server, messages=messages, temperature=0)["content"][0]["text"] == text
    call = {"type": "tool_use", "id": "toolu_1", "name": "count_blocks", "input": {}}
    refused = server.post(URL, {**ASK, "messages": [*QUESTION, {"role": "assistant", "content": [call]}]})
    assert refused.status_code == 400 and "does not end with text" in refused.text


def test_a_stream_has_all_events_in_order_and_says_the_same(server: Running) -> None:
    whole = ask(server, **ALL_KINDS)
    events = events_of(server.post(URL, {**ASK, **ALL_KINDS, "stream": True}).text)
    order: list[str] = []
    for event in events:
        kind = event.get("delta", {}).get("type", event["type"])
        if not order or order[-1] != kind:
            order.append(kind)
    start, stop = "content_block_start", "content_block_stop"
    assert order == [
        "message_start", start, "thinking_delta", "signature_delta", stop, start, "text_delta", stop,
        start, "input_json_delta", stop, "message_delta", "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    *_, delta, _ = events
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for index, block in enumerate(whole["content"]):
        own = [event["delta"] for event in events if event.get("index") == index and "delta" in event]
        written = "".join(d.get("text", d.get("thinking", d.get("partial_json", ""))) for d in own)
        said = block.get("text") or block.get("thinking") or json.dumps(block["input"])
        assert written == said != ""


def test_thinking_text_and_calls_are_blocks_and_can_be_sent_back(server: Running) -> None:
    first = ask(server, **ALL_KINDS)
    thinking, text, call = first["content"]
    assert (thinking["thinking"].strip(), text["text"]) == ("hmm", "OK.")
    assert (call["name"], call["input"]) == ("count_blocks", {"kind": "free"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "17"}]}
    messages = [*QUESTION, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = ask(server, messages=messages, tools=[TOOL])
    assert second["content"][0]["text"]
    assert second["usage"]["cache_read_input_tokens"] > 100  # the tools and the question


def test_a_conversation_reaches_the_model_as_chat_messages() -> None:
    request = MessagesRequest.model_validate({
        "max_tokens": 5, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}], "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True},
                {"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        ], "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "count_blocks", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u" * 300},
    })
    fields = request.chat_fields()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert fields["messages"] == [
        {"role": "system", "content": "Be\n\nkind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: no"},
        {"role": "user", "content": "c\n\nd"},
    ]
    function = {"name": "count_blocks", "description": TOOL["description"], "parameters": SCHEMA}
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "count_blocks"}}
    assert fields["parallel_tool_calls"] is False and fields["user"] == "u" * 256


@pytest.mark.parametrize(("thinking", "effort"), [
    (None, "none"), ({"type": "disabled"}, "none"), ({"type": "enabled", "budget_tokens": 1024}, None),
    ({"type": "adaptive"}, None),
])
def test_a_model_thinks_only_if_asked_to(thinking: Any, effort: str | None) -> None:
    request = MessagesRequest.model_validate({**ASK, "thinking": thinking})
    assert request.chat_fields()["reasoning_effort"] == effort


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "count_blocks"}])
def test_a_demanded_call_is_made(server: Running, choice: Any) -> None:
    message = ask(server, tools=[TOOL], tool_choice=choice, temperature=1.0)
    [call] = message["content"]
    assert message["stop_reason"] == "tool_use" and call["input"]["kind"] in ("free", "cached")


def test_arguments_that_are_no_object_are_told_as_they_are(server: Running) -> None:
    written = '<tool_call>{"name": "count_blocks", "arguments": %s}</tool_call>'
    for arguments, told in (("[NaN]", {"arguments": [None]}), ('"free"', {"arguments": "free"})):
        [call] = ask(server, tools=[TOOL], guided_choice=[written % arguments])["content"]
        assert call["input"] == told


def test_a_schema_is_obeyed(server: Running) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    text = ask(server, output_config=config, temperature=1.0)["content"][0]["text"]
    assert json.loads(text)["kind"] in ("free", "cached")


# ---- keys and errors


def test_the_key_may_come_in_anthropics_header_and_errors_have_its_form(server: Running, monkeypatch: Any) -> None:
    keys = {"the-key-to-watch": Role.WATCH, "the-key-to-chat": Role.CHAT}
    server.set(monkeypatch, keys=keys)
    for path in (URL, f"{URL}/count_tokens"):
        body = ASK if path == URL else {"messages": QUESTION}
        for headers, status, kind in (
            ({}, 401, "authentication_error"), ({"x-api-key": "the-key-to-watch"}, 403, "permission_error"),
            ({"x-api-key": "the-key-to-chat"}, 200, ""), ({"Authorization": "Bearer the-key-to-chat"}, 200, ""),
        ):
            answer = server.post(path, body, headers=headers)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["type"] == kind
    server.set(monkeypatch, keys={})
    monkeypatch.setattr(server.service, "open", server.service.capacity)
    full = server.post(URL, ASK)
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    assert (full.json()["type"], full.json()["error"]["type"]) == ("error", "rate_limit_error")
    for answer, status, kind in (
        (server.get(URL), 405, "invalid_request_error"), (server.post(f"{URL}/nothing", {}), 404, "not_found_error"),
        (server.post(URL, {**ASK, "messages": "x" * (5 << 20)}), 413, "request_too_large"),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_an_error_in_mid_stream_is_an_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.set(monkeypatch, request_s=0.3)
    body = {**ASK, "stream": True, "max_tokens": 3000, "ignore_eos": True}
    last = events_of(server.post(URL, body).text)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
    assert "longer than 0.3 s" in last["error"]["message"]
    server.wait_idle()


# ---- the official client


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=90)


def test_the_anthropic_client_reads_messages_streams_and_counts(client: Any, server: Running) -> None:
    for fields in ({}, ALL_KINDS, {"max_tokens": 1}):
        Message.model_validate(ask(server, **fields))  # `client` itself would accept anything
    asked = {**ASK, "system": "Be short and say what is in the cache. " * 3}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        text = "".join(event.text for event in events if event.type == "text")
        final = stream.get_final_message()
        begun = events[0].message.usage
    assert text == final.content[0].text == whole.content[0].text and final.stop_reason == "end_turn"
    assert begun.cache_read_input_tokens == final.usage.cache_read_input_tokens > 0
    assert begun.input_tokens == final.usage.input_tokens
    assert final.usage.cache_read_input_tokens + final.usage.input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens)
    counted = client.messages.count_tokens(model="tutor", messages=QUESTION, system=asked["system"])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert [model.id for model in client.models.list()] == ["tutor"]


def test_errors_are_the_anthropic_clients_own(client: Any) -> None:
    for fields, kind, words in (
        ({"model": "claude"}, anthropic.NotFoundError, "there is no model 'claude'"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
    ):
        with pytest.raises(kind, match=words):
            client.messages.create(**{**ASK, **fields})


# ---- conversations that the client does not send whole


def test_the_tool_runners_send_the_whole_conversation_after_a_refused_thread(client: Any, server: Running) -> None:
    @anthropic.beta_tool
    def count_blocks(kind: Literal["free", "cached"]) -> str:
        """Count the blocks of the pool.

        Args:
            kind: free or cached.
        """
        asked.append(kind)
        return "17"

    asked: list[str] = []
    refused = server.metric("minitui_requests_refused_total")
    for stream in (False, True):
        runner = client.beta.messages.tool_runner(
            model="tutor", max_tokens=60, messages=QUESTION, tools=[count_blocks],
            tool_choice={"type": "any"}, max_iterations=2, stream=stream,
        )
        replies = [turn.get_final_message() if stream else turn for turn in runner]
        assert [reply.stop_reason for reply in replies] == ["tool_use"] * 2
        first, second = (reply.usage.input_tokens + reply.usage.cache_read_input_tokens for reply in replies)
        assert second > first + 10, "the second request had only the result of the tool"
    assert len(asked) >= 2
    assert server.metric("minitui_requests_refused_total") == refused + 2  # one for each runner


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("path", [URL, f"{URL}/count_tokens"])
def test_a_thread_is_refused_with_the_code_that_clients_know(server: Running, thread: Any, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": [RESULT]}], "thread": thread}
    answer = server.post(path, asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "send the whole conversation in messages" in error["message"]
    more = {"max_tokens": 2} if path == URL else {}
    assert server.post(path, {"messages": QUESTION, **more, "thread": None}).status_code == 200


def test_a_result_without_its_call_is_refused(server: Running) -> None:
    call = {"type": "tool_use", "id": "toolu_2", "name": "count_blocks", "input": {}}
    for before in ([], [{"role": "assistant", "content": [call]}]):
        messages = [*QUESTION, *before, {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]
        answer = server.post(URL, {**ASK, "messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            f"messages.{len(messages) - 1}.content.1: unexpected `tool_use_id` found in `tool_result` blocks: toolu_1. "
            "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
        )


@pytest.mark.parametrize("words", [4200, 60_000])
def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(server: Running, words: int) -> None:
    answer = server.post(URL, {**ASK, "messages": [{"role": "user", "content": "cache " * words}]})
    message = answer.json()["error"]["message"]
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert answer.status_code == 400 and found, message
    assert int(found[1]) > int(found[2]) == server.service.longest - 1
