"""Beam search: the most likely replies, found by extending the best unfinished replies by one token at a time.

Each step asks the engine for the next token of every beam, as in vLLM. The prefix cache has the blocks of the beams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import InvalidRequest
from engine.outputs import Logprob, RequestOutput
from engine.params import MAX_LOGPROBS, SamplingParams
from engine.prompts import Prompt
from engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BeamSearchParams:
    """How far a beam search goes. Each step looks at the 2 * beam_width most likely tokens of each beam."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0  # sequences are compared by their log-probability / (tokens ** length_penalty)


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence with its log-probability. `tokens` and `text` begin with the prompt, as in vLLM."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


def search(
    generate: Callable[[list[Prompt], SamplingParams], list[RequestOutput]], prompts: list[Prompt],
    params: BeamSearchParams, tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:
    """Returns the `beam_width` best sequences of each prompt. Raises InvalidRequest."""
    width = params.beam_width
    if type(width) is not int or not 1 <= width <= MAX_LOGPROBS // 2:
        raise InvalidRequest(f"beam_width is {width!r}: it must be from 1 to {MAX_LOGPROBS // 2}", "beam_width")
    if not isinstance(params.max_tokens, int) or params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens!r}: it must be at least 1", "max_tokens")
    ends = () if params.ignore_eos or tokenizer is None else tokenizer.eos_ids
    next_token = SamplingParams(
        max_tokens=1, logprobs=2 * width, temperature=params.temperature, ignore_eos=True, detokenize=False
    )

    def score(sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return sequence.cum_logprob / length**params.length_penalty

    beams = [[BeamSearchSequence(list(prompt.ids))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        asked = [
            Prompt(None, beam.tokens, prompt.cache_salt)
            for prompt, own in zip(prompts, beams, strict=True) for beam in own
        ]
        replies = iter(generate(asked, next_token) if asked else ())
        for number, own in enumerate(beams):
            longer = []
            for beam in own:
                [choices] = next(replies).outputs[0].logprobs or [{}]
                for token, choice in choices.items():
                    sequence = BeamSearchSequence(
                        [*beam.tokens, token], [*beam.logprobs, choices], beam.cum_logprob + choice.logprob
                    )
                    if token in ends:
                        sequence.finish_reason = "stop"
                        ended[number].append(sequence)
                    else:
                        longer.append(sequence)
            beams[number] = sorted(longer, key=lambda each: -each.cum_logprob)[:width]
    outputs = []
    for done, own in zip(ended, beams, strict=True):
        for sequence in own:
            sequence.finish_reason = "length"
        best = sorted(done + own, key=score, reverse=True)[:width]
        for sequence in best:
            sequence.text = None if tokenizer is None else tokenizer.decode(sequence.tokens)
        outputs.append(BeamSearchOutput(best))
    return outputs
