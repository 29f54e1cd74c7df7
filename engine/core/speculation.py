"""Speculative decoding by prompt lookup: guess the next tokens from the request's own text, compute several at once.

A reply often repeats what stands before it: code that is edited, names, sentences of the prompt. So a draft is what
followed when the last tokens stood together before (Saxena 2023, "prompt lookup"). The step computes the last token and
the k drafts behind it in one pass, and draws at each position exactly as it would have drawn there alone: same logits,
same settings, same noise (engine/kernels/noise.py knows only seed, sample index and position). A draft is accepted if
and only if it *is* that draw; the first draw that differs is itself the right token, and ends the row's step. So a
reply has the same tokens with and without drafts, greedy or sampled; only the number of steps differs. That holds
wherever the logits are the same: exactly on a CPU in float64. In half precision, and on GPUs at all, steps of different
shapes round differently, with drafts as without; where two tokens are nearer than that, a reply may take the other
turn.

Where the reply ends inside accepted drafts, the rest is dropped. KV of rejected drafts lies beyond what counts as
computed and is overwritten by the tokens that come instead; nothing of it is published.

Rows whose draw depends on the drafts before it in the same step, beyond their logits, are not drafted for: penalties
(they count tokens) and grammars (they advance by tokens).

What it gains depends on the text. The bundled model on one core of a CPU that had other work too, one request at a
time, drafts of up to 8, with and without them in one run:

    text                                          tokens a step   drafts right   ms a token
    answers to 12 different questions                      1.00            4 %   6.9 ->  7.0   nothing repeats
    a question asked again in the same chat                8.62          100 %   7.9 ->  2.3
    a file of code again, two names changed in it          3.80           59 %   12.4 -> 4.1
    the same, with a few small edits                       6.83           89 %   23.2 -> 5.1

Qwen3-0.6B with random weights on an H200 (engine/worker/verify_graphs.py), draws dictated, `minitui bench`: an edited
file of code 0.77 -> 0.24 ms a token with one request and 1.23 -> 0.36 with eight at once (5.67 tokens a step, 91 % of
the drafts right); where nothing repeats 0.77 -> 0.83 and 1.23 -> 1.34, for steps are not overlapped then.

For the code the model computed everything but its draws were dictated, as a model of this size cannot edit. Drafts of
up to 4 give 4.92, 2.89 and 4.20 tokens a step instead. There a step that checks 8 drafts takes 1.6 times as long as one
that decodes. The longest match of 16 places, not just the latest, is worth 20 to 70 % more tokens a step on code;
3 tokens to match instead of 2 make drafts right in 10 % of the cases instead of 8 % where little repeats, and fewer.
"""

from __future__ import annotations

from engine.core.ngrams import Lookup
from engine.core.request import Request

INDEXED_TOKENS = 2048  # tokens indexed in a step, of all requests: a prompt of 100,000 at once would take 0.2 s


class PromptLookup:
    """Whom to draft for, and what. `tokens`: the longest draft of a row and step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._indexable = INDEXED_TOKENS

    def begin_step(self) -> None:
        """To be called before the drafts of a step."""
        self._indexable = INDEXED_TOKENS

    def draft(self, request: Request, start: int, room: int) -> list[int]:
        """What to compute behind the token at `start`, the last of a request: at most `room` tokens, often none."""
        room = min(room, self.tokens, request.max_total - start - 2)
        known = len(request.ids) == start + 1  # else it is still in flight
        if room <= 0 or not known or not draws_by_logits_alone(request):
            return []
        if request.lookup is None:
            request.lookup = Lookup()
        self._indexable -= request.lookup.take_in(request.ids, self._indexable)
        return request.lookup.follow(request.ids, room)

    @staticmethod
    def learn(request: Request, drafted: int, accepted: int) -> None:
        """What became of a draft; told before its accepted tokens and the one drawn after them join the text."""
        request.drafted_tokens += drafted
        request.accepted_tokens += accepted
        assert request.lookup is not None, "its draft came from there"
        request.lookup.learn(accepted, len(request.ids) + accepted + 1)


def draws_by_logits_alone(request: Request) -> bool:
    """Do the draws of this request depend on earlier tokens through the logits only?"""
    return not request.params.has_penalties and request.grammar is None
