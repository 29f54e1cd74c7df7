"""The clients litellm and langchain-openai, through `minitui proxy`: chat, streams, tools, structures, usage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from tests.support.server.serving import Running, through_proxy

WORDS = "What is the KV cache? Say what a block holds, when a block is shared and which blocks are evicted first."
QUESTION: list[Any] = [{"role": "user", "content": WORDS}]
FIELDS: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


class Block(pydantic.BaseModel):
    state: Literal["free", "cached"]
    users: Annotated[int, pydantic.Field(ge=0, le=9)]


class Pool(pydantic.BaseModel):
    """Report the pool's blocks."""

    blocks: Annotated[list[Block], pydantic.Field(min_length=1, max_length=2)]


TOOL = {
    "type": "function",
    "function": {"name": "Pool", "description": "Report the blocks.", "parameters": Pool.model_json_schema()},
}


def expected(server: Running) -> tuple[str, dict[str, Any]]:
    """Returns the server's own answer to QUESTION: its text and usage. Its prompt is in the cache afterwards."""
    answers = [server.post("/v1/chat/completions", {"messages": QUESTION, **FIELDS}).json() for _ in range(2)]
    return answers[1]["choices"][0]["message"]["content"], answers[1]["usage"]


@pytest.fixture
def url(server: Running, tmp_path: Path) -> Iterator[str]:
    with through_proxy(server, tmp_path / "log") as address:
        yield f"{address}/v1"


# ---- litellm


def litellm(url: str, monkeypatch: pytest.MonkeyPatch, provider: str) -> Any:
    """Returns litellm's `completion` for the server."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import downloads a list of prices
    module = pytest.importorskip("litellm", reason="litellm is not installed (extra 'clients')")

    def completion(**fields: Any) -> Any:
        given = {"messages": QUESTION, "api_key": "unused", "num_retries": 0, **fields}
        return module.completion(model=f"{provider}/tutor", api_base=url, **given)

    return completion


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_answers_and_streams(server: Running, url: str, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    completion = litellm(url, monkeypatch, provider)
    text, usage = expected(server)
    answer = completion(**FIELDS)
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (usage["prompt_tokens"], 12)
    assert answer.usage.prompt_tokens_details.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"] > 0

    with server.slowed():
        parts = list(completion(stream=True, stream_options={"include_usage": True}, **FIELDS))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert [part.choices[0].finish_reason for part in parts if part.choices][-2:].count("length") == 1
    assert sum(bool(part.choices and part.choices[0].delta.content) for part in parts) > 1, "the text came at once"
    [total] = [part.usage for part in parts if getattr(part, "usage", None)]
    assert (total.prompt_tokens, total.completion_tokens) == (usage["prompt_tokens"], 12)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_calls_tools_and_fills_models(url: str, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    completion = litellm(url, monkeypatch, provider)
    pytest.importorskip("mcp", reason="litellm needs mcp for tools (extra 'clients')")
    from litellm import stream_chunk_builder

    fields = {"max_tokens": 300, "temperature": 1, "seed": 1}
    forced = {"tools": [TOOL], "tool_choice": "required", **fields}
    message = completion(**forced).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "Pool" and Pool.model_validate_json(call.function.arguments)

    parts = list(completion(stream=True, **forced))
    [streamed] = stream_chunk_builder(parts, messages=QUESTION).choices[0].message.tool_calls
    assert streamed.function.name == "Pool" and Pool.model_validate_json(streamed.function.arguments)

    result = {"role": "tool", "tool_call_id": call.id, "content": "two blocks"}
    after = completion(messages=[*QUESTION, message, result], **FIELDS)
    assert after.choices[0].message.content and after.usage.completion_tokens == 12

    answer = completion(response_format=Pool, **fields)
    assert Pool.model_validate_json(answer.choices[0].message.content)


# ---- langchain-openai


def langchain(url: str, **options: Any) -> Any:
    """Returns langchain's chat model for the server."""
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (extra 'clients')")
    fields = {"max_tokens": 300, "temperature": 1, **options}
    return module.ChatOpenAI(model="tutor", base_url=url, api_key="unused", max_retries=0, **fields)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_answers_and_streams(server: Running, url: str, responses: bool) -> None:
    model = langchain(url, use_responses_api=responses, stream_usage=True, **{**FIELDS, "max_tokens": 20})
    text, usage = expected(server)
    answer = model.invoke(WORDS)
    assert answer.text.startswith(text)
    assert answer.usage_metadata["input_tokens"] == usage["prompt_tokens"]
    assert answer.usage_metadata["output_tokens"] == 20
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0

    with server.slowed():
        parts = list(model.stream(WORDS))
    assert "".join(part.text for part in parts) == answer.text
    assert sum(bool(part.text) for part in parts) > 1, "the text came at once"
    assert sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == 20


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_calls_tools(url: str, responses: bool) -> None:
    model = langchain(url, use_responses_api=responses)
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = model.bind_tools([Pool], tool_choice="required")
    answer = bound.invoke(WORDS)
    [call] = answer.tool_calls
    assert call["name"] == "Pool" and Pool.model_validate(call["args"])
    parts = list(bound.stream(WORDS))
    whole = sum(parts[1:], parts[0])
    [streamed] = whole.tool_calls
    assert streamed["name"] == "Pool" and Pool.model_validate(streamed["args"])
    history = [HumanMessage(WORDS), answer, ToolMessage("two blocks", tool_call_id=call["id"])]
    after = langchain(url, use_responses_api=responses, **{**FIELDS, "max_tokens": 20}).invoke(history)
    assert after.text and not after.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain_fills_models(url: str, method: str, responses: bool) -> None:
    model = langchain(url, use_responses_api=responses).with_structured_output(Pool, method=method)
    assert isinstance(model.invoke(WORDS), Pool)
