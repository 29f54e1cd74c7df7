"""Texts and conversations to ids. Both take as long as they are: call them in a thread.

A prompt that is far too long shows in its beginning. To encode all of it first could take ten seconds and a gigabyte,
in which the prompts of others would wait.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer
from minitui.server.errors import ApiError
from minitui.server.schema import ChatMessage
from minitui.server.tools import as_plain_messages, with_parsed_arguments

CHARACTERS = 8  # of a token, at most, in what anybody writes
MARGIN = 16  # tokens more that a text may have for being cut off


def too_long(field: str, tokens: int, most: int, more: str = "") -> ApiError:
    """The refusal of a prompt that leaves no room for a reply; `more`: "more than ", when not all was counted."""
    return ApiError(
        400, f"{field} has {more}{tokens:,} tokens; this model's context is {most:,}, the reply included: shorten it",
        field, "context_length_exceeded",
    )  # fmt: skip


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
    """The ids of a prompt whose control tokens count. Raises ApiError if it is far longer than `most` tokens."""
    _check_beginning(tokenizer, text, most, "prompt")
    try:
        return tokenizer.encode(text, allow_special=True, add_special_tokens=add_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the prompt cannot be encoded: {error}", "prompt") from error


def conversation(tokenizer: Tokenizer, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, generate: bool,
                 values: dict[str, Any], most: int | None = None) -> list[int]:  # fmt: skip
    """The ids of a conversation. Raises InvalidRequest, or ApiError if it is far longer than `most` tokens."""
    plain = with_parsed_arguments([message.plain() for message in messages])
    template = tokenizer.chat_template or ""
    if tools and "tools" in template:
        values = {**values, "tools": tools}
    elif tools or "tool" not in template:
        plain = as_plain_messages(plain, tools)
    try:
        if most is not None:
            said = " ".join([*(str(message.get("content")) for message in plain), json.dumps(tools or [])])
            _check_beginning(tokenizer, said, most, "messages")
        return tokenizer.apply_chat_template(plain, add_generation_prompt=generate, **values)
    except (RecursionError, ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise InvalidRequest(f"these messages cannot be made a prompt ({type(error).__name__})", "messages") from error


def _check_beginning(tokenizer: Tokenizer, text: str, most: int | None, field: str) -> None:
    if most is None or len(text) <= most * CHARACTERS:
        return
    if len(tokenizer.encode(text[: most * CHARACTERS], add_special_tokens=False)) > most + MARGIN:
        raise too_long(field, most, most, "more than ")
