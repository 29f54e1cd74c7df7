"""Constrains replies to a JSON schema, a regular expression or a list of choices, with the library llguidance.

A request's grammar is compiled when the request is submitted; an invalid grammar is refused then. The grammar makes a
mask over the vocabulary before each draw, and advances by the drawn token at commit. The library is in the extra
"structured".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine.errors import InvalidRequest, not_installed
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer

MAX_SYMBOLS = 20_000  # in a grammar: they take about 0.3 s to compile, and the engine runs no step meanwhile
MAX_REASON = 300  # characters


class Grammar:
    """The grammar of one reply. `failed`: why the grammar cannot continue, as a sentence; empty if it can."""

    def __init__(self, matcher: Any, tokens: np.ndarray) -> None:
        """`tokens`: the mask of all ids that the model can draw."""
        self.failed = ""
        self._matcher = matcher
        self._tokens = tokens

    def mask(self) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is 1 if token t is allowed next.

        The library may find here that the grammar is too costly. Then `failed` says so, and the mask allows only the
        end of the reply.
        """
        mask = np.zeros_like(self._tokens)
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        mask[: len(found)] = found[: len(mask)]
        mask &= self._tokens
        if self._matcher.is_error():
            self.failed = f"the reply's grammar cannot continue: {_reason(self._matcher)}"
        elif not mask.any():
            self.failed = "the reply's grammar cannot continue: it allows no token of this model"
        return mask

    def advance(self, token_id: int) -> bool:
        """Advance by a drawn token; return True if the reply is complete."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammars:
    """Compiles grammars for one tokenizer. The first use takes longer, because it reads the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's, which may be larger than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Any = None

    def compile(self, params: SamplingParams) -> Grammar:
        """The grammar that `params` asks for; InvalidRequest, with the name of the field, if it cannot be compiled."""
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
                grammar.mask()  # sets `failed` if no reply can satisfy the grammar
        except (InvalidRequest, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library's Rust is not an Exception
            raise InvalidRequest(f"{field} cannot be used as a grammar: {_short(str(error))}", field) from error
        if grammar.failed or matcher.is_error():
            reason = _reason(matcher) if matcher.is_error() else "no token of this model can begin its reply"
            raise InvalidRequest(f"{field} cannot be used as a grammar: {reason}", field)
        return grammar

    def _tokens(self, no_token: int | None) -> np.ndarray:
        """The mask of the model's ids, without `no_token`."""
        bits = np.arange(-(-self._vocab_size // 32) * 32)
        allowed = (bits < self._vocab_size) & (bits != (-1 if no_token is None else no_token))
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _vocabulary_for(self, llguidance: Any, field: str) -> tuple[Any, int | None]:
        """The tokenizer in the library's form, and an invented end id if the model has no end token. Both are kept.

        InvalidRequest if the library cannot read this kind of tokenizer.
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
        if not ends:  # the library needs an end token: add one, which no mask allows
            source, no_token = self._tokenizer.json_with_another_token("<end of the grammar>")
            ends, size = [no_token], no_token + 1
        return llguidance.LLTokenizer(source, n_vocab=max(size, self._vocab_size), eos_token=ends), no_token


def _reason(matcher: Any) -> str:
    """Why a matcher has failed."""
    error = matcher.get_error().replace("<non-verbose/>", "")
    return "no reply can satisfy it" if error.startswith("NoExtension") else _short(error)


def _short(error: str) -> str:
    """The error in one short line: it may quote a whole grammar."""
    line = " ".join(error.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def _source(matcher: Any, params: SamplingParams) -> str:
    if params.json_schema is not None:
        schema = params.json_schema
        return matcher.grammar_from_json_schema(json.dumps(schema) if isinstance(schema, dict) else schema)
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in params.choice))
