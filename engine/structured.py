"""Replies that obey a JSON schema, a regular expression or a list of choices: masks over the vocabulary, by llguidance.

The grammar of a request is compiled when it is submitted (what cannot be compiled is refused there), asked for a mask
before each draw, and advanced by the token when it is committed. The library is the extra "structured".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer
from engine.types import SamplingParams


class Grammar:
    """What one request's reply may still become."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._words = words

    def mask(self) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says whether token t may come next."""
        mask = np.zeros(self._words, dtype=np.int32)
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        mask[: len(found)] = found[: self._words]
        return mask

    def advance(self, token_id: int) -> bool:
        """Take a drawn token; True if the reply is complete, so that nothing may follow."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()


class Grammars:
    """Compiles grammars for one tokenizer. What that needs is made at first use: it takes a while."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may be more than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Any = None

    def compile(self, params: SamplingParams) -> Grammar:
        """The grammar that `params` asks for; InvalidRequest, naming the field, if it is not one."""
        field = "json_schema" if params.json_schema is not None else "regex" if params.regex is not None else "choice"
        try:
            import llguidance
        except ImportError:
            raise InvalidRequest(
                f"{field} constrains the reply, which needs a package: pip install 'minitui[structured]'", field
            ) from None
        try:
            source = _source(llguidance.LLMatcher, params)
        except ValueError as error:
            raise InvalidRequest(f"{field} cannot be used as a grammar: {error}", field) from error
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=list(self._tokenizer.eos_ids)
            )
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"{field} cannot be used as a grammar: {matcher.get_error()}", field)
        return Grammar(matcher, -(-self._vocab_size // 32))


def _source(matcher: Any, params: SamplingParams) -> str:
    if params.json_schema is not None:
        schema = params.json_schema
        return matcher.grammar_from_json_schema(json.dumps(schema) if isinstance(schema, dict) else schema)
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in params.choice))
