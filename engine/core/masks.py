"""Which tokens the masks of a request (its grammar, and min_tokens) leave to be drawn next; without torch."""

from __future__ import annotations

import numpy as np

from engine.core.request import Request


def dead_end(request: Request) -> str:
    """Why no token may be drawn next, as a sentence; empty if some may.

    Asks the grammar for its mask, so it is for the rare cases: a submission with both masks, a draw that failed.
    """
    drawn, least = len(request.ids) - request.prompt_len, request.params.min_tokens
    if request.grammar is None:
        return ""  # a request whose stop ids are the whole vocabulary is refused
    bits = np.unpackbits(request.grammar.mask().view(np.uint8), bitorder="little")
    if request.grammar.failed:
        return request.grammar.failed
    tokens = f"{drawn:,} token{'' if drawn == 1 else 's'}"
    allowed = set(np.flatnonzero(bits).tolist())
    if not allowed:
        return f"the reply's grammar allows no token after {tokens}"
    if drawn < least and allowed <= request.stop_ids:
        return (
            f"after {tokens} the reply's grammar allows nothing but its end, and min_tokens = {least:,} does not "
            "let it end: lower min_tokens or widen the grammar"
        )
    return ""
