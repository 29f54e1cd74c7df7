"""Adds the tokens that a checkpoint lists beside its tokenizer.json, as transformers does.

Some checkpoints list tokens only in tokenizer_config.json (added_tokens_decoder), older ones in added_tokens.json. A
special token, such as eos_token, may be an ordinary word of the vocabulary: it becomes a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.errors import CheckpointError
from engine.fields import shown
from engine.files import read_json_if_there

CONFIG, OLDER = "tokenizer_config.json", "added_tokens.json"
LISTED = "added_tokens_decoder"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_SPECIAL = ("additional_special_tokens", "extra_special_tokens")  # lists
ID = re.compile(r"[0-9]{1,9}")
FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")


def add_tokens(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> None:
    """Add the tokens to the tokenizer of the checkpoint `directory`. Raises CheckpointError. `config`: the contents of
    tokenizer_config.json. If tokenizer.json has a token under another id, that id is kept."""
    others = (config[name] for name in OTHER_SPECIAL if isinstance(config.get(name), list))
    special = {text for token in chain(map(config.get, SPECIAL_NAMES), *others) if (text := text_of(token))}
    held = {token.content: _flags(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = sorted(_listed(directory, config, special), key=lambda pair: pair[0])
    new = [(number, token.content) for number, token in listed if tokenizer.token_to_id(token.content) is None]
    tokenizer.add_tokens([token for _, token in listed if held.get(token.content) != _flags(token)])
    words = special - held.keys() - {token.content for _, token in listed}
    tokenizer.add_special_tokens(sorted(word for word in words if tokenizer.token_to_id(word) is not None))
    for number, text in new:
        if (found := tokenizer.token_to_id(text)) != number:
            raise CheckpointError(
                f"the tokenizer of {directory} lists the token {shown(text)} with the id {number}, but after the "
                f"tokens of tokenizer.json it would have the id {found}: the files do not belong together; download "
                "them again"
            )


def text_of(token: Any) -> str | None:
    """Returns the text of a special token, which is a string or an object with content; None if it is neither."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _listed(directory: Path, config: dict[str, Any], special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    """Yields the listed tokens with their ids."""
    listed, path = config.get(LISTED), directory / CONFIG
    if not isinstance(listed, dict | None):
        raise CheckpointError(f"{path} has {LISTED} = {shown(listed)}: it must be an object; download the file again")
    pairs: list[tuple[Any, Any]] = list((listed or {}).items())
    if listed is None:
        path = directory / OLDER
        for word, number in read_json_if_there(path).items():
            pairs.append((number, {"content": word, "special": word in special, "normalized": word not in special}))
    for number, token in pairs:
        text = text_of(token) if isinstance(token, dict) else None
        flags = {flag: token[flag] for flag in FLAGS if flag in token} if text else {}
        if not text or not ID.fullmatch(str(number)) or not all(type(flag) is bool for flag in flags.values()):
            raise CheckpointError(
                f"{path} lists the token {shown(token)} with the id {shown(number)}: a token has a content, flags "
                "that are true or false, and a whole number as its id; download the file again"
            )
        yield int(number), AddedToken(text, **flags)


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return tuple(getattr(token, flag) for flag in FLAGS)
