"""Replies that a grammar allows, drawn at random."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.params import SamplingParams
from engine.text.structured import Grammar, Grammars
from engine.text.tokenizer import Tokenizer

ENDINGS = (b'"', b"}", b"]", b"0", b"1")


class Writer:
    """Checks and writes replies that follow JSON schemas. Every Writer draws the same random numbers."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._random = np.random.default_rng(0)
        starts = [tokenizer.token_bytes(token)[:1] for token in range(tokenizer.vocab_size)]
        self._endings = np.array([start in ENDINGS for start in starts])

    def compile(self, schema: Any, **params: Any) -> Grammar:
        """Raises InvalidRequest if the schema is refused."""
        return self._grammars.compile(SamplingParams(json_schema=schema, **params))

    def accepts(self, schema: Any, text: str, **params: Any) -> bool:
        """Returns True if the text is a complete reply."""
        grammar = self.compile(schema, **params)
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            if not _bits(grammar.mask())[token]:
                return False
            grammar.advance(token)
        return any(_bits(grammar.mask())[token] for token in self._tokenizer.eos_ids)

    def write(self, schema: Any, most: int = 100, **params: Any) -> str | None:
        """Returns a reply; None if it was not complete after `most` tokens. Half of the draws prefer short replies."""
        grammar = self.compile(schema, **params)
        ids: list[int] = []
        while len(ids) < most:
            allowed = _bits(grammar.mask())[: len(self._endings)].astype(bool)
            assert not grammar.failed, grammar.failed
            end = next((token for token in self._tokenizer.eos_ids if allowed[token]), None)
            short = allowed & self._endings if self._random.random() < 0.5 else allowed
            token = int(self._random.choice(np.flatnonzero(short if short.any() else allowed)))
            if token == end or (end is not None and self._random.random() < 0.5):
                return self._tokenizer.decode(ids)
            ids.append(token)
            if grammar.advance(token):
                return self._tokenizer.decode(ids)
        return None


def _bits(mask: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")
