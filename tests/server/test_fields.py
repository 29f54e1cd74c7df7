"""The fields that vLLM's, SGLang's and older OpenAI clients send: each is obeyed or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minitui.server import notices
from minitui.server.messages.schema import MessagesRequest
from minitui.server.openai.chat_schema import ChatRequest
from minitui.server.openai.text_schema import CompletionRequest
from minitui.server.responses.schema import ResponsesRequest
from tests.support.server.events import chunks_of
from tests.support.server.serving import Running, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"role": "user", "content": "What is the KV cache?"}
PROMPT = "<|im_start|>user\nWhat is the KV cache?<|im_end|>\n<|im_start|>assistant\n"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}}
    for name in ("first", "second")]


@pytest.fixture(autouse=True)
def idle(server: Running) -> Iterator[None]:
    yield
    server.wait_idle()


def chat(server: Running, **fields: Any) -> Any:
    return server.answer(CHAT, {"messages": [QUESTION], "max_tokens": 12, "temperature": 0, **fields})


def text(server: Running, **fields: Any) -> Any:
    return server.answer(TEXT, {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields})


def streamed(server: Running, path: str, **fields: Any) -> list[Any]:
    start = {"messages": [QUESTION]} if path == CHAT else {"prompt": PROMPT}
    answer = server.post(path, {**start, "max_tokens": 8, "temperature": 0, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return chunks_of(answer.text)


def content(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


def ids_of(server: Running, words: str) -> list[int]:
    return server.post("/tokenize", {"prompt": words, "add_special_tokens": False}).json()["tokens"]


# ---- unknown fields


SPELLINGS = {  # path -> (a request, with a field that this server does not know; the name in the error)
    CHAT: ({"messages": [QUESTION], "temprature": 1}, "temprature (did you mean temperature?)"),
    TEXT: ({"prompt": "x", "max_token": 1}, "max_token (did you mean max_tokens?)"),
    "/v1/responses": ({"input": "x", "instruction": "y"}, "instruction (did you mean instructions?)"),
    "/v1/messages": ({"messages": [QUESTION], "max_tokens": 1, "sytem": "y"}, "sytem (did you mean system?)"),
    "/v1/messages/count_tokens": ({"messages": [QUESTION], "colour": "red"}, "colour"),
    "/generate": ({"prompt": "x", "seeds": 1}, "seeds (did you mean seed?)"),
    "/tokenize": ({"prompt": "x", "colour": "red"}, "colour"), "/detokenize": ({"tokens": [5], "colour": 1}, "colour"),
}


@pytest.mark.parametrize("path", SPELLINGS)
def test_an_unknown_field_is_refused(server: Running, path: str) -> None:
    body, name = SPELLINGS[path]
    assert f"unknown field {name}: leave it out" in server.answer(path, body, 400)["error"]["message"]
    assert server.post(path, {key: None if key in name else value for key, value in body.items()}).status_code == 200


@pytest.mark.parametrize(("path", "fields", "name"), [
    (CHAT, {"response_format": {"type": "json_object", "json_scheme": {}}}, "response_format.json_scheme"),
    (CHAT, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    (CHAT, {"tools": [{**TOOLS[0], "function": {"name": "f", "paramaters": {}}}]}, "tools.function.paramaters"),
    (CHAT, {"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ("/v1/responses", {"text": {"formats": {}}}, "text.formats"),
    ("/v1/messages", {"output_config": {"formatt": {}}}, "output_config.formatt"),
])
def test_so_is_one_in_a_part_that_shapes_the_reply(server: Running, path: str, fields: Any, name: str) -> None:
    start = {"input": "x"} if path == "/v1/responses" else {"messages": [QUESTION], "max_tokens": 1}
    error = server.post(path, {**start, **fields}).json()["error"]
    assert f"unknown field {name} (did you mean" in error["message"]


@pytest.mark.parametrize(("path", "name", "value", "default"), [
    (CHAT, "use_beam_search", True, False), (CHAT, "length_penalty", 0.5, 1.0), (TEXT, "best_of", 2, 1),
    (CHAT, "audio", {"voice": "x"}, None), (CHAT, "web_search_options", {"x": 1}, {}), (TEXT, "documents", [{}], []),
    ("/v1/messages", "compaction", {"type": "x"}, None), ("/v1/messages", "mcp_servers", [{"url": "x"}], []),
    ("/v1/responses", "context_management", [{"type": "compaction"}], []),
])
def test_what_would_change_the_reply_is_refused_unless_it_is_the_default(
    server: Running, path: str, name: str, value: Any, default: Any
) -> None:
    start = {TEXT: {"prompt": "x"}, "/v1/responses": {"input": "x", "max_output_tokens": 1}}.get(path)
    body = start or {"messages": [QUESTION], "max_tokens": 1}
    refused = server.post(path, {**body, name: value})
    assert refused.status_code == 400 and f"{name} is not supported: " in refused.json()["error"]["message"]
    assert server.post(path, {**body, name: default}).status_code == 200


DECIDED = {"openai": (3, 57), "anthropic": (2, 14)}  # the newest versions whose fields were looked at


def test_every_field_of_the_official_clients_has_its_decision() -> None:
    """Each field of these versions is obeyed, ignored or refused with its reason. A later version may have more."""
    for name, newest in DECIDED.items():
        installed = tuple(map(int, pytest.importorskip(name).__version__.split(".")[:2]))
        if installed > newest:
            pytest.skip(f"the new fields of {name} {installed} have no decision yet: they are refused as unknown")
    from anthropic.types import message_create_params as messages
    from anthropic.types.beta import message_create_params as beta
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import response_create_params as responses

    undecided = {"moderation"}  # refused as unknown: this server moderates nothing
    for request, params in (
        (ChatRequest, chats.CompletionCreateParamsBase), (CompletionRequest, completions.CompletionCreateParamsBase),
        (ResponsesRequest, responses.ResponseCreateParamsBase), (MessagesRequest, messages.MessageCreateParamsBase),
        (MessagesRequest, beta.MessageCreateParamsBase),
    ):
        known = {field.alias or name for name, field in request.model_fields.items()}
        decided = known | request.ignored | {*request.refused} | undecided
        assert params.__required_keys__ | params.__optional_keys__ <= decided, params


def test_the_operator_can_let_unknown_fields_be_ignored(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_logged", set())
    server.set(monkeypatch, ignore_unknown_fields=True)
    body = {"messages": [QUESTION], "max_tokens": 2, "colour": 1, "a\x1b[31m\r\nb": 1}
    expected = "ignored unknown fields colour, a?[31m??b"
    for _ in range(2):
        answer = server.post(CHAT, body)
        assert (answer.status_code, answer.headers["X-Minitui-Warning"]) == (200, expected)
    logged = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert logged == [f"notice to a caller: {expected}"]
    blank = server.post("/tokenize", {"prompt": "x", "": 1, " ": 2, "y ": 3, f"{'z' * 63} z": 4})
    assert blank.headers["X-Minitui-Warning"] == f'ignored unknown fields "", y, {"z" * 63}'
    assert server.post(CHAT, {**body, "use_beam_search": True}).status_code == 400


def test_a_body_full_of_unknown_fields_costs_little_and_fills_no_log(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_logged", set())
    monkeypatch.setattr(notices, "MAX_LOGGED", 3)
    tools = [{**TOOLS[0], **{f"f{number}": 1 for number in range(90)}}] * 12
    body = {"messages": [QUESTION], "tools": tools, "max_tokens": 1}
    refused = server.post(CHAT, body).json()["error"]["message"]
    assert len(refused) < 400 and ", ..." in refused
    server.set(monkeypatch, ignore_unknown_fields=True)
    for number in range(6):
        answer = server.post(CHAT, {**body, f"g{number}": 1, f"{'x' * 300}{number}": 1})
        assert answer.status_code == 200
        assert len(answer.headers["X-Minitui-Warning"]) < 400 and ", ..." in answer.headers["X-Minitui-Warning"]
    assert len([r for r in caplog.records if "ignored" in r.getMessage()]) <= 3


@pytest.mark.parametrize(("body", "param"), [
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
    ({"messages": [QUESTION], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"messages": [QUESTION], "stop": [5]}, "stop"),
    ({"messages": [QUESTION], "logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"messages": [QUESTION], "structured_outputs": {"choice": [5]}}, "structured_outputs.choice.0"),
    ({"messages": [QUESTION], "function_call": {}}, "function_call"),
])
def test_an_error_names_the_field_as_the_caller_spells_it(server: Running, body: Any, param: str) -> None:
    error = server.post(CHAT, body).json()["error"]
    assert error["param"] == param or error["param"].startswith(param + "."), error
    assert "[" not in error["param"] and "constrained" not in error["param"]


def test_a_list_of_too_many_prompts_and_a_body_that_is_no_object_are_told_as_such(server: Running) -> None:
    error = server.post(TEXT, {"prompt": ["a"] * 300}).json()["error"]
    assert re.fullmatch(r"prompt: list should have at most \d+ items, not .*", error["message"]), error
    assert server.post(TEXT, []).json()["error"]["message"] == "the body: input should be a JSON object"


# ---- the prompt


def test_echo_with_logprobs_scores_the_prompt(server: Running) -> None:
    """The requests of lm-eval's loglikelihood: token ids, echo, one logprob, and no reply or a reply of one token."""
    words = "The KV cache holds the keys"
    whole = ids_of(server, words)
    longer = text(server, prompt=whole, max_tokens=1, echo=True, logprobs=1)["choices"][0]
    only = text(server, prompt=[whole, whole[:4]], max_tokens=0, echo=True, logprobs=1)
    scores = only["choices"][0]["logprobs"]
    assert only["choices"][0]["text"] == words
    assert only["usage"]["completion_tokens"] == 0 and only["choices"][0]["finish_reason"] == "length"
    assert "".join(scores["tokens"]) == only["choices"][0]["text"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(score <= 0 for score in scores["token_logprobs"][1:])
    assert len(longer["logprobs"]["tokens"]) == len(whole) + 1
    for own, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
        assert own <= max(top.values())
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert only["choices"][0]["text"][offset:].startswith(token)
    # The end of a text has the same score whether it is a part of the prompt or drawn.
    for name in ("token_logprobs", "tokens", "text_offset"):
        assert longer["logprobs"][name][:-1] == pytest.approx(scores[name])
        assert only["choices"][1]["logprobs"][name] == pytest.approx(scores[name][:4])
    drawn = text(server, prompt=whole, max_tokens=1, logprobs=1)["choices"][0]
    assert longer["text"] == words + drawn["text"]
    score = drawn["logprobs"]["token_logprobs"][0]  # drawn in a step of another size
    assert longer["logprobs"]["token_logprobs"][-1] == pytest.approx(score, abs=1e-5)


def test_prompt_logprobs_have_vllms_form(server: Running) -> None:
    ids = ids_of(server, PROMPT)
    completion = text(server, prompt=ids, prompt_logprobs=2, max_tokens=0)["choices"][0]["prompt_logprobs"]
    assert completion[0] is None and len(completion) == len(ids)
    for token, entry in zip(ids[1:], completion[1:], strict=True):
        own = entry[str(token)]
        assert set(own) == {"logprob", "rank", "decoded_token"} and 2 <= len(entry) <= 3
        assert sorted(found["rank"] for found in entry.values())[:2] == [1, 2]
    echoed = text(server, prompt=ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"]
    own = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], completion[1:], strict=True)]
    assert own == pytest.approx(echoed[1:])
    asked = server.post("/tokenize", {"messages": [QUESTION]}).json()["tokens"]
    assert len(chat(server, prompt_logprobs=0)["prompt_logprobs"]) == len(asked)


def test_token_ids_are_returned(server: Running) -> None:
    asked = server.post("/tokenize", {"messages": [QUESTION]}).json()["tokens"]
    whole = chat(server, return_token_ids=True)
    drawn = whole["choices"][0]["token_ids"]
    assert whole["prompt_token_ids"] == asked and len(drawn) == 12
    assert server.post("/detokenize", {"tokens": drawn}).json()["prompt"] == content(whole)
    chunks = streamed(server, CHAT, return_token_ids=True, max_tokens=12)
    assert chunks[0]["prompt_token_ids"] == asked
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == drawn
    plain = text(server, return_token_ids=True)["choices"][0]
    pieces = [chunk["choices"][0] for chunk in streamed(server, TEXT, return_token_ids=True)]
    assert plain["prompt_token_ids"] == pieces[0]["prompt_token_ids"] == ids_of(server, PROMPT)
    assert [i for piece in pieces for i in piece.get("token_ids", ())] == plain["token_ids"]
    assert "token_ids" not in chat(server)["choices"][0]


def test_a_prompt_is_cut_to_its_last_tokens(server: Running) -> None:
    ids = ids_of(server, PROMPT)
    kept = text(server, truncate_prompt_tokens=5, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert kept == ids[-5:]
    assert text(server, prompt=ids, truncate_prompt_tokens=5, echo=True)["usage"]["prompt_tokens"] == 5
    long = "radix " * 9000
    fitting = text(server, prompt=long, truncate_prompt_tokens=-1)["usage"]
    assert fitting["prompt_tokens"] == 4096 - 8 and fitting["completion_tokens"] == 8
    asked = chat(server, messages=[{"role": "user", "content": long}], truncate_prompt_tokens=100)
    assert asked["usage"]["prompt_tokens"] == 100


def test_a_reply_beyond_the_context_is_announced(server: Running) -> None:
    answer = server.post(TEXT, {"prompt": [5] * 4090, "max_tokens": 50, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 6
    warning = answer.headers["X-Minitui-Warning"]
    assert warning == "max_tokens is 50, but the context has room for 6: the reply may be cut"


def test_the_last_message_is_continued(server: Running) -> None:
    begun = [QUESTION, {"role": "assistant", "content": "The KV cache holds"}]
    answer = chat(server, messages=begun, continue_final_message=True, return_token_ids=True)
    prompt = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert prompt.endswith("assistant\nThe KV cache holds")
    again = text(server, prompt=prompt, max_tokens=12)
    assert content(answer) == again["choices"][0]["text"]
    ended = chat(server, messages=begun, add_generation_prompt=False, return_token_ids=True)
    prompt = server.post("/detokenize", {"tokens": ended["prompt_token_ids"]}).json()["prompt"]
    assert prompt.rstrip().endswith("holds<|im_end|>")
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    assert "exclude each other" in server.post(CHAT, both).json()["error"]["message"]
    empty = server.post(CHAT, {"messages": [{**QUESTION, "content": " "}], "continue_final_message": True})
    assert empty.status_code == 400 and empty.json()["error"]["param"] == "continue_final_message"


def test_a_chat_template_of_the_caller_needs_the_operators_permission(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [QUESTION], "max_tokens": 2, "return_token_ids": True,
            "chat_template": "{% for m in messages %}{{ m.content }}!{% endfor %}"}
    refused = server.post(CHAT, body).json()["error"]
    assert refused["param"] == "chat_template" and "--trust-request-chat-template" in refused["message"]
    server.set(monkeypatch, trust_request_template=True)
    answer = server.post(CHAT, body).json()
    shown = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert shown == QUESTION["content"] + "!"
    broken = server.post(CHAT, {**body, "chat_template": "{% for %}"}).json()["error"]
    assert broken["param"] == "chat_template" and "not a valid Jinja template" in broken["message"]


def test_messages_of_other_servers_are_read(server: Running) -> None:
    """Clients send back what other servers added to their messages."""
    parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    extras = {"id": "m1", "provider_specific_fields": {"a": 1}, "refusal": None, "reasoning": "Hmm."}
    call = {"id": "c", "type": "function", "function": {"name": "first", "arguments": "{}"}}
    messages = [
        QUESTION, {"role": "assistant", "content": None, **extras}, QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": None}, {"role": "user", "content": None},
        {**QUESTION, "content": parts},
    ]
    answer = server.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200 and "X-Minitui-Warning" not in answer.headers, answer.text


# ---- which tokens are drawn


def test_words_and_tokens_are_excluded(server: Running) -> None:
    free = content(chat(server, max_tokens=24))
    word = free.split()[1]
    calmed = chat(server, bad_words=[word], max_tokens=24)
    assert f" {word} " in f" {free} " and f" {word} " not in f" {content(calmed)} "
    yes, no = ids_of(server, " yes")[0], ids_of(server, " no")[0]
    answer = chat(server, allowed_token_ids=[yes, no], max_tokens=4, return_token_ids=True)
    assert set(answer["choices"][0]["token_ids"]) <= {yes, no} and len(answer["choices"][0]["token_ids"]) == 4


@pytest.mark.parametrize(("fields", "allowed"), [
    ({"structured_outputs": {"choice": ["left", "right"]}}, {"left", "right"}),
    ({"structured_outputs": {"regex": "[ab]{2}"}}, {"aa", "ab", "ba", "bb"}),
    ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"x", "y"}),
    ({"structured_outputs": {"json": {"enum": [1, 2]}}}, {"1", "2"}),
    ({"structured_outputs": {"json": '{"enum": [1, 2]}', "disable_any_whitespace": True}}, {"1", "2"}),
    ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ({"ebnf": 'root ::= "x" | "y"'}, {"x", "y"}),
    ({"regex": "[ab]"}, {"a", "b"}),
    ({"json_schema": '{"enum": [3]}'}, {"3"}),
    ({"guided_json": '{"enum": [3]}'}, {"3"}),
])
def test_every_spelling_of_a_constraint_is_obeyed(server: Running, fields: Any, allowed: set[str]) -> None:
    assert content(chat(server, temperature=1.5, **fields)) in allowed
    assert text(server, temperature=1.5, **fields)["choices"][0]["text"] in allowed


# ---- tools


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(server: Running, mode: str) -> None:
    named = [{"type": "function", "function": {"name": "second"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    answer = chat(server, tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=1.0)
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == (["second"] if mode == "required" else [])
    unknown = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
        {"type": "function", "function": {"name": "third"}}]}}
    error = server.post(CHAT, {"messages": [QUESTION], "tools": TOOLS, "tool_choice": unknown}).json()["error"]
    assert error["param"] == "tool_choice" and "'third'" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_in_the_older_form(server: Running, stream: bool) -> None:
    fields = {"functions": [tool["function"] for tool in TOOLS], "function_call": {"name": "second"}, "max_tokens": 60}
    if stream:
        choices = [chunk["choices"][0] for chunk in streamed(server, CHAT, **fields)]
        [called] = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
        reason = choices[-1]["finish_reason"]
    else:
        choice = chat(server, **fields)["choices"][0]
        called, reason = choice["message"]["function_call"], choice["finish_reason"]
        assert "tool_calls" not in choice["message"]
    assert called["name"] == "second" and json.loads(called["arguments"])["n"] in (1, 2) and reason == "function_call"
    messages = [QUESTION, {"role": "assistant", "content": None, "function_call": called},
                {"role": "function", "name": "second", "content": "17"}]
    assert content(chat(server, messages=messages, functions=fields["functions"]))


# ---- the answer


def test_reasoning_is_left_out_on_request(server: Running) -> None:
    pattern = "<think>\n[a-z]{3,9}\n</think>\n\n[A-Z][a-z]{2,5}\\."
    fields: dict[str, Any] = {"guided_regex": pattern, "max_tokens": 60, "temperature": 1.0}
    shown, hidden = chat(server, **fields), chat(server, include_reasoning=False, **fields)
    assert "reasoning_content" in shown["choices"][0]["message"]
    assert "reasoning_content" not in hidden["choices"][0]["message"] and content(hidden).endswith(".")
    chunks = streamed(server, CHAT, include_reasoning=False, **fields)
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_the_stop_reason_is_the_string_or_the_token(server: Running) -> None:
    free = chat(server, return_token_ids=True)["choices"][0]
    word, token = free["message"]["content"][8:12], free["token_ids"][4]
    assert free["stop_reason"] is None
    assert chat(server, stop=[word])["choices"][0]["stop_reason"] == word
    assert chat(server, stop_token_ids=[token])["choices"][0]["stop_reason"] == token
    for path in (CHAT, TEXT):
        choices = [chunk["choices"][0] for chunk in streamed(server, path, return_token_ids=True)]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        last = streamed(server, path, stop_token_ids=[ids[3]])[-1]["choices"][0]
        assert last["finish_reason"] == "stop" and last["stop_reason"] == ids[3]


def test_the_request_id_is_the_callers_or_a_new_one(server: Running) -> None:
    own = server.post("/tokenize", {"prompt": "x"}, headers={"X-Request-Id": "abc-123"})
    assert own.headers.get_list("x-request-id") == ["abc-123"]
    made = {server.post("/tokenize", {"prompt": "x"}, headers=headers).headers["x-request-id"]
            for headers in ({}, {}, {"X-Request-Id": "two words"}, {"X-Request-Id": "x" * 200})}
    assert len(made) == 4 and all(len(one) == 32 for one in made)
    assert server.get("/nowhere", headers={"X-Request-Id": "e"}).headers["x-request-id"] == "e"
    assert "x-request-id" in server.post(CHAT, {"messages": [QUESTION], "max_tokens": 1, "stream": True}).headers


def test_the_model_has_several_names(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.set(monkeypatch, served_names=("tutor", "gpt-4o-mini"))
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["tutor", "gpt-4o-mini"]
    for asked, named in ((None, "tutor"), ("default", "tutor"), ("tutor", "tutor"), ("gpt-4o-mini", "gpt-4o-mini")):
        assert chat(server, model=asked, max_tokens=1)["model"] == named
    assert server.get("/v1/models/gpt-4o-mini").json()["id"] == "gpt-4o-mini"
    error = server.post(CHAT, {"messages": [QUESTION], "model": "gpt-4"}).json()["error"]
    assert error["code"] == "model_not_found" and "'tutor' and 'gpt-4o-mini'" in error["message"]
    server.set(monkeypatch, served_names=("",))  # as of `minitui serve --model`
    [card] = server.get("/v1/models").json()["data"]
    assert card["id"] == server.get("/server_info").json()["model"] == "model", "the name of its directory"


# ---- scheduling


def test_a_salt_separates_the_cached_prefixes(server: Running) -> None:
    messages = [{"role": "system", "content": "You explain paging, salt, blocks and prefixes in few words."}, QUESTION]

    def cached(**fields: Any) -> int:
        usage = chat(server, messages=messages, max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0 and cached(cache_salt="b") == 0 and cached() == 0
    assert cached(cache_salt="a") == cached(cache_salt="b") == cached() >= 16


def test_a_priority_needs_a_server_that_sorts_by_it(tmp_path: Path, server: Running) -> None:
    answer = server.post(TEXT, {"prompt": "x", "max_tokens": 1, "priority": 5})
    assert answer.status_code == 400 and "--scheduling-policy priority" in answer.json()["error"]["message"]
    with serving(tmp_path, engine={"scheduling_policy": "priority"}) as other:
        answer = other.post(TEXT, {"prompt": "x", "max_tokens": 1, "priority": 5})
        assert answer.status_code == 200 and "X-Minitui-Warning" not in answer.headers
