"""Replies that obey a JSON schema, a regular expression or a list of choices: masks over the vocabulary, by llguidance.

The grammar of a request is compiled when it is submitted (what cannot be compiled is refused there), asked for a mask
before each draw, and advanced by the token when it is committed. The library is the extra "structured".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine.errors import InvalidRequest, not_installed
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer

MAX_SYMBOLS = 20_000  # of a grammar: about 0.3 s to compile, in which an engine serves nobody

MAX_REASON = 300  # characters


class Grammar:
    """What one request's reply may still become. `failed`: a sentence once it cannot be followed any further."""

    def __init__(self, matcher: Any, tokens: np.ndarray) -> None:
        """`tokens`: the mask of all ids that the model can draw."""
        self.failed = ""
        self._matcher = matcher
        self._tokens = tokens

    def mask(self) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says whether token t may come next.

        A grammar can turn out too costly only now; then it has `failed`, and the mask allows the reply's end alone.
        """
        mask = np.zeros_like(self._tokens)
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        mask[: len(found)] = found[: len(mask)]
        mask &= self._tokens
        if self._matcher.is_error():
            self.failed = f"the reply's grammar cannot be followed any further: {_reason(self._matcher)}"
        elif not mask.any():
            self.failed = "the reply's grammar cannot be followed any further: no token of this model may come next"
        return mask

    def advance(self, token_id: int) -> bool:
        """Take a drawn token; True if the reply is complete, so that nothing may follow."""
        self._matcher.consume_token(token_id)
        return self.finished

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


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
        except ImportError as error:
            raise InvalidRequest(not_installed(f"a reply constrained by {field}", error, "structured"), field) from None
        try:
            vocabulary, no_token = self._vocabulary_for(llguidance, field)
            source = _source(llguidance.LLMatcher, params)
            limits = llguidance.LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
            matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
            grammar = Grammar(matcher, self._tokens(no_token))
            if not matcher.is_error():
                grammar.mask()  # what nothing can satisfy shows here
        except (InvalidRequest, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library's Rust is not an Exception
            raise InvalidRequest(f"{field} cannot be used as a grammar: {_short(str(error))}", field) from error
        if grammar.failed or matcher.is_error():
            reason = _reason(matcher) if matcher.is_error() else "no token of this model can begin its reply"
            raise InvalidRequest(f"{field} cannot be used as a grammar: {reason}", field)
        return grammar

    def _tokens(self, no_token: int | None) -> np.ndarray:
        """The mask of the model's ids, without the one that stands for an end that it does not have."""
        bits = np.arange(-(-self._vocab_size // 32) * 32)
        allowed = (bits < self._vocab_size) & (bits != (-1 if no_token is None else no_token))
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _vocabulary_for(self, llguidance: Any, field: str) -> tuple[Any, int | None]:
        """The tokenizer in the library's form, and the id that stands for the end if the model has none.

        InvalidRequest if the library cannot read this kind of tokenizer; that is found out once.
        """
        if self._vocabulary is None:
            try:
                self._vocabulary = self._read_tokenizer(llguidance)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._vocabulary = _short(str(error))
        if isinstance(self._vocabulary, str):
            raise InvalidRequest(
                f"{field} cannot be used with this model: llguidance cannot read its tokenizer ({self._vocabulary}). "
                "Ask without a constraint, or use a model with a byte-level or byte-fallback tokenizer",
                field,
            )
        return self._vocabulary

    def _read_tokenizer(self, llguidance: Any) -> tuple[Any, int | None]:
        source, size = self._tokenizer.to_json(), self._tokenizer.vocab_size
        ends = [token for token in self._tokenizer.eos_ids if 0 <= token < min(size, self._vocab_size)]
        no_token = None
        if not ends:  # the library wants one: a token that the model does not have, and that no mask allows
            source, no_token = self._tokenizer.json_with_another_token("<end of the grammar>")
            ends, size = [no_token], no_token + 1
        return llguidance.LLTokenizer(source, n_vocab=max(size, self._vocab_size), eos_token=ends), no_token


def _reason(matcher: Any) -> str:
    """Why a matcher is in its error state."""
    error = matcher.get_error().replace("<non-verbose/>", "")
    return "no reply can satisfy it" if error.startswith("NoExtension") else _short(error)


def _short(error: str) -> str:
    """One line of it, for it may quote a grammar of any length."""
    line = " ".join(error.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def _source(matcher: Any, params: SamplingParams) -> str:
    if params.json_schema is not None:
        schema = params.json_schema
        return matcher.grammar_from_json_schema(json.dumps(schema) if isinstance(schema, dict) else schema)
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in params.choice))
