"""Describes tools to a model: through its chat template if it supports tools, else as text in the Hermes format."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from engine.errors import InvalidRequest

Message = dict[str, Any]

PREFACE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # the text of Qwen's templates; models of other families know this format, too


def for_template(
    messages: list[Message], tools: list[Message] | None, template: str
) -> tuple[list[Message], list[Message] | None]:
    """Returns (messages, tools) for a chat template. The tools are in the messages if the template has no tools. Raises
    InvalidRequest if the arguments of a tool call are not a JSON object."""
    messages = with_parsed_arguments(messages)
    if "length != 9" in template:
        messages = with_short_ids(messages)
    if tools and "tools" in template:
        return messages, tools
    if tools or "tool" not in template:
        messages = as_plain_messages(messages, tools)
    return messages, None


def with_parsed_arguments(messages: list[Message]) -> list[Message]:
    """Returns the messages with the arguments of tool calls parsed: templates need objects, not JSON strings. Raises
    InvalidRequest if the arguments are not a JSON object."""
    done: list[Message] = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not calls:
            done.append({key: value for key, value in message.items() if key != "tool_calls"})
            continue
        parsed = []
        for call in calls:
            try:
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, dict):
                    arguments = json.loads(arguments or "{}")
            except (ValueError, TypeError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                field, name = f"messages.{number}.tool_calls", call["function"]["name"]
                raise InvalidRequest(f"{field}: the arguments of {name!r} are not a JSON object", field)
            parsed.append({**call, "function": {**call["function"], "arguments": arguments}})
        done.append({**message, "tool_calls": parsed})
    return done


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Returns the messages with ids of calls as templates of Mistral demand them: 9 letters and digits."""

    def short(name: Any) -> str:
        return hashlib.sha256(str(name).encode("utf-8", "replace")).hexdigest()[:9]

    done = []
    for message in messages:
        new = dict(message)
        if "tool_call_id" in message:
            new["tool_call_id"] = short(message["tool_call_id"])
        if message.get("tool_calls"):
            new["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]
        done.append(new)
    return done


def as_plain_messages(messages: list[Message], tools: list[Message] | None) -> list[Message]:
    """Returns the conversation for a template that does not support tools: tools, calls and results become text."""
    plain: list[Message] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            plain.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
            continue
        for call in message.get("tool_calls", ()):
            body = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            text = f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
            content = f"{content}\n{text}" if content else text
        plain.append({"role": message["role"], "content": content})
    if tools:
        preface = PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{preface}"}
        else:
            plain.insert(0, {"role": "system", "content": preface})
    return plain
