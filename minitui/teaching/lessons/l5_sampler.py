"""L5: from logits to a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.teaching.lessons import bars
from minitui.teaching.lessons.bars import KEPT, MIN_P, SEED, VISIBLE, show_draw, text_of
from minitui.teaching.lessons.page import Seen, TypeIn
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.stage import Stage
from minitui.text import count, listed
from minitui.viewmodel.board import Candidate, Candidates

WORDS = (" key", " value", " cache")  # each is one token; a reply has no other tokens
PROMPT = "Say a word, key."
NONE = "no penalty"
PENALTIES: dict[str, dict[str, Any]] = {
    NONE: {}, "repetition_penalty 1.2": {"repetition_penalty": 1.2},
    "frequency_penalty 0.5": {"frequency_penalty": 0.5}, "presence_penalty 1": {"presence_penalty": 1.0},
}
LEAST, MOST = 4, 8  # words that are written before the probabilities are compared
SEEDS = 40  # that are tried

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


QUESTION = "What is temperature?"
HOT = 2.5  # the temperature of the replies with a seed
REPLY, GIVEN = 6, 3  # tokens of such a reply, and of its beginning that becomes part of a prompt
TIMES = 3  # in the prediction, how much likelier one token is than another
CLOSING = {"top_k": KEPT}


async def draw(stage: Stage, seed: int, given: Sequence[int] = ()) -> list[int]:
    """Asks QUESTION; returns the reply's tokens. `given`: its first tokens, which are then part of the prompt."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": QUESTION}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)
    params = SamplingParams(temperature=HOT, max_tokens=REPLY - len(given), ignore_eos=True, seed=seed)
    return [token for delta in await stage.complete([*ids, *given], params) for token in delta.ids]


async def same_seed(stage: Stage) -> Seen:
    """Samples a reply with one seed, alone and in a batch; its end once more, and then other seeds. The answer: the end
    is as before (0), begins as the reply did (1), or neither (2)."""
    alone = await draw(stage, SEED)
    crowd = [stage.chat(max_tokens=30, whole=True) for _ in range(3)]
    for session in crowd:
        await stage.ask(session, "What is top-k sampling?")
    await stage.step(2)
    together = await draw(stage, SEED)
    end = await draw(stage, SEED, alone[:GIVEN])
    before = " " * (len(_joined(stage, alone[:GIVEN])) + 1)  # the end stands below the end of the first reply
    replies = [(f"seed {seed}", await draw(stage, seed)) for seed in (SEED + 1, SEED + 2)]
    lines = [
        f"   {name:<17}{_joined(stage, tokens)}"
        for name, tokens in (("alone", alone), (f"with {len(crowd)} others", together))
    ]
    lines.append(f"   {f'from token {GIVEN + 1} on':<17}{before}{_joined(stage, end)}")
    lines += [f"   {name:<17}{_joined(stage, tokens)}" for name, tokens in replies]
    if alone != together:
        return Seen("\n".join(lines) + "\n\nThe first two replies differ: the next page says why.")
    same_end = end == alone[GIVEN:]
    third = (
        " The third is the end of the first: the tokens had the same positions in the text, so they got the same noise."
    )
    return Seen(
        f"With seed {SEED}, then with other seeds (“|” separates tokens):\n   {'temperature':<17}{HOT:g}\n"
        + "\n".join(lines)
        + "\nThe second reply is equal to the first: other requests do not change the noise."
        + third * same_end,
        0 if same_end else 1 if end == alone[:-GIVEN] else 2,
    )


def _joined(stage: Stage, tokens: list[int]) -> str:
    return "|".join(text_of(stage, token) for token in tokens).replace("\n", " ")


async def close(stage: Stage) -> None:
    """Draws one token with top_k."""
    await show_draw(stage, **CLOSING)


def _tokens(stage: Stage) -> tuple[Candidate, ...]:
    board = stage.view.board
    assert isinstance(board, Candidates)
    return board.tokens


def _drawn_from(stage: Stage) -> str:
    token = next(token for i, token in enumerate(_tokens(stage)) if i == stage.view.board.drawn)  # type: ignore[union-attr]
    return f"“{token.text}”: {token.now:.1%}; without settings {token.before:.1%}"


def _first_cut(stage: Stage) -> str:
    token = next(token for token in _tokens(stage) if token.now is None)
    return f"“{token.text}”, with {token.before:.1%}: top_k keeps three tokens, and this is the fourth"


def _below_min_p(stage: Stage) -> str:
    tokens = _tokens(stage)
    least = MIN_P * max(token.before for token in tokens)
    return ", ".join(f"“{token.text}” ({token.before:.1%})" for token in tokens if token.before < least)


SETTINGS = TypeIn("Your settings", "temperature 1.5 top_p 0.9 seed 3", 200)

LESSON = read_lesson(globals(), bars, kv_blocks=96, logprobs_mode="processed_logprobs")
