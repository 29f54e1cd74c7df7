"""Encodes texts and conversations. Encoding a long text is slow: call these functions in a thread. If a prompt is much
too long, only its beginning is encoded, and the prompt is refused. Encoding the whole prompt could take ten seconds and
a gigabyte of memory, and delay other prompts."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
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
    ids = _ids(tokenizer, needed(tokenizer, text, most, last), add_special_tokens)
    return ids if last is None else ids[-last:]


Text = tuple[Tokenizer, str, bool]  # a prompt; True: add the tokens that the tokenizer puts around a text


class Encoder:
    """Encodes short texts. Those that wait at the same time are encoded together in a thread, without Python's lock:
    this is a quarter of the time of a request, and meanwhile the event loop begins others. A single one is encoded at
    once: the way to a thread and back takes longer. Nothing that takes long runs in this thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "encode")
        self._waiting: list[tuple[Text, asyncio.Future[list[int]]]] = []
        self._running: asyncio.Task[None] | None = None

    async def encode(self, *text: Any) -> list[int]:
        """Returns the ids of a Text. If it spells out a control token, the ids contain that token. Raises
        InvalidRequest."""
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        self._running = self._running or asyncio.create_task(self._run())
        return await future

    def close(self) -> None:
        """Stop: texts that wait are not encoded."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        batch: list[tuple[Text, asyncio.Future[list[int]]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                texts = [text for text, _ in batch]
                if len(texts) > 1:
                    found = await asyncio.get_running_loop().run_in_executor(self._thread, _encode_all, texts)
                else:
                    found = [_result(texts[0])]
                for (_, future), ids in zip(batch, found, strict=True):
                    if future.done():
                        continue  # its caller has disconnected
                    if isinstance(ids, Exception):
                        future.set_exception(ids)
                    else:
                        future.set_result(ids)
        finally:
            self._running = None
            for _, future in batch + self._waiting:
                future.cancel()  # the server stops


def _encode_all(texts: list[Text]) -> list[list[int] | Exception]:
    """Returns the ids or the error of each text."""
    tokenizer, _, added = texts[0]
    try:
        if all(text[2] == added for text in texts):
            return list(tokenizer.encode_together([text for _, text, _ in texts], added))
    except BaseException:  # a panic, for example, or no memory for all of them: each text gets its own ids or error
        pass
    return list(map(_result, texts))


def _result(text: Text) -> list[int] | Exception:
    try:
        return _ids(*text)
    except Exception as error:
        return error


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, allow_special=True, add_special_tokens=add_special_tokens)
    except InvalidRequest:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the prompt cannot be encoded: {error}", "prompt") from error


def needed(tokenizer: Tokenizer, text: str, most: int | None, last: int | None) -> str:
    """Returns the part of a prompt that `encode`, with the same arguments, encodes."""
    if last is not None:
        return text[-(last + MARGIN) * CHARACTERS_PER_TOKEN :]
    _check_beginning(tokenizer, text, most, "prompt")
    return text


def conversation(
    tokenizer: Tokenizer, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, generate: bool,
    values: dict[str, Any], most: int | None = None, last: int | None = None,
) -> list[int]:
    """Returns the ids of a conversation. The arguments are those of `rendered`."""
    ids = tokenizer.encode_chat(*rendered(tokenizer, messages, tools, generate, values, most, last))
    return ids if last is None else ids[-last:]


def rendered(
    tokenizer: Tokenizer, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, generate: bool,
    values: dict[str, Any], most: int | None = None, last: int | None = None,
) -> tuple[str, str]:
    """Returns the result of `Tokenizer.rendered_chat`. `generate`: add the generation prompt. `values`: variables of
    the template, and further arguments. `last`: the number of ids to keep, the last ones. Raises InvalidRequest if the
    template fails, and ContextExceeded if the conversation is much longer than `most` tokens."""
    template = values.get("chat_template") or tokenizer.chat_template or ""
    plain, tools = for_template([message.plain() for message in messages], tools, template)
    if tools:
        values = {**values, "tools": tools}
    try:
        if most is not None and last is None:
            text = " ".join([*(str(message.get("content")) for message in plain), json.dumps(tools or [])])
            _check_beginning(tokenizer, text, most, "messages")
        return tokenizer.rendered_chat(plain, generate, any_length=last is not None, **values)
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
