"""The outputs of LLM and AsyncLLM, with the names that they have in vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.step import TokenLogprobs
from engine.params import RequestOutputKind, SamplingParams
from engine.prompts import Prompt
from engine.text.output import Delta
from engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token. `rank`: 1 for the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """The times of a reply in seconds, without the time while the engine was paused. arrival_time is on the clock of
    time.time(), the times that end in _ts on the clock of time.monotonic()."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a reply. `token_ids` includes the end token; `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # None unless logprobs were requested
    logprobs: list[dict[int, Logprob]] | None = None  # by position: {token id: Logprob}, the drawn token first
    finish_reason: str | None = None  # stop, length, abort or "error: …"; None: the sample has not ended
    stop_reason: int | str | None = None  # the stop string or the id of stop_token_ids that ended the sample
    metrics: dict[str, Any] = field(default_factory=dict)  # of this sample: more facts than RequestOutput.metrics

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` samples."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # by position; the first token has None
    finished: bool = False
    num_cached_tokens: int | None = None  # prompt tokens of the prefix cache; None until the first sample has ended
    metrics: RequestMetrics | None = None  # of the first sample


class Collector:
    """Builds the RequestOutput of one prompt from its deltas."""

    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        samples = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            for sample in samples:
                sample.cumulative_logprob, sample.logprobs = 0.0, []
        self.output = RequestOutput(request_id, prompt.text, prompt.ids, samples)
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        self._params, self._tokenizer = params, tokenizer
        self._arrived = RequestMetrics(time.time(), time.monotonic())

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta of sample `index`."""
        output, sample = self.output, self.output.outputs[index]
        sample.text += delta.text
        sample.token_ids += delta.ids
        if sample.logprobs is not None:
            sample.logprobs += self._listed(delta.logprobs, self._params.logprobs or 0)
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(e.logprob for e in delta.logprobs)
        if output.prompt_logprobs is not None:
            output.prompt_logprobs += self._listed(delta.prompt_logprobs, self._params.prompt_logprobs or 0)
        if delta.finish_reason:
            sample.finish_reason, sample.metrics = delta.finish_reason, delta.metrics or {}
            sample.stop_reason = sample.metrics.get("stop_reason")
            output.finished = all(each.finished() for each in output.outputs)
            if index == 0:
                output.num_cached_tokens = sample.metrics.get("cached_tokens")
                output.metrics = self._times(sample.metrics)

    def take(self) -> RequestOutput | None:
        """Returns what params.output_kind wants after a delta: the reply so far, the news, or the whole reply (else
        None). Later deltas do not change it."""
        if self._params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self.output if self.output.finished else None
        taken = self._copy()
        if self._params.output_kind is RequestOutputKind.DELTA:
            for sample in self.output.outputs:
                sample.text, sample.token_ids = "", []
                sample.logprobs = None if sample.logprobs is None else []
        return taken

    def _copy(self) -> RequestOutput:
        samples = [
            replace(sample, token_ids=list(sample.token_ids), logprobs=None if sample.logprobs is None
                    else list(sample.logprobs))
            for sample in self.output.outputs
        ]
        scores = self.output.prompt_logprobs
        return replace(self.output, outputs=samples, prompt_logprobs=None if scores is None else list(scores))

    def _listed(self, entries: Sequence[TokenLogprobs], top: int) -> list[dict[int, Logprob]]:
        listed = []
        for entry in entries:
            ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
            own = (entry.token_id, entry.logprob, entry.rank)
            found = [own, *(each for each in ranked if each[0] != entry.token_id)]
            listed.append({token: Logprob(logprob, rank, self._text(token)) for token, logprob, rank in found})
        return listed

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _times(self, metrics: dict[str, Any]) -> RequestMetrics:
        queued, tokens, rate = self._arrived.queued_ts, metrics["output_tokens"], metrics["decode_tok_s"]
        first = queued + metrics["ttft_ms"] / 1e3
        return replace(
            self._arrived, scheduled_ts=queued + metrics["queue_ms"] / 1e3, first_token_ts=first,
            last_token_ts=first + ((tokens - 1) / rate if rate else 0.0),
            first_token_latency=metrics["ttft_ms"] / 1e3, num_generation_tokens=tokens,
        )
