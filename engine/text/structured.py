"""Constrains replies to a JSON schema, a regular expression, choices or a grammar, with the library llguidance.

Each constraint is compiled to a grammar when its request is submitted, first in a process with limits of time and
memory (engine/text/grammar_process.py). A request with an invalid or too costly grammar is refused. Before each draw,
the grammar computes a mask of the allowed tokens. When the step is committed, the grammar advances by the drawn token.
The extra "structured" installs llguidance.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np

from engine.errors import InvalidRequest, not_installed
from engine.params import SamplingParams
from engine.text.grammar_process import new_matcher, reason_of, short
from engine.text.limited_child import TEXT
from engine.text.limited_process import LimitedProcess, LimitExceeded, Limits
from engine.text.tokenizer import Tokenizer

CPU_SECONDS = 1.0  # of processor time, for the first compilation of a grammar
SECONDS = 30.0  # for the same, on a busy machine; reading the tokenizer is included
MEMORY = 2 << 30  # bytes of address space
LONGEST = 16 << 20  # bytes of a grammar
PROCESSES = 2  # compilations at once
KEPT = 64  # constraints that were compiled before and need no second check, …
KEPT_LENGTH = 1 << 18  # characters of the longest grammar whose compiled form is kept
MASK_SECONDS = 1.0  # of processor time for the masks of one reply, …
MASK_SECONDS_PER_TOKEN = 0.005  # … and in addition for each of its tokens
CANNOT_CONTINUE = "the reply's grammar cannot continue"


class Grammar:
    """The grammar of one reply. `failed`: a sentence that says why the grammar cannot continue; empty if it can."""

    def __init__(self, matcher: Any, tokens: np.ndarray) -> None:
        """`tokens`: a mask in the format of `mask()` that allows every id that the model can draw."""
        self.failed = ""
        self._matcher = matcher
        self._tokens = tokens
        self._seconds = MASK_SECONDS  # of processor time that are left

    def mask(self) -> np.ndarray:
        """Returns the mask of the tokens allowed next, int32 [ceil(vocab_size / 32)]. Bit t % 32 of word t // 32 is 1
        if token t is allowed. `failed` is set if the mask allows no token, or if llguidance finds the grammar too
        costly. In the second case the mask allows only the end of the reply."""
        mask = np.zeros_like(self._tokens)
        began = time.thread_time()
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._seconds -= time.thread_time() - began
        mask[: len(found)] = found[: len(mask)]
        mask &= self._tokens
        if self._matcher.is_error():
            self.failed = f"{CANNOT_CONTINUE}: {reason_of(self._matcher)}"
        elif not mask.any():
            self.failed = f"{CANNOT_CONTINUE}: it allows no token of this model"
        elif self._seconds < 0:  # all other replies wait for each mask
            limit = 1000 * MASK_SECONDS_PER_TOKEN
            self.failed = f"{CANNOT_CONTINUE}: it takes more than {limit:g} ms per token: make it simpler"
        return mask

    def advance(self, token_id: int) -> bool:
        began = time.thread_time()
        self._matcher.consume_token(token_id)
        self._seconds += MASK_SECONDS_PER_TOKEN - (time.thread_time() - began)
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammars:
    """Compiles grammars for one tokenizer. The first compilation takes longer, because it reads the tokenizer.
    `compile` may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's vocabulary size, which may be larger than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._reading = threading.Lock()
        self._sources: OrderedDict[bytes, str] = OrderedDict()  # digest of a constraint -> its grammar
        limits = Limits(SECONDS, MEMORY, LONGEST, CPU_SECONDS)
        self._processes: queue.LifoQueue[LimitedProcess] = queue.LifoQueue()  # the last one used is used first
        for _ in range(PROCESSES):
            self._processes.put(LimitedProcess("grammar_process.py", "compiles grammars", self._setup, limits))
        self._words: tuple[tuple[str, ...], list[list[int]]] = ((), [])

    def compile(self, params: SamplingParams) -> Grammar:
        """Returns the compiled grammar of `params`. Raises InvalidRequest, with the field, if it cannot be compiled."""
        field = params.constraint or "json_schema"
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequest(not_installed(f"a reply constrained by {field}", error, "structured"), field) from None
        vocabulary, added_end = self._vocabulary_for(llguidance, field)
        source = self._checked(params, field)
        try:
            matcher = new_matcher(llguidance, vocabulary, source)
            grammar = Grammar(matcher, self._tokens(added_end))
            if not matcher.is_error():
                grammar.mask()  # sets `failed` if no reply can satisfy the grammar
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance is written in Rust, and a Rust panic is not an Exception
            raise _refusal(field, short(str(error))) from error
        if grammar.failed or matcher.is_error():
            no_token = "no token of this model can begin a reply that satisfies it"
            raise _refusal(field, reason_of(matcher) if matcher.is_error() else no_token)
        return grammar

    def _checked(self, params: SamplingParams, field: str) -> str:
        """Returns the grammar of `params` in llguidance's notation, after it was compiled within the limits."""
        value = getattr(params, field)
        try:
            closed = params.disable_additional_properties
            request = json.dumps({"kind": field, "value": value, "closed": closed}, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(field, short(str(error))) from None
        digest = hashlib.sha256(request).digest()
        if (text := self._sources.pop(digest, None)) is not None:
            self._sources[digest] = text  # the last one used is at the end
            return text
        process = self._processes.get()
        try:
            kind, contents = process.ask(request)
        except LimitExceeded as error:
            limits = f"{CPU_SECONDS:g} s of processor time and {MEMORY >> 30} GiB of memory"
            raise _refusal(field, f"its compilation {error}; the limits are {limits}: make it smaller") from None
        finally:
            self._processes.put(process)
        text = contents.decode("utf-8", "surrogatepass")
        if kind != TEXT:
            raise _refusal(field, text)
        if len(text) <= KEPT_LENGTH:
            self._sources[digest] = text
            if len(self._sources) > KEPT:
                self._sources.popitem(last=False)
        return text

    def words(self, texts: tuple[str, ...]) -> list[list[int]]:
        """Returns the token ids of each word, encoded alone and encoded after a space, as in vLLM. The second encoding
        is left out if it only adds the space as a separate token. The result of the last call is kept, because the
        samples of a request have the same words."""
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
        """Returns the tokenizer in llguidance's form, and the id of the end token that was added (None: no token). The
        result is cached. Raises InvalidRequest if llguidance cannot read this kind of tokenizer."""
        with self._reading:
            if self._vocabulary is None:
                try:
                    source, size, ends, added_end = self._described
                    vocabulary = llguidance.LLTokenizer(source, n_vocab=size, eos_token=ends)
                    self._vocabulary = vocabulary, added_end
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    self._vocabulary = short(str(error))
        if isinstance(self._vocabulary, str):
            raise InvalidRequest(
                f"{field} cannot be used with this model: llguidance cannot read its tokenizer ({self._vocabulary}). "
                "Remove the constraint, or use a model with a byte-level or byte-fallback tokenizer",
                field,
            )
        return self._vocabulary

    @cached_property
    def _described(self) -> tuple[str, int, list[int], int | None]:
        """The tokenizer as text, its size with the model's ids, its end tokens, and the end token that was added."""
        source, size = self._tokenizer.to_json(), self._tokenizer.vocab_size
        ends = [token for token in self._tokenizer.eos_ids if 0 <= token < min(size, self._vocab_size)]
        added_end = None
        if not ends:  # llguidance needs an end token: add one that no mask allows
            source, added_end = self._tokenizer.json_with_another_token("<end of the grammar>")
            ends, size = [added_end], added_end + 1
        return source, max(size, self._vocab_size), ends, added_end

    def _setup(self) -> bytes:
        source, size, ends, _ = self._described
        return json.dumps({"tokenizer": source, "n_vocab": size, "ends": ends}).encode()


def _refusal(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field} cannot be used as a grammar: {reason}", field)
