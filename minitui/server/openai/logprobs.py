"""Converts log-probabilities to OpenAI's two formats: one for chat, one for completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from engine.core.step import TokenLogprobs
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # replaces -inf, which JSON cannot express


def without_end(
    entries: Sequence[TokenLogprobs], finish_reason: str, eos_ids: Collection[int]
) -> Sequence[TokenLogprobs]:
    """Returns the entries without the end token, which is not part of the answer."""
    ended = finish_reason == "stop" and entries and entries[-1].token_id in eos_ids
    return entries[:-1] if ended else entries


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """Returns the logprobs for /v1/chat/completions: one object per token, with at most `top` alternatives."""
    return {
        "content": [
            {
                **_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in entry.top[:top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


class Offsets:
    """Computes where each token of a reply begins in the reply's text, in characters. A token that is only a part of a
    character gets the position of that character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0) -> None:
        """`start`: the position of the first token; below 0 if the text does not show the first tokens."""
        self._tokenizer = tokenizer
        self._text = tokenizer.detokenizer(skip_special_tokens)
        self._shown = start

    def take(self, token_id: int) -> int:
        """Returns the position of the next token."""
        own, piece, at = _text(self._tokenizer, token_id), self._text.push([token_id]), self._shown
        self._shown += len(piece)
        # `piece` may begin with an incomplete character of earlier tokens.
        return max(0, self._shown - len(own) if piece.endswith(own) else at)


def echoed_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int, shown: str
) -> dict[str, Any]:
    """Returns the logprobs of a prompt for /v1/completions. The first token has none. `entries`: of all tokens but the
    first. `shown`: the prompt's text in the answer."""
    hidden = len(tokenizer.decode(ids, skip_special_tokens=False)) - len(shown)  # such as a BOS before the text
    offsets = Offsets(tokenizer, False, -hidden)
    first = {"tokens": [_text(tokenizer, ids[0])], "token_logprobs": [None], "top_logprobs": [None],
             "text_offset": [offsets.take(ids[0])]}
    return joined(first, completion_logprobs(tokenizer, entries, top, offsets))


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns two parts of the logprobs for /v1/completions as one."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any] | None]:
    """Returns vLLM's prompt_logprobs: null for the first token, then {token id: logprob, rank and text}."""
    listed: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
        listed.append({
            str(token): {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": _text(tokenizer, token)}
            for token, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        })
    return listed


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int, offsets: Offsets
) -> dict[str, Any]:
    """Returns the logprobs for /v1/completions: parallel lists. `offsets` must have taken all earlier tokens."""
    return {
        "tokens": [_text(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
        "top_logprobs": [
            {
                _text(tokenizer, token): max(logprob, LOWEST)
                for token, logprob in [*entry.top[:top], (entry.token_id, entry.logprob)]
            }
            for entry in entries
        ],
        "text_offset": [offsets.take(entry.token_id) for entry in entries],
    }


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}
