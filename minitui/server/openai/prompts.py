"""Encodes texts and conversations. Encoding a long text is slow: call these functions in a thread. If a prompt is much
too long, only its beginning is encoded, and the prompt is refused. Encoding the whole prompt could take ten seconds and
a gigabyte of memory, and delay other prompts."""

from __future__ import annotations

import json
from typing import Any

from engine.errors import InvalidRequest, PromptTooLong
from engine.text.tokenizer import Tokenizer
from engine.text.tool_messages import for_template
from minitui.server.errors import ContextExceeded
from minitui.server.openai.chat_schema import ChatMessage

CHARACTERS_PER_TOKEN = 8  # an upper limit: real texts have fewer on average
MARGIN = 16  # tokens: cutting a text can add a few tokens where it is cut


def encode(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int | None = None, last: int | None = None
) -> list[int]:
    """Returns the ids of a prompt. If its text spells out a control token, the ids contain that control token. `last`:
    return only this many ids, the last ones. Raises ContextExceeded if the prompt is much longer than `most` tokens."""
    if last is not None:
        text = text[-(last + MARGIN) * CHARACTERS_PER_TOKEN :]  # only the end matters
    else:
        _check_beginning(tokenizer, text, most, "prompt")
    try:
        ids = tokenizer.encode(text, allow_special=True, add_special_tokens=add_special_tokens)
    except InvalidRequest:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the prompt cannot be encoded: {error}", "prompt") from error
    return ids if last is None else ids[-last:]


def conversation(
    tokenizer: Tokenizer, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, generate: bool,
    values: dict[str, Any], most: int | None = None, last: int | None = None,
) -> list[int]:
    """Returns the ids of a conversation. `generate`: add the generation prompt. `values`: variables of the template,
    and further arguments of `Tokenizer.apply_chat_template`. `last`: return only this many ids, the last ones. Raises
    InvalidRequest if the template fails, and ContextExceeded if the conversation is much longer than `most` tokens."""
    template = values.get("chat_template") or tokenizer.chat_template or ""
    plain, tools = for_template([message.plain() for message in messages], tools, template)
    if tools:
        values = {**values, "tools": tools}
    try:
        if most is not None and last is None:
            text = " ".join([*(str(message.get("content")) for message in plain), json.dumps(tools or [])])
            _check_beginning(tokenizer, text, most, "messages")
        ids = tokenizer.apply_chat_template(plain, generate, any_length=last is not None, **values)
        return ids if last is None else ids[-last:]
    except PromptTooLong as error:
        raise ContextExceeded("messages", error.tokens, error.context, counted=False) from error
    except InvalidRequest:
        raise
    except (RecursionError, ValueError, TypeError, ArithmeticError, LookupError) as error:
        fault = type(error).__name__
        raise InvalidRequest(f"the chat template cannot encode these messages ({fault})", "messages") from error


def _check_beginning(tokenizer: Tokenizer, text: str, most: int | None, field: str) -> None:
    if most is None or len(text) <= most * CHARACTERS_PER_TOKEN:
        return
    tokens = len(tokenizer.encode(text[: most * CHARACTERS_PER_TOKEN], add_special_tokens=False))
    if tokens > most + MARGIN:
        raise ContextExceeded(field, tokens - MARGIN, most, counted=False)
