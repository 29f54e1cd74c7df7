"""Checks that a request's masks (its grammar and min_tokens) allow at least one token."""

from __future__ import annotations

import numpy as np

from engine.core.request import Request


def dead_end(request: Request) -> str:
    """Return the reason why no token is allowed next, as a sentence; empty if a token is allowed.

    This function is slow, because it computes the grammar's mask. Call it only for a new request that has a grammar and
    min_tokens, or after the sampler could not draw a token.
    """
    drawn, least = len(request.ids) - request.prompt_len, request.params.min_tokens
    if request.grammar is None:
        return ""  # min_tokens alone forbids only the stop ids, which are never the whole vocabulary
    bits = np.unpackbits(request.grammar.mask().view(np.uint8), bitorder="little")
    if request.grammar.failed:
        return request.grammar.failed
    tokens = f"{drawn:,} token{'' if drawn == 1 else 's'}"
    allowed = set(np.flatnonzero(bits).tolist())
    if not allowed:
        return f"the reply's grammar allows no token after {tokens}"
    if drawn < least and allowed <= request.stop_ids:
        return (
            f"after {tokens} the reply's grammar allows only the end of the reply, which min_tokens = {least:,} "
            "forbids: lower min_tokens or widen the grammar"
        )
    return ""
