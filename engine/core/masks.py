"""Checks that a request's masks (grammar, allowed_token_ids, bad_words, min_tokens) allow at least one token."""

from __future__ import annotations

import numpy as np

from engine.core.request import Request
from engine.params import SamplingParams


def dead_end(request: Request) -> str:
    """Returns the reason why no token is allowed next, as a sentence; empty if a token is allowed.

    This function is slow, because it computes the grammar's mask. Call it only for a new request that has masks, or
    after the sampler could not draw a token.
    """
    drawn, least = len(request.ids) - request.prompt_len, request.params.min_tokens
    if request.grammar is None:
        return ""  # the only mask is min_tokens: it forbids the stop ids, which are never the whole vocabulary
    bits = np.unpackbits(request.grammar.mask().view(np.uint8), bitorder="little")
    if request.grammar.failed:
        return request.grammar.failed
    tokens = f"{drawn:,} token{'' if drawn == 1 else 's'}"
    allowed = set(np.flatnonzero(bits).tolist())
    if not allowed:
        return f"{_masks(request.params)} allows no token after {tokens}"
    if drawn < least and allowed <= request.stop_ids:
        return (
            f"after {tokens} {_masks(request.params)} allows only the end of the reply, which min_tokens = {least:,} "
            "forbids: lower min_tokens or allow more tokens"
        )
    return ""


def _masks(params: SamplingParams) -> str:
    """Returns the names of the request's masks, as the subject of a sentence."""
    names = ["allowed_token_ids"] if params.allowed_token_ids is not None else []
    names += ["bad_words"] if params.bad_words else []
    if params.structured or not names:
        names.insert(0, "the reply's grammar")
    return names[0] if len(names) == 1 else f"the combination of {', '.join(names[:-1])} and {names[-1]}"
