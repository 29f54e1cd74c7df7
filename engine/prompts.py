"""Reads the prompts and messages that the caller of LLM gives, in the forms that vLLM accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from engine.errors import InvalidRequest
from engine.options import refuse_unknown
from engine.parameters import plain_ids
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.text.tool_messages import for_template

Message = dict[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")
ROLES = {"developer": "system", "function": "tool"}
NOT_IN_GENERATE = {
    "prompt_token_ids": 'give the prompts as {"prompt_token_ids": ids}',
    "tokenization_kwargs": "use add_special_tokens; to cut a prompt, encode it and give token ids",
    "lora_request": "merge the adapter into the checkpoint (merge_and_unload of peft)",
    "guided_options_request": "use SamplingParams(structured_outputs=…)",
}
NOT_IN_CHAT = {
    "lora_request": NOT_IN_GENERATE["lora_request"],
    "mm_processor_kwargs": "only text is supported",
    "chat_template_content_format": "the parts of a content are always joined to one string",
    "reasoning_effort": 'use chat_template_kwargs={"reasoning_effort": …} if the template has this variable',
    "documents": 'use chat_template_kwargs={"documents": …}',
    "enable_thinking": 'use chat_template_kwargs={"enable_thinking": …}',
}


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(slots=True)
class Prompt:
    """A prompt as token ids. `text`: None if the caller gave only ids."""

    text: str | None
    ids: list[int]
    cache_salt: str = ""


def as_list(prompts: Any) -> list[Any]:
    """Returns one prompt or several prompts as a list of prompts, which `read` reads."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise InvalidRequest(_wrong_type(prompts))
    ids = plain_ids(prompts)
    return [ids] if ids and isinstance(ids[0], (int, float)) else ids


def read(prompt: Any, tokenizer: Tokenizer | None, add_special_tokens: bool = True) -> Prompt:
    """Returns a prompt from a text, token ids, or a dict with the keys of KEYS. A text that spells out a control token,
    such as "<|im_start|>", gets that token's id. `add_special_tokens`: also add the tokens that the tokenizer puts
    around a text, such as a BOS. Raises InvalidRequest for anything else."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, needed(tokenizer).encode(prompt, True, add_special_tokens))
    if not isinstance(prompt, Mapping):
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise InvalidRequest(_wrong_type(prompt))
        return Prompt(None, plain_ids(prompt))
    if unknown := [str(key) for key in prompt if key not in KEYS and prompt[key] is not None]:
        raise InvalidRequest(f"a prompt has the key {unknown[0]!r}: the keys are {', '.join(KEYS)}; only text and "
                             "token ids are supported")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is not None and not isinstance(text, str)) or (text is None and ids is None):
        raise InvalidRequest('a prompt needs the key "prompt" (a text) or "prompt_token_ids" (token ids)')
    found = read(text if ids is None else ids, tokenizer, add_special_tokens)
    return Prompt(text, found.ids, prompt.get("cache_salt") or "")


def own(params: Any, vocab_size: int) -> SamplingParams:
    """Returns a copy of parameters, which the caller may change later. Raises InvalidRequest if they are not valid."""
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise InvalidRequest(f"sampling_params is of type {kind}: it must be SamplingParams", "sampling_params")
    params.validate(vocab_size)
    return params.clone()


def each_params(given: Any, count: int, default: SamplingParams) -> list[Any]:
    """Returns the parameters of each of `count` prompts, for `own`. `given`: one for all, one for each, or None."""
    if not isinstance(given, Sequence):
        return [default if given is None else given] * count
    if len(given) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(given)} sampling_params", "sampling_params")
    return list(given)


def conversation(
    tokenizer: Tokenizer | None, messages: list[Message], tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool, continue_final_message: bool, chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> Prompt:
    """Returns a conversation as a prompt. The arguments are those of LLM.chat."""
    tokenizer = needed(tokenizer)
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        kind = type(messages).__name__
        raise InvalidRequest(
            f'the messages are of type {kind}: they must be a list of {{"role", "content"}}', "messages"
        )
    template = chat_template or tokenizer.chat_template or ""
    values = dict(chat_template_kwargs or {})
    try:
        plain, listed = for_template([_plain(message) for message in messages], tools, template)
    except (KeyError, TypeError) as error:
        sentence = 'each of tool_calls must have the form {"id", "type", "function": {"name", "arguments"}}'
        raise InvalidRequest(sentence, "messages") from error
    if listed:
        values["tools"] = listed
    try:
        ids = tokenizer.apply_chat_template(
            plain, add_generation_prompt, continue_final_message=continue_final_message, chat_template=chat_template,
            **values,
        )
    except TypeError as error:
        raise InvalidRequest(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    return Prompt(tokenizer.decode(ids, skip_special_tokens=False), ids)


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Returns the tokenizer. Raises InvalidRequest if there is none."""
    if tokenizer is None:
        raise InvalidRequest("this engine has no tokenizer (load_tokenizer=False): give token ids to generate()")
    return tokenizer


def check_names(function: str, others: dict[str, Any]) -> None:
    """Raise TypeError for arguments that `generate` or `chat` does not have."""
    refuse_unknown(function, others, NOT_IN_CHAT if function.endswith("chat") else NOT_IN_GENERATE)


def _plain(message: Any) -> Message:
    """Returns a message with its content as one string."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest('each message must be a dict with "role" and "content"', "messages")
    content = message.get("content")
    if content is not None and not isinstance(content, (str, Sequence)):
        kind = type(content).__name__
        raise InvalidRequest(f"the content of a message is of type {kind}: it must be a string", "messages")
    if content is not None and not isinstance(content, str):
        content = "".join(_text(part) for part in content)
    return {**message, "role": ROLES.get(message["role"], message["role"]), "content": content or ""}


def _text(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"a part of a message is of type {kind}: only text is supported", "messages")
    return text


def _wrong_type(prompt: object) -> str:
    return f"a prompt is of type {type(prompt).__name__}: it must be a text, token ids or a dict"
