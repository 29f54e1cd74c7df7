"""The decode speed of a reply. Every place that shows it uses this definition: the line under a reply, the table of
requests, the events, `minitui tail`, the JSON and the exports."""

from __future__ import annotations


def decode_speed(tokens: int, us: float) -> float | None:
    """Returns the tokens per second of a reply after its first token; None without such tokens.

    `tokens`: how many tokens followed the first one. `us`: microseconds from the arrival of the first token to the
    arrival of the last one, without pauses and slow motion. A token arrives when the results of its step are on the
    host: the commit and the output of the last token do not count.
    """
    us = round(us)  # the records have whole microseconds: so the same figures give the same digits
    return tokens * 1e6 / us if tokens > 0 and us > 0 else None
