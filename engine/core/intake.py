"""Makes a request of the arguments of `Engine.add_request`, or refuses them with a sentence."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from engine.core.request import Grammar, Grammars, Request
from engine.core.token_rules import Replay, TokenRules, dead_end
from engine.errors import InvalidRequest
from engine.params import SamplingParams


class Intake:
    """Checks arguments against a model's vocabulary and the limits of a scheduler."""

    def __init__(
        self, limit_for: Callable[[int, SamplingParams], int], vocab_size: int, eos_ids: frozenset[int],
        grammars: Grammars | None,
    ) -> None:
        """`limit_for`: `Scheduler.limit_for`. `grammars`: None: replies cannot be constrained."""
        self.vocab_size = vocab_size
        self._limit_for = limit_for
        # Some checkpoints have end ids outside the model's vocabulary, which have no logit.
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._grammars = grammars

    def make(
        self, id: int, ids: list[int], params: SamplingParams, group: str, sample_index: int, *, priority: int,
        cache_salt: str, compiled: Callable[[], Grammar] | None = None,
    ) -> Request:
        """Returns the request `id`. Raises InvalidRequest if an argument is invalid or the prompt can never run.
        `compiled`: see Engine.add_request."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"the sampling parameters are of type {type(params).__name__}, not SamplingParams")
        _check_type("group", group, str)
        if not isinstance(sample_index, int) or not 0 <= sample_index < 1 << 31:
            raise InvalidRequest(f"sample_index is {_short(sample_index)}: it must be a whole number, 0 or more", "n")
        params.validate(self.vocab_size)
        if params.trace_decode_token_ids is not None:
            params = _for_replay(params)
        _check_ids(ids, self.vocab_size)
        max_total = self._limit_for(len(ids), params)
        request = Request(
            id=id, ids=list(ids), params=params, group=group, sample_index=sample_index,
            seed=secrets.randbits(63) if params.seed is None else params.seed, max_total=max_total,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            prompt_len=len(ids), grammar=self._masks(params, compiled),
        )
        if params.min_tokens or isinstance(request.grammar, TokenRules):
            self._check_first_draw(request)
        _check_type("priority", priority, int)
        _check_type("cache_salt", cache_salt, str)
        request.priority, request.cache_salt = priority, cache_salt
        return request

    def compile(self, params: SamplingParams) -> Grammar:
        """Returns the grammar that `params` specify. Raises InvalidRequest."""
        params.validate(self.vocab_size)
        if self._grammars is None:
            raise InvalidRequest("replies cannot be constrained: this engine has no tokenizer", "json_schema")
        return self._grammars.compile(params)

    def _masks(self, params: SamplingParams, compiled: Callable[[], Grammar] | None) -> Grammar | None:
        """Returns the masks of a reply, or None if every token is always allowed."""
        if params.trace_decode_token_ids is not None:
            return Replay(params.trace_decode_token_ids, self.vocab_size)
        grammar, words = None, []
        if params.structured:
            grammar = self.compile(params) if compiled is None else compiled()
        if params.bad_words:
            if self._grammars is None:
                raise InvalidRequest("replies cannot be constrained: this engine has no tokenizer", "bad_words")
            words = self._grammars.words(params.bad_words)
        if words or params.allowed_token_ids is not None:
            return TokenRules(params, words, self.vocab_size, grammar)
        return grammar

    def _check_first_draw(self, request: Request) -> None:
        """Refuse a request whose masks allow no token for the first draw."""
        least = request.params.min_tokens
        if least and len(request.stop_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"min_tokens is {least}, but each of the {self.vocab_size:,} token ids ends "
                "the reply: set min_tokens to 0 or name fewer stop_token_ids",
                "min_tokens",
            )
        reason = dead_end(request)
        if reason:
            rules = "bad_words" if request.params.allowed_token_ids is None else "allowed_token_ids"
            raise InvalidRequest(reason, "min_tokens" if least else rules)


def _for_replay(params: SamplingParams) -> SamplingParams:
    """Returns the parameters of a reply that is known: only its own length ends it."""
    reply = params.trace_decode_token_ids or ()
    for name, given in (
        ("n", params.n > 1), ("prompt_logprobs", params.prompt_logprobs is not None), ("bad_words", params.bad_words),
        ("allowed_token_ids", params.allowed_token_ids is not None), (params.constraint or "", params.structured),
    ):
        if given:
            raise InvalidRequest(f"trace_decode_token_ids and {name} cannot be combined: leave one out", name)
    return params.clone(max_tokens=len(reply), min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is of type {type(value).__name__}: it must be of type {kind.__name__}", name)


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if not isinstance(ids, Sequence):
        raise InvalidRequest(f"the prompt is of type {type(ids).__name__}: it must be a list of ids")
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
        return  # half the time of the loop, which looks for the first bad id
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token {position} of the prompt is {_short(token)}; this model's ids are 0 to {vocab_size - 1:,}"
            )


def _short(value: object) -> str:
    """Returns a number below 1e18 as text. For other values, return the type: their text may be long, or `str` may
    raise an exception."""
    number = isinstance(value, (int, float)) and abs(value) < 1e18
    return str(value) if number else f"of type {type(value).__name__}"
