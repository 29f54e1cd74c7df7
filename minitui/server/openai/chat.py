"""POST /v1/chat/completions: encodes a conversation with the model's chat template, and parses the reply. The parser
(reply_parser.py) separates reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.text.tokenizer import LONG_TEXT
from minitui.server.answer import OpenAIAnswer, Output
from minitui.server.bodies import Endpoints
from minitui.server.constraints import Constraint
from minitui.server.errors import STREAMED, ApiError
from minitui.server.openai.chat_schema import ChatRequest
from minitui.server.openai.logprobs import chat_logprobs, prompt_logprobs, without_end
from minitui.server.openai.prompts import conversation, rendered
from minitui.server.openai.reply_parser import THINK, ForcedCallParser, Parts, ReplyParser
from minitui.server.openai.reply_schema import OpenAIResponse
from minitui.server.service import Service
from minitui.server.sse import as_json

MANY = 64  # messages
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = Endpoints(service)

    @routes.post("/v1/chat/completions", response_model=OpenAIResponse, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation. The reply is one JSON object, or a stream of server-sent events."""
        return await ChatAnswer(service, body).respond(request)

    return routes


class ChatAnswer(OpenAIAnswer):
    """The choices of one request. `tools`: the model may call these; `forced`: the model must call one of these."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body, 1)
        self.body = body
        self.tools: list[dict[str, Any]] = []
        self.forced: list[dict[str, Any]] = []
        self.thinking = False  # True if the prompt ends with an open think tag
        self.choices: list[Choice] = []

    async def prepare(self) -> None:
        body = self.body
        described = body.described_tools()
        names, must_call = body.callable_names()
        known = [tool["function"]["name"] for tool in described]
        for name in names:
            if name not in known:
                field = "tool_choice" if body.functions is None else "function_call"
                raise ApiError(400, f"{field} names {name!r}, which is not one of the tools", field)
        self.tools = [tool for tool in described if tool["function"]["name"] in names]
        self.forced = self.tools if must_call else []
        ids = await prompt_of(self.service, body, described, self.last_tokens(body, body.limit))
        prompt_end = self.tokenizer.decode(ids[-8:], skip_special_tokens=False)
        self.thinking = not self.forced and prompt_end.rstrip().endswith(THINK)
        self.choices = [Choice(self) for _ in range(self.samples)]
        await self.submit(
            [ids], self._sampling_params(), self.service.label(user=body.user), "messages", body.field_names,
            **self.scheduling(body),
        )

    def _sampling_params(self) -> SamplingParams:
        body, info = self.body, self.service.info
        schemas = []
        if body.response_format and (schema := body.response_format.grammar()) is not None:
            schemas.append(Constraint("json_schema", schema, "response_format"))
        if self.forced:
            schemas.append(Constraint("json_schema", call_schema(self.forced), "tool_choice"))
        return body.params(
            body.limit, info.generation, schemas,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        body = self.body
        more: dict[str, Any] = {"prompt_token_ids": self.prompts[0]} if body.return_token_ids else {}
        if body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(self.tokenizer, outputs[0].prompt_logprobs, body.prompt_logprobs)
        return {**super().whole(outputs), "system_fingerprint": None, **more}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        choice = self.choices[index]
        choice.take(output.text, output.finish_reason)
        return {
            "index": index, "message": choice.message(), "logprobs": self._logprobs(output),
            "finish_reason": choice.finish_reason, "stop_reason": output.metrics.get("stop_reason"),
            **self.token_ids(self.body, output),
        }

    def opening(self) -> Iterator[bytes]:
        more: dict[str, Any] = {"prompt_token_ids": self.prompts[0]} if self.body.return_token_ids else {}
        for index in range(len(self.choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, [Output() for _ in self.choices], **more)

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        choice = self.choices[index]
        choice.take(part.text, part.finish_reason)
        if self.only_text and not part.finish_reason:
            for change in choice.changes():
                for name, value in change.items():  # there is one; json takes long for an object
                    yield self.text_chunk(index, f'"delta":{{"{name}":{as_json(value)}}}')
            return
        logprobs = self._logprobs(part)
        once: dict[str, Any] = {"logprobs": logprobs, **self.token_ids(self.body, part)}  # in the first of the events
        changes = choice.changes()
        if not changes and not choice.finish_reason and (once.get("token_ids") or (logprobs and logprobs["content"])):
            changes = [{}]  # the text of these tokens is held back
        for change in changes:
            yield self._chunk(index, change, outputs, choice=once)
            once = {}
        if choice.finish_reason:
            end = {"finish_reason": choice.finish_reason, "stop_reason": part.metrics.get("stop_reason")}
            yield self._chunk(index, {}, outputs, choice={**once, **end})

    def _chunk(
        self, index: int, delta: dict[str, Any], outputs: list[Output], choice: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        """Returns one event. `choice`: further fields of the choice; `more`: further fields of the event."""
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk([{**first, **(choice or {})}], outputs, **more)

    def _logprobs(self, part: Output) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        shown = without_end(part.logprobs, part.finish_reason, self.service.info.eos_ids)
        return chat_logprobs(self.tokenizer, shown, self.body.top_logprobs or 0)


async def prompt_of(
    service: Service, body: ChatRequest, tools: list[dict[str, Any]], last: int | None = None
) -> list[int]:
    """Returns the ids of a request's prompt. `tools`: the prompt describes these. `last`: the number of ids to keep."""
    if body.chat_template is not None and not service.settings.trust_request_template:
        sentence = "requests cannot replace the chat template: start the server with --trust-request-chat-template"
        raise ApiError(400, sentence, "chat_template")
    values: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        values.setdefault("enable_thinking", False)
    values |= {"chat_template": body.chat_template, "continue_final_message": bool(body.continue_final_message)}
    generate = body.add_generation_prompt is not False
    tokenizer = service.tokenizer
    arguments = (tokenizer, body.messages, tools or None, generate, values, service.longest, last)
    try:
        if tools or last is not None or not _is_short(body):
            ids = await service.in_thread(conversation, *arguments)
        else:
            text, mark = await service.at_once(rendered, *arguments)
            ids = tokenizer.encode_chat(text, mark) if mark else await service.encoder.encode(tokenizer, text, False)
    except InvalidRequest as error:
        if error.field == "prompt":  # the tokenizer's name for the text
            error.field = "messages"
        raise
    if body.add_special_tokens:
        added = tokenizer.encode("", add_special_tokens=True)
        ids = ids if ids[: len(added)] == added else [*added, *ids]
    return ids


def _is_short(body: ChatRequest) -> bool:
    """Returns True if the messages are few and have short texts only, and nothing else could take long."""
    texts = [
        each.content for each in body.messages[:MANY]
        if isinstance(each.content, str)
        and each.tool_calls is each.function_call is each.reasoning is each.reasoning_content is None
    ]
    options = [body.chat_template, *(body.chat_template_kwargs or {}).values()]
    plain = all(value is None or type(value) is bool for value in options)
    return plain and len(texts) == len(body.messages) and sum(map(len, texts)) < LONG_TEXT


class Choice:
    """One of n replies, parsed as it arrives. `parts`: everything parsed so far."""

    def __init__(self, answer: ChatAnswer) -> None:
        body = answer.body
        self._legacy = body.functions is not None  # calls are shown as function_call, and there is at most one
        self._single = body.parallel_tool_calls is False or self._legacy
        self._with_reasoning = body.include_reasoning is not False
        free = ReplyParser(answer.thinking, answer.tools)
        self._parser = ForcedCallParser(answer.forced) if answer.forced else free
        self._new = Parts()
        self.parts = Parts()
        self.finish_reason: str | None = None

    def take(self, text: str, finish_reason: str) -> None:
        """Parse the next part of the reply. `finish_reason` is empty until the reply ends."""
        self._new = self._parser.push(text)
        if finish_reason:
            self._new += self._parser.flush()
        if not self._with_reasoning:
            self._new.reasoning = ""
        if self._single:
            self._new.calls = [] if self.parts.calls else self._new.calls[:1]
        self.parts += self._new
        if finish_reason:
            called = bool(self.parts.calls) and finish_reason == "stop"
            self.finish_reason = ("function_call" if self._legacy else "tool_calls") if called else finish_reason

    def changes(self) -> list[dict[str, Any]]:
        """Returns the result of the last `take` as deltas for a stream."""
        changes: list[dict[str, Any]] = []
        if self._new.reasoning:
            changes.append({"reasoning_content": self._new.reasoning})
        if self._new.content:
            changes.append({"content": self._new.content})
        before = len(self.parts.calls) - len(self._new.calls)
        for number, call in enumerate(self._new.calls, before):
            shown = {"function_call": call["function"]} if self._legacy else {"tool_calls": [{"index": number, **call}]}
            changes.append(shown)
        return changes

    def message(self) -> dict[str, Any]:
        """Returns the whole reply as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.parts.content, "refusal": None}
        if self.parts.reasoning:
            message["reasoning_content"] = self.parts.reasoning
        if self.parts.calls:
            calls = self.parts.calls
            message |= {"function_call": calls[0]["function"]} if self._legacy else {"tool_calls": calls}
            message["content"] = self.parts.content or None
        return message


def call_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schema of a reply that calls one of these tools (engine/text/tool_messages.py describes them).

    The parameters of each tool get a URI of their own, so "#/$defs/…" in them means the definitions of the same tool.
    """
    branches = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": {**(tool["function"].get("parameters") or NO_PARAMETERS), "$id": f"tool:{number}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    return branches[0] if len(branches) == 1 else {"anyOf": branches}
