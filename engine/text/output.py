"""Stages 6 and 7, detokenize and emit: what a commit drew becomes text for whoever asked.

Runs after the next step has been launched, so none of it stands between two steps. Stop strings are found here, in
text: a request that meets one is ended like an abort, and what it drew beyond is never shown. Text that may be the
beginning of a stop string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.request import Request
from engine.core.step import Emitted, TokenLogprobs
from engine.trace.records import RecordLog


class TextStream(Protocol):
    """An incremental detokenizer (engine.text.detokenizer.Detokenizer)."""

    def push(self, ids: list[int]) -> str: ...
    def flush(self) -> str: ...


@dataclass(slots=True)
class Delta:
    """News of one request. `ids` are what it drew, its end token included; `text` is what may be shown of it so far.

    The last delta has `finish_reason`: stop, length, abort, or "error: …". `metrics` come with it.
    """

    request_id: int
    text: str
    ids: list[int]
    finish_reason: str = ""
    metrics: dict[str, Any] | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    def packed(self) -> tuple[Any, ...]:
        """Its fields, without those at the end that are empty: `Delta(*packed)` is the same again. What travels between
        processes, because a thousand of these tuples take 0.3 ms to pickle and 12 KB, a thousand objects 2.1 and 44."""
        if self.finish_reason or self.logprobs or self.prompt_logprobs:
            return (
                self.request_id, self.text, self.ids, self.finish_reason, self.metrics, self.logprobs,
                self.prompt_logprobs,
            )  # fmt: skip
        return (self.request_id, self.text, self.ids)


@dataclass(slots=True)
class _Open:
    request: Request
    text: TextStream | None
    held: str = ""  # decoded, but it may be the beginning of a stop string
    protected: int = 0  # characters of `held` that min_tokens protects: no stop string may end within them
    drawn: int = 0  # tokens told; the request may have drawn more in the same step


class OutputProcessor:
    """One open stream per request. `tokenizer` may be None: then there is no text, and no stop string is found."""

    def __init__(self, tokenizer: Any, log: RecordLog) -> None:
        self._tokenizer = tokenizer
        self._log = log
        self._open: dict[int, _Open] = {}

    def open(self, request: Request) -> None:
        """Begin a stream; must be called before the request's first step."""
        stream = None
        if self._tokenizer is not None:
            stream = self._tokenizer.detokenizer(skip_special_tokens=request.params.skip_special_tokens)
        self._open[request.id] = _Open(request, stream)

    def close(self, request_id: int, reason: str) -> Delta | None:
        """End a stream from outside (an abort): its last delta, with the text still held back."""
        state = self._open.pop(request_id, None)
        if state is None:
            return None
        return Delta(request_id, _rest(state), [], reason, self._metrics(state))

    def process(self, emitted: list[Emitted]) -> tuple[list[Delta], list[int]]:
        """The deltas of one commit, and the ids of requests that met a stop string and must be ended."""
        deltas: list[Delta] = []
        stopped: list[int] = []
        for item in emitted:
            state = self._open.get(item.request.id)
            if state is None:
                continue  # it met a stop string, or was aborted, while this token was in flight
            delta = Delta(item.request.id, "", [] if item.token_id is None else [item.token_id], item.finish_reason)
            state.drawn += len(delta.ids)
            if item.logprobs is not None:
                delta.logprobs = [item.logprobs]
            if item.prompt_logprobs:
                delta.prompt_logprobs = item.prompt_logprobs
            if self._advance(state, item, delta):
                stopped.append(item.request.id)
                delta.finish_reason = "stop"
            if delta.finish_reason:
                delta.metrics = self._metrics(state)
                del self._open[item.request.id]
            deltas.append(delta)
        return deltas, stopped

    def _advance(self, state: _Open, item: Emitted, delta: Delta) -> bool:
        """Decode what was drawn into the delta. True if a stop string was met."""
        if state.text is None:
            return False
        params = state.request.params
        ends = item.finish_reason == "stop" and item.token_id in state.request.stop_ids
        text = state.held
        if item.token_id is not None and not ends:  # the token that ends a reply is not part of it
            text += state.text.push([item.token_id])
        if item.finish_reason:
            text += state.text.flush()
        if state.drawn <= params.min_tokens:
            state.protected = len(text)
        for end, length in _find_stop(text, params.stop, state.protected):
            delta.text = text[: end + length] if params.include_stop_str_in_output else text[:end]
            state.held = ""
            return not item.finish_reason or item.finish_reason == "length"
        shown = len(text) - (0 if item.finish_reason else _possible_stop(text, params.stop))
        delta.text, state.held = text[:shown], text[shown:]
        state.protected = max(0, state.protected - shown)
        return False

    def _metrics(self, state: _Open) -> dict[str, Any]:
        """What the line under an answer says: milliseconds (of work: a closed gate and slow motion do not count), and
        tokens per second of the decode part.
        """
        request, drawn, now = state.request, state.drawn, self._log.worked()
        submitted = request.submitted_work
        first, admitted = request.first_token_work or now, request.admitted_work or now
        stop, at, detail = request.match
        return {
            "prompt_tokens": request.prompt_len,
            "output_tokens": drawn,
            "cached_tokens": request.cached_tokens,
            "queue_ms": (admitted - submitted) * 1e3,
            "prefill_ms": (first - admitted) * 1e3,
            "ttft_ms": (first - submitted) * 1e3,
            "decode_tok_s": (drawn - 1) / (now - first) if drawn > 1 and now > first else 0.0,
            "match": {"stop": stop, "at": at, "detail": detail},
            "preemptions": request.preemptions,
            "drafted_tokens": request.drafted_tokens,
            "accepted_tokens": request.accepted_tokens,
            "seed": request.seed,
        }


def _rest(state: _Open) -> str:
    return state.held + (state.text.flush() if state.text is not None else "")


def _find_stop(text: str, stops: tuple[str, ...], protected: int) -> list[tuple[int, int]]:
    """The earliest stop string that ends beyond `protected` characters of the text as [(where, length)], or []; of two
    that begin there, the longer."""
    found = [(text.find(stop, max(0, protected - len(stop) + 1)), -len(stop)) for stop in stops]
    return [(where, -length) for where, length in sorted(hit for hit in found if hit[0] >= 0)[:1]]


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
