"""Constrains replies to a JSON schema, a regular expression, choices or a grammar, with the library llguidance.

Each constraint is compiled to a grammar when its request is submitted. A request with an invalid grammar is refused.
Before each draw, the grammar computes a mask of the allowed tokens. When the step is committed, the grammar advances by
the drawn token. The extra "structured" installs llguidance.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine.errors import InvalidRequest, not_installed
from engine.params import SamplingParams
from engine.text.json_schema import rewrite
from engine.text.tokenizer import Tokenizer

MAX_SYMBOLS = 20_000  # symbols in a grammar: compiling this many takes about 0.3 s and delays the next step
MAX_REASON = 300  # characters of an error message


class Grammar:
    """The grammar of one reply. `failed`: a sentence that says why the grammar cannot continue; empty if it can."""

    def __init__(self, matcher: Any, tokens: np.ndarray) -> None:
        """`tokens`: a mask in the format of `mask()` that allows every id that the model can draw."""
        self.failed = ""
        self._matcher = matcher
        self._tokens = tokens

    def mask(self) -> np.ndarray:
        """Returns the mask of the tokens allowed next, int32 [ceil(vocab_size / 32)].

        Bit t % 32 of word t // 32 is 1 if token t is allowed. `failed` is set if the mask allows no token, or if
        llguidance finds the grammar too costly. In the second case the mask allows only the end of the reply.
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
    """Compiles grammars for one tokenizer. The first compilation takes longer, because it reads the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's vocabulary size, which may be larger than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._words: tuple[tuple[str, ...], list[list[int]]] = ((), [])

    def compile(self, params: SamplingParams) -> Grammar:
        """Returns the compiled grammar of `params`. Raises InvalidRequest, with the field, if it cannot be compiled."""
        field = params.constraint or "json_schema"
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequest(not_installed(f"a reply constrained by {field}", error, "structured"), field) from None
        try:
            vocabulary, added_end = self._vocabulary_for(llguidance, field)
            source = _source(llguidance.LLMatcher, params)
            limits = llguidance.LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
            matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
            grammar = Grammar(matcher, self._tokens(added_end))
            if not matcher.is_error():
                grammar.mask()  # sets `failed` if no reply can satisfy the grammar
        except (InvalidRequest, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance is written in Rust, and a Rust panic is not an Exception
            raise InvalidRequest(f"{field} cannot be used as a grammar: {_short(str(error))}", field) from error
        if grammar.failed or matcher.is_error():
            no_token = "no token of this model can begin a reply that satisfies it"
            reason = _reason(matcher) if matcher.is_error() else no_token
            raise InvalidRequest(f"{field} cannot be used as a grammar: {reason}", field)
        return grammar

    def words(self, texts: tuple[str, ...]) -> list[list[int]]:
        """Returns the token ids of each word, encoded alone and encoded after a space, as in vLLM.

        The second encoding is left out if it only adds the space as a separate token. The result of the last call is
        kept, because the samples of a request have the same words.
        """
        if self._words[0] != texts:
            try:
                self._words = texts, [ids for text in texts for ids in self._spellings(text.lstrip())]
            except InvalidRequest as error:
                error.field = "bad_words"
                raise
        return self._words[1]

    def _spellings(self, text: str) -> list[list[int]]:
        bare, spaced = (self._tokenizer.encode(part, add_special_tokens=False) for part in (text, " " + text))
        found = [bare, spaced] if len(spaced) == len(bare) and spaced[:1] != bare[:1] else [bare]
        return [ids for ids in found if ids and max(ids) < self._vocab_size]  # other ids have no logit

    def _tokens(self, added_end: int | None) -> np.ndarray:
        """Returns the mask of all ids that the model can draw; `added_end` is never allowed."""
        bits = np.arange(-(-self._vocab_size // 32) * 32)
        allowed = (bits < self._vocab_size) & (bits != (-1 if added_end is None else added_end))
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _vocabulary_for(self, llguidance: Any, field: str) -> tuple[Any, int | None]:
        """Returns the tokenizer in llguidance's form, and the id of the end token that was added (None: no token).

        The result is cached. Raises InvalidRequest if llguidance cannot read this kind of tokenizer.
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
                "Remove the constraint, or use a model with a byte-level or byte-fallback tokenizer",
                field,
            )
        return self._vocabulary

    def _read_tokenizer(self, llguidance: Any) -> tuple[Any, int | None]:
        source, size = self._tokenizer.to_json(), self._tokenizer.vocab_size
        ends = [token for token in self._tokenizer.eos_ids if 0 <= token < min(size, self._vocab_size)]
        added_end = None
        if not ends:  # llguidance needs an end token: add one that no mask allows
            source, added_end = self._tokenizer.json_with_another_token("<end of the grammar>")
            ends, size = [added_end], added_end + 1
        return llguidance.LLTokenizer(source, n_vocab=max(size, self._vocab_size), eos_token=ends), added_end


def _reason(matcher: Any) -> str:
    """Returns why a matcher has failed."""
    error = matcher.get_error().replace("<non-verbose/>", "")
    return "no reply can satisfy it" if error.startswith(("NoExtension", "Unsatisfiable")) else _short(error)


def _short(error: str) -> str:
    """Returns the error in one short line, because it may quote a whole grammar."""
    line = " ".join(error.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def _source(matcher: Any, params: SamplingParams) -> str:
    if params.json_schema is not None:
        text = params.json_schema if isinstance(params.json_schema, str) else json.dumps(params.json_schema)
        schema = rewrite(json.loads(text), params.disable_additional_properties)
        return matcher.grammar_from_json_schema(json.dumps(schema))
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        from llguidance.gbnf_to_lark import any_to_lark

        return matcher.grammar_from_lark(any_to_lark(params.grammar))
    return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in params.choice))
