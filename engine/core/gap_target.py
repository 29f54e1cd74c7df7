"""Chooses how many prompt tokens a step computes while replies run, so that no gap between their tokens is longer than
`max_gap_ms`.

The time of a step depends on the model, the card, the lengths of the contexts and the number of replies. No formula has
all of these. But the steps are measured: each step with prompts says how many of its tokens would have filled the time
that the target leaves beside the decodes. Prompts get at least half of the time of the decodes, so a target that is too
small does not stop them. Chunks grow and shrink by at most a factor of two from step to step, so one slow step (a
garbage collection, another program) does not stop them either.
"""

from __future__ import annotations

LEAST = 16  # tokens that a step may always compute
SHARE = 128  # at first, this part of the budget: on a GPU, 64 tokens at the start of a text take no longer than 16
NEWER = 0.2  # weight of the newest step in the usual time


class GapTarget:
    """The number of prompt tokens for the next step beside replies: `tokens`, from LEAST to `most`."""

    def __init__(self, max_gap_ms: float, most: int) -> None:
        self.tokens = min(most, max(LEAST, most // SHARE))
        self._most = most
        self._target_s = max_gap_ms / 1e3
        self._decode_s = 0.0  # the usual time of a step without prompt tokens; 0: unknown

    def measured(self, decodes: int, prompt_tokens: int, took_s: float) -> None:
        """Learn from a step that was committed, and took so many seconds."""
        if not decodes:
            return
        if not prompt_tokens:
            before = self._decode_s or took_s
            self._decode_s = before + NEWER * (took_s - before)
            return
        if self._decode_s or prompt_tokens <= LEAST:  # without them, it would take no longer
            self._decode_s = min(self._decode_s or took_s, took_s)
        room, took = max(self._target_s - self._decode_s, self._decode_s / 2), took_s - self._decode_s
        fitting = prompt_tokens * room / took if took > 0 else 2.0 * self.tokens
        if fitting > self.tokens and 2 * prompt_tokens < self.tokens:
            return  # the prompts were short: the step says little about long chunks
        bounded = min(2 * self.tokens, max(self.tokens // 2, int(fitting)))
        self.tokens = max(min(LEAST, self._most), min(self._most, bounded))
