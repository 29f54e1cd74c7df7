"""Exercise `chunk`: how many tokens of a prompt does one step
compute?

A step computes one token for each running reply, and pieces
(chunks) of prompts. All its tokens together are at most its
budget, 512 here. A step takes 4 ms, and 0.05 ms for each token:
a long chunk delays the next token of every reply. Short chunks
delay the first token of the prompt.

left      tokens of this prompt that are not computed yet: at
          least 1
budget    tokens that are left of the budget of this step: at
          least 1. One for each running reply, and the chunks
          of earlier prompts in this step, are already
          subtracted: several prompts can share a step
replies   how many running replies wait for the end of this step
Return    how many tokens of the prompt this step computes: a
          whole number.

The rules: at least 1, at most `left`, at most `budget`. And
prompts must not crawl: the run, and the 99th percentile of the
times to first token, are at most 1.5 times those of the
reference.
The score: the 99th percentile of the gaps between the tokens of
a reply. The reference takes as much as it can.
"""


def chunk(left: int, budget: int, replies: int) -> int:
    # The whole prompt at once. Run it, and read which rule it
    # breaks.
    return left
