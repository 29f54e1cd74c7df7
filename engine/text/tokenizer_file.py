"""Loads a tokenizer.json, and encodes with it: the library's faults and hostile files become errors with a sentence."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import CheckpointError, InvalidRequest
from engine.fields import listed
from engine.files import TOKENIZER_BYTES, again, no_target, read_bytes

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
    """Returns the ids of a text. Raises InvalidRequest if the text cannot be encoded.

    UTF-8 cannot encode lone surrogates, and a tokenizer's expression may be too slow for some texts. Long texts use the
    batch call, because `encode` blocks all other threads while it runs.
    """
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
