"""An experiment: what do the three penalties do to the probabilities of words that have already occurred?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.teaching.lessons.page import Seen
from minitui.teaching.stage import Stage
from minitui.text import count, listed
from minitui.viewmodel.board import Candidate, Candidates

WORDS = (" key", " value", " cache")  # each is one token; a reply has no other tokens
PROMPT = "Say a word, key."
NONE = "no penalty"
PENALTIES: dict[str, dict[str, Any]] = {
    NONE: {}, "repetition_penalty 1.2": {"repetition_penalty": 1.2},
    "frequency_penalty 0.5": {"frequency_penalty": 0.5}, "presence_penalty 1": {"presence_penalty": 1.0},
}  # fmt: skip
LEAST, MOST = 4, 8  # words that are written before the probabilities are compared
SEEDS = 40  # that are tried
VISIBLE = 0.02  # each word is at least as likely without a penalty

Shares = dict[int, float]  # token -> probability


async def compare_penalties(stage: Stage) -> Seen:
    """Draws the next word after the same reply without a penalty, and with each. The answer: does the probability of
    the word that has not occurred stay (0), grow with each penalty (1), or depend on the penalty (2)?"""
    assert stage.chats.codec is not None
    tokenizer = Tokenizer(Path(stage.source.info.model_dir))
    names = {tokenizer.encode(word)[0]: word.strip() for word in WORDS}
    ids = stage.chats.codec.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    written, shares = await _same_reply(stage, ids, tuple(names))
    often, once, never = sorted(names, key=lambda token: -written.count(token))
    times = {token: written.count(token) for token in names}
    so_far = f"so far: {', '.join(f'{names[token]} {_times(times[token])}' for token in (often, once, never))}"
    before = shares[NONE]
    for name, now in shares.items():
        tokens = tuple(Candidate(names[token], before[token], now[token]) for token in (often, once, never))
        stage.view.put(Candidates(name, tokens, so_far))
        await stage.pause(4)
    lines = [f"   {'':<24}" + "".join(f"{names[token]:>9}" for token in (often, once, never))]
    for name, now in shares.items():
        lines.append(f"   {name:<24}" + "".join(f"{now[token]:>9.2%}" for token in (often, once, never)))
    grown = [now[never] / before[never] for name, now in shares.items() if name != NONE]
    return Seen(
        f"All four replies began with {listed([names[token] for token in written])}. The probabilities of the next "
        "word:\n" + "\n".join(lines) + "\n"
        f"“{names[never]}” is neither in the prompt nor in the replies: it got what the other words lost. "
        "presence_penalty lowered the two other words by the same factor: it does not count occurrences. "
        f"frequency_penalty lowered “{names[often]}” more: this word occurred {_times(times[often])}. "
        f"repetition_penalty changed each of the two logits once, too: it does not count either.",
        1 if min(grown) > 1.001 else 0 if max(grown) < 1.001 else 2,
    )


def _times(n: int) -> str:
    return {0: "not yet", 1: "once", 2: "twice"}.get(n, f"{n} times")


async def _same_reply(stage: Stage, ids: list[int], words: tuple[int, ...]) -> tuple[list[int], dict[str, Shares]]:
    """Returns words that the replies of all penalties begin with, and the probabilities of the word after them, by
    penalty. Of the three words, one occurred several times, one once, and one not yet."""
    for seed in range(SEEDS):
        replies = {}
        for name, penalty in PENALTIES.items():
            params = SamplingParams(
                max_tokens=MOST, seed=seed, allowed_token_ids=words, ignore_eos=True, logprobs=len(words), **penalty
            )
            replies[name] = [entry for delta in await stage.complete(ids, params) for entry in delta.logprobs]
        written = [entry.token_id for entry in replies[NONE]]
        for n in range(LEAST, MOST):
            if any([entry.token_id for entry in reply[:n]] != written[:n] for reply in replies.values()):
                break
            times = sorted(written[:n].count(word) for word in words)
            shares = {name: {id: math.exp(value) for id, value in reply[n].top} for name, reply in replies.items()}
            if times[:2] == [0, 1] and min(shares[NONE][word] for word in words) >= VISIBLE:
                return written[:n], shares
    raise EngineError(f"no reply of {count(SEEDS, 'seed')} has the words that this experiment needs")
