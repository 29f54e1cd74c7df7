"""Stages 1 and 7: chat templates, text to ids, and ids to text.

This module does not import torch, so the user interface can encode and decode in its own process.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from engine.errors import CheckpointError, InvalidRequest, PromptTooLong
from engine.fields import Fields, listed, shown
from engine.files import TOKENIZER_BYTES, again, eos_ids, no_target, read_bytes, read_json_if_there, read_text
from engine.params import RECOMMENDED, SamplingParams
from engine.text.added_tokens import SPECIAL_NAMES, add_tokens, text_of
from engine.text.chat_template import LONGEST_SOURCE, ChatTemplate
from engine.text.detokenizer import Decoding, Detokenizer
from engine.text.markers import MarkedDetokenizer, Markers

Message = dict[str, Any]

OF_TRANSFORMERS = (("return_dict", False), ("return_tensors", None))  # its arguments and our values
PRIVATE_USE = range(0xE000, 0xF900)  # characters without a standard meaning
# The mark of a chat consists of random PRIVATE_USE characters. It is put into the names of control tokens in messages,
# so that these names stay text. No message contains it by chance.
MARK_LENGTH = 8  # characters
CHARACTERS_PER_TOKEN = 8  # almost every text has fewer on average
CUT_TOKENS = 16  # cutting a text in two adds at most this many tokens


class Tokenizer:
    """The tokenizer and the chat template of a checkpoint directory.

    eos_ids          ids that end a reply, from generation_config.json, config.json and tokenizer_config.json
    special_ids      ids of control tokens: decoding skips them, and the encoding of a user's text never contains them
    generation       the sampling settings that generation_config.json recommends
    chat_template    the source of the chat template, or None
    context          the engine's context in tokens, or None (no limit). A longer chat is refused before it is fully
                     encoded, because encoding a few MiB takes seconds
    """

    def __init__(self, directory: str | Path) -> None:
        """Raises CheckpointError if tokenizer.json is missing or broken."""
        self.directory = directory = Path(directory)
        self._config = TokenizerConfig(directory)
        self._tokenizer = self._loaded()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._names = self._config.special_names()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.generation = self._config.generation(self.vocab_size)
        self.eos_ids = self._find_eos_ids()
        self.chat_template = self._config.chat_template()
        self.context: int | None = None
        self._decoding = Decoding(self._tokenizer, self.special_ids)
        self._markers = Markers(self._tokenizer.token_to_id, lambda ids: self._decoding.decode(ids, False))

    def encode(self, text: str, allow_special: bool = False, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text. Names of control tokens in it are plain text, unless `allow_special`.
        `add_special_tokens`: also add the tokens that the tokenizer puts around a text, such as a BOS."""
        tokenizer = self._tokenizer if allow_special else self._literal
        return encode(tokenizer, text, add_special_tokens)

    def encode_together(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Returns what `encode` with `allow_special` returns for each text: on all cores, and without Python's lock.
        Raises the tokenizer's own errors."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [each.ids for each in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids. Without control tokens, other markers stand for some of them (markers.py)."""
        if skip_special_tokens and self._markers:
            stream = self.detokenizer()
            return stream.push(list(ids)) + stream.flush()
        return self._decoding.decode(list(ids), skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer for one reply. It decodes the tokens as they arrive."""
        plain = self._decoding.start(skip_special_tokens)
        return MarkedDetokenizer(self._markers, plain) if skip_special_tokens and self._markers else plain

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token. They may be only a part of a character."""
        return self._decoding.bytes_of[token_id]

    @overload
    def apply_chat_template(
        self, messages: list[Message], add_generation_prompt: bool = ..., *, tokenize: Literal[True] = ..., **more: Any
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self, messages: list[Message], add_generation_prompt: bool = ..., *, tokenize: Literal[False], **more: Any
    ) -> str: ...
    def apply_chat_template(
        self, messages: list[Message], add_generation_prompt: bool = True, *, continue_final_message: bool = False,
        chat_template: str | None = None, any_length: bool = False, tokenize: bool = True, **template: Any,
    ) -> list[int] | str:
        """Returns the ids of a conversation. With `add_generation_prompt`, the model continues them with a reply.

        continue_final_message   end the ids after the last message's content, so that the model continues this message
        chat_template            the source of a template that replaces the checkpoint's
        any_length               do not check `context`, because the caller cuts the ids
        tokenize                 False: return the text. If it is encoded, control tokens in messages get their ids
        template                 further arguments for the template (tools, enable_thinking, …)

        Only the template can add control tokens: names of control tokens in a message are plain text. Raises
        InvalidRequest if there is no template, or if the template refuses the messages.
        """
        rendered, mark = self.rendered_chat(
            messages, add_generation_prompt, continue_final_message=continue_final_message,
            chat_template=chat_template, any_length=any_length, **template,
        )
        if not tokenize:
            return rendered.replace(mark, "") if mark else rendered
        return self.encode_chat(rendered, mark)

    def encode_chat(self, rendered: str, mark: str) -> list[int]:
        """Returns the ids of the result of `rendered_chat`."""
        return self._encode_marked(rendered, mark) if mark else encode(self._tokenizer, rendered, False)

    def rendered_chat(
        self, messages: list[Message], add_generation_prompt: bool = True, *, continue_final_message: bool = False,
        chat_template: str | None = None, any_length: bool = False, **template: Any,
    ) -> tuple[str, str]:
        """Returns (a conversation's text, the mark before each character in it that is not of a control token). The
        mark is "" if no message has the name of one; then `encode` with `allow_special` returns the ids. The arguments
        are those of `apply_chat_template`."""
        if any(template.pop(name, default) is not default for name, default in OF_TRANSFORMERS):
            raise InvalidRequest(
                f"{', '.join(name for name, _ in OF_TRANSFORMERS)} are not arguments of this tokenizer: "
                "apply_chat_template returns a list of ids, which generate() takes, or a text (tokenize=False)",
                "chat_template_kwargs",
            )
        generate = add_generation_prompt and not continue_final_message
        values = {"messages": messages, **template}
        mark = ""
        if any(text in part for part in _strings(values) for text in self._control_ids):
            mark = "".join(chr(secrets.choice(PRIVATE_USE)) for _ in range(MARK_LENGTH))
            pattern = self._control_pattern
            values = _map_strings(values, lambda text: pattern.sub(lambda found: mark + mark.join(found[0]), text))
        shown = values.pop("messages")
        rendered = self.render_chat(shown, generate, chat_template=chat_template, **values)
        if mark:
            escaped = "".join(f"\\u{ord(character):04x}" for character in mark)  # as tojson writes it
            rendered = rendered.replace(escaped, mark)
        if continue_final_message:
            rendered = _up_to_last_message(rendered, shown)
        if not any_length:
            self._check_length(rendered.replace(mark, "") if mark else rendered)
        return rendered, mark

    def render_chat(
        self, messages: list[Message], add_generation_prompt: bool = True, *, chat_template: str | None = None,
        **template: Any,
    ) -> str:
        """Returns the conversation as text, with the template's control tokens. `chat_template`: as in
        `apply_chat_template`. Such a template is rendered in a process of its own."""
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt,
                  "tools": None, "documents": None, **self._names, **template}
        if chat_template is not None:
            other = ChatTemplate(chat_template, self.directory)
            try:
                return other.render(values)
            except CheckpointError as error:
                sentence = "chat_template cannot be compiled: it is not a valid Jinja template"
                raise InvalidRequest(sentence, "chat_template") from error
            finally:
                other.stop()
        if self.chat_template is None:
            raise InvalidRequest(
                f"{self.directory} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): use a chat model, or send plain text for completion",
                "messages",
            )
        return self._template.render(values)

    def start_rendering(self) -> None:
        """Start the process that renders chats, without waiting for it. Otherwise the first rendering starts it."""
        if self.chat_template is not None:
            self._template.start()

    def stop_rendering(self) -> None:
        """Stop a rendering that runs in another thread, and raise InvalidRequest there. Later renderings still work."""
        if self.chat_template is not None:
            self._template.stop()

    def to_json(self) -> str:
        """Returns the tokenizer in the format of tokenizer.json, for other libraries."""
        return self._tokenizer.to_str()

    def json_with_another_token(self, text: str) -> tuple[str, int]:
        """Like `to_json`, with one more control token. Also returns this token's id, the highest."""
        copy = tokenizers.Tokenizer.from_str(self.to_json())
        copy.add_special_tokens([text])
        token_id = copy.token_to_id(text)
        assert token_id is not None
        return copy.to_str(), token_id

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that treats the names of control tokens as plain text."""
        copy = self._loaded()
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self.chat_template is not None
        return ChatTemplate(self.chat_template, self.directory)

    def _check_length(self, text: str) -> None:
        """Raise PromptTooLong as soon as the first parts of a long text have more tokens than the context. The last
        part is not encoded, so a short text, which has only one part, is never refused here."""
        if self.context is None:
            return
        count, length = 0, max(LONG_TEXT, self.context * CHARACTERS_PER_TOKEN)
        for start in range(0, len(text) - length, length):
            count += len(encode(self._tokenizer, text[start : start + length], False)) - CUT_TOKENS
            if count > self.context:
                raise PromptTooLong(count, self.context)

    def _encode_marked(self, rendered: str, mark: str) -> list[int]:
        """Returns the ids of a rendered chat. The mark is before each character of a control token's name in a message.
        These names stay text. The chat is split at all other control tokens, as the tokenizer splits it. Each part
        between them is encoded alone."""
        ids: list[int] = []
        at = 0
        for found in self._control_pattern.finditer(rendered):
            if rendered.endswith(mark, 0, found.start()):
                continue  # a name of one character, with the mark before it: it is text
            ids += self._encode_part(rendered[at : found.start()].replace(mark, ""), first=at == 0)
            ids.append(self._control_ids[found[0]])
            at = found.end()
        return ids + self._encode_part(rendered[at:].replace(mark, ""), first=at == 0)

    def _encode_part(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        if first or self._decoding.byte_level:
            return encode(self._literal, text, False)
        # Tokenizers like SentencePiece add a space before a text. So encode a newline and the text: the space is then
        # before the newline. Remove the ids of both.
        newline, ids = encode(self._literal, "\n", False), encode(self._literal, "\n" + text, False)
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
        return encode(self._literal, text, False)

    def _loaded(self) -> tokenizers.Tokenizer:
        tokenizer = load(self.directory / "tokenizer.json")
        add_tokens(tokenizer, self.directory, self._config.fields)
        return tokenizer

    def _find_eos_ids(self) -> tuple[int, ...]:
        ids = eos_ids(self.directory)
        named = self._tokenizer.token_to_id(self._names["eos_token"]) if "eos_token" in self._names else None
        return ids if named is None or named in ids else (*ids, named)


def _up_to_last_message(rendered: str, messages: list[Message]) -> str:
    """Returns the rendered chat up to the end of the last message's content. Raises InvalidRequest if it is not there.
    Templates may strip the content, so its spaces at the end are kept only if the chat contains them."""
    content = messages[-1].get("content") if messages else None
    text = content.lstrip() if isinstance(content, str) else ""
    at = rendered.rfind(text.rstrip()) if text else -1
    if at < 0:
        raise InvalidRequest(
            "continue_final_message needs a last message with a text that the chat template writes unchanged",
            "continue_final_message",
        )
    return rendered[: at + len(text if rendered.startswith(text, at) else text.rstrip())]


def _strings(value: Any) -> Iterable[str]:
    """Yields all strings in nested lists and dictionaries, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


class TokenizerConfig:
    """Reads the files of a checkpoint directory. Its methods raise CheckpointError if a file is broken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fields = self._fields("tokenizer_config.json").raw
        if "added_tokens_decoder" not in self.fields:  # older versions name special tokens in another file
            self.fields |= self._fields("special_tokens_map.json").raw

    def special_names(self) -> dict[str, str]:
        """Returns the texts of the special tokens by their names, such as "eos_token"."""
        return {name: self._special(name) for name in SPECIAL_NAMES if self.fields.get(name)}

    def _fields(self, name: str) -> Fields:
        path = self.directory / name
        return Fields(path, read_json_if_there(path))

    def _special(self, name: str) -> str:
        """Returns the text of a special token, which tokenizer_config.json has as a string or as {"content": text}."""
        token = self.fields[name]
        content = text_of(token)
        if content is None:
            raise CheckpointError(
                f"the tokenizer of {self.directory} has {name} = {shown(token)}: it must be a string, or an object "
                "with content"
            )
        return content

    def generation(self, vocab_size: int) -> dict[str, Any]:
        """Returns the sampling settings that generation_config.json recommends."""
        fields = self._fields("generation_config.json")
        found = {key: fields.raw[key] for key in RECOMMENDED if fields.raw.get(key) is not None}
        if not fields.flag("do_sample", True):
            found["temperature"] = 0.0
        try:
            SamplingParams(**found).validate(vocab_size)
        except InvalidRequest as error:
            raise CheckpointError(f"{fields.path} recommends invalid settings: {error}; correct or delete it") from None
        return found

    def chat_template(self) -> str | None:
        """Returns the source of the chat template; None: there is none."""
        path = self.directory / "chat_template.jinja"
        if path.exists():
            return read_text(path, LONGEST_SOURCE)
        template = self.fields.get("chat_template") or self._fields("chat_template.json").raw.get("chat_template")
        if isinstance(template, list):  # several templates with names
            template = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()), None)
        if template is not None and (not isinstance(template, str) or len(template) > LONGEST_SOURCE):
            found = f"{len(template):,} characters" if isinstance(template, str) else type(template).__name__
            raise CheckpointError(
                f"the chat template of {self.directory} is {found}; it must be a string of at most {LONGEST_SOURCE:,} "
                "characters"
            )
        return template


OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model")
LONG_TEXT = 4096  # characters
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
LARGEST_GROWTH = 256  # how many times as long a text may become before it is split into tokens
LARGEST_PROCESSOR = 1 << 16  # characters of the part that adds tokens such as a BOS


def load(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a tokenizer.json, without padding and truncation. Raises CheckpointError."""
    try:
        data = read_bytes(path, TOKENIZER_BYTES)
    except FileNotFoundError:
        if path.is_symlink():
            raise no_target(path) from None
        others = [name for name in OTHER_FORMATS if (path.parent / name).is_file()]
        instead = f", only {listed(others)}" if others else ""
        raise CheckpointError(
            f"{path} does not exist{instead}: save the model's tokenizer in this format, with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers"
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library is in Rust: a panic there is not an Exception
        raise CheckpointError(f"{path} cannot be read ({error}): {again(path)}") from error
    for name in ("normalizer", "decoder"):
        growth = _growth(_state(getattr(tokenizer, name)))
        if growth > LARGEST_GROWTH:
            raise CheckpointError(
                f"{path} has a {name} that makes a text up to {growth:,} times as long: at most {LARGEST_GROWTH} are "
                "supported; download it again"
            )
    if len(json.dumps(_state(tokenizer.post_processor))) > LARGEST_PROCESSOR:
        raise CheckpointError(
            f"{path} has a post_processor of more than {LARGEST_PROCESSOR:,} characters: download it again"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Returns the ids of a text. Raises InvalidRequest if the text cannot be encoded. UTF-8 cannot encode lone
    surrogates, and a tokenizer's expression may be too slow for some texts. Long texts use the batch call, because
    `encode` blocks all other threads while it runs."""
    try:
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError:
        if (lone := LONE_SURROGATE.search(text)) is None:
            raise
        raise InvalidRequest(
            f"character {lone.start():,} of the text is a lone surrogate (U+{ord(lone[0]):04X}), not a character: "
            "remove it or replace it with U+FFFD"
        ) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic
        raise InvalidRequest(
            f"the model's tokenizer cannot split this text of {len(text):,} characters ({error}): change the text"
        ) from error


def _state(component: Any) -> Any:
    """Returns a part of a tokenizer as JSON has it."""
    return None if component is None else json.loads(component.__getstate__())


def _growth(state: Any) -> int:
    """Returns how many times as long a text can become."""
    growth = 1
    for each in _steps(state):
        if each.get("type") == "Precompiled":
            data = base64.b64decode(each.get("precompiled_charsmap") or "")
            strings = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            growth *= max(map(len, strings))
        elif each.get("type") in ("Replace", "Prepend"):
            growth *= max(1, len(each.get("content") or each.get("prepend") or ""))
    return growth


def _steps(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        yield state
        for inner in state.get("normalizers") or state.get("decoders") or ():
            yield from _steps(inner)
