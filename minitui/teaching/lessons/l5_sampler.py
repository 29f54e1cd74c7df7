"""L5: from logits to a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from engine.errors import EngineError
from engine.params import MAX_LOGPROBS, PARAMETERS, RECOMMENDED, SamplingParams
from minitui.teaching.lessons.page import Seen, TypeIn
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.stage import Stage
from minitui.text import count, listed
from minitui.viewmodel.board import Candidate, Candidates

SEED = 7
# The model has no reply to such words: several first tokens are likely. How likely they are depends on its weights.
PROMPTS = ("The blocks", "And the cache", "The tokens", "The model", "A step", "Hm")
LARGEST, VISIBLE = 0.6, 0.02  # in the prompt that is taken: at most for the first token, at least for the fifth
MIN_P = 0.1
SHOWN = 8  # tokens in the panel
COLUMNS = 5  # tokens in the text
NAME_WIDTH = 21  # of a line of the table, which has at most 60 cells
COLUMN = 7
BIAS = 2.0
KEPT = 3
SHARP = 0.5  # the temperature of the prediction: it doubles the difference of two scores
CUT = ("top_k", "top_p", "min_p")  # settings that keep some tokens, without another change
EQUAL = 0.02  # factors that differ by a smaller share are equal
UNLISTED = "The engine lists only the likeliest tokens. A dash marks a token that was not cut, but is not in this list."
KNOWN = [*RECOMMENDED, "seed"]


@dataclass(frozen=True)
class Draw:
    """One draw: its settings, and the probabilities after all settings; a token that was cut is absent."""

    title: str
    now: dict[int, float]


def parse_settings(text: str) -> dict[str, Any]:
    """Returns sampling settings from pairs such as "temperature 0.7 top_k 5". Raises EngineError."""
    words = text.replace("=", " ").replace(",", " ").split()
    settings: dict[str, Any] = {}
    for name, value in zip_longest(words[::2], words[1::2], fillvalue=""):
        if name not in KNOWN:
            raise EngineError(f"there is no setting {name[:40]!r} here; the settings are {', '.join(KNOWN)}")
        settings[name] = PARAMETERS[name].parse(value)
    return settings


async def temperatures(stage: Stage) -> Seen:
    """Draws at three temperatures. The answer: at SHARP, does the ratio of two probabilities stay (0), double (1), or
    is it multiplied by itself (2)?"""
    words, ids, before = await _prompt(stage)
    columns = list(before)[:COLUMNS]
    draws = [await _draw(stage, ids, before, temperature=heat) for heat in (1.0, SHARP, 2.0)]
    one, other = columns[0], columns[2]
    ratios = [draw.now[one] / draw.now[other] for draw in draws]
    names = [f"“{text_of(stage, token)}”" for token in (one, other)]
    lines = [
        f"   {f'at {draw.title}:':<{NAME_WIDTH}}{names[0]} is about {ratio:.2g} times as likely as {names[1]}"
        for draw, ratio in zip(draws[:2], ratios, strict=False)
    ]
    return Seen(
        _table(stage, f"after “{words}”", columns, draws)
        + "\n\n" + "\n".join(lines)
        + f"\n\nAt temperature {SHARP:g}, the ratio is squared: {ratios[0]:.2g} × {ratios[0]:.2g} is about "
        f"{ratios[1]:.2g}.",
        min(range(3), key=lambda i: abs(math.log((ratios[0], 2 * ratios[0], ratios[0] ** 2)[i] / ratios[1]))),
    )


async def cuts(stage: Stage) -> Seen:
    """Draws with settings that cut tokens and with a bias, or with the settings that were typed. The answer: do the
    tokens that are kept stay as likely as before (0), grow by the same factor (1), or does only the likeliest grow
    (2)?"""
    words, ids, before = await _prompt(stage)
    columns = list(before)[:COLUMNS]
    if typed := parse_settings(stage.typed):
        draws = [await _draw(stage, ids, before, **settings) for settings in ({}, typed)]
        return Seen(_table(stage, f"after “{words}”", columns, draws))
    draws = [
        await _draw(stage, ids, before, **settings)
        for settings in ({}, {"top_k": KEPT}, {"top_p": 0.6}, {"min_p": MIN_P}, {"logit_bias": {columns[-1]: BIAS}})
    ]
    growth = [[draw.now[t] / before[t] for t in columns if t in draw.now] for draw in draws if draw.title[:5] in CUT]
    alike = all(max(some) / min(some) < 1 + EQUAL for some in growth)
    grown = [[factor > 1 + EQUAL for factor in some] for some in growth]
    return Seen(
        _table(stage, f"after “{words}”", columns, draws)
        + "\n\nIn each line with a cut, all kept tokens grew by the same factor. Their sum is 1 again.",
        1 if alike and all(map(all, grown)) else 0 if not any(map(any, grown)) else 2,
    )


async def likeliest(stage: Stage, ids: list[int], **settings: Any) -> tuple[dict[int, float], int]:
    """Draws one token after `ids`. Returns {token: probability} of the likeliest tokens, and the drawn token. The
    probabilities are those of the engine's own sampler, after all its stages; a token that was cut is absent."""
    params = SamplingParams(**({"seed": SEED} | settings), max_tokens=1, logprobs=MAX_LOGPROBS)
    [entry] = (await stage.complete(ids, params))[0].logprobs
    return {token: math.exp(value) for token, value in entry.top if value > -math.inf}, entry.token_id


async def show_draw(stage: Stage, **settings: Any) -> None:
    """Draws the first token of the reply to a prompt of PROMPTS, and shows the draw."""
    _, ids, before = await _prompt(stage)
    await _draw(stage, ids, before, **settings)


async def _prompt(stage: Stage) -> tuple[str, list[int], dict[int, float]]:
    """Returns the first prompt of PROMPTS after which several tokens are likely and MIN_P would cut some of those that
    are shown (else the last prompt), its ids, and the probabilities of the likeliest tokens after it, without
    settings."""
    for words in PROMPTS:
        ids = stage.prompt(words)
        before = (await likeliest(stage, ids))[0]
        shares = list(before.values())
        if shares[0] <= LARGEST and shares[COLUMNS - 1] >= VISIBLE and shares[SHOWN - 1] < MIN_P * shares[0]:
            break
    return words, ids, before


async def _draw(stage: Stage, ids: list[int], before: dict[int, float], **settings: Any) -> Draw:
    """Draws one token, and shows the tokens that are likeliest without settings, and the drawn token."""
    now, drawn = await likeliest(stage, ids, **settings)
    shown = list(before)[:SHOWN]
    if drawn not in shown:
        shown = [*shown[:-1], drawn]
    rest = min(now.values()) if len(now) == MAX_LOGPROBS else None  # an unlisted token has at most this probability
    tokens = [
        Candidate(
            text_of(stage, token), before.get(token, 0.0), now.get(token, rest), token not in now and rest is not None
        )
        for token in shown
    ]
    title = _title(stage, settings)
    line = f"drawn with seed {settings.get('seed', SEED)}: “{text_of(stage, drawn)}”"
    stage.view.put(Candidates(title, tuple(tokens), line, shown.index(drawn)))
    await stage.pause(2.5)
    return Draw(title, now)


def text_of(stage: Stage, token: int) -> str:
    """Returns the text of a token."""
    return stage.codec.decode([token], skip_special_tokens=False)


def _table(stage: Stage, head: str, columns: Sequence[int], draws: Sequence[Draw]) -> str:
    """Returns a line for each draw, with the probabilities of the tokens of `columns`; `head` is over the names."""
    lines = [f"   {head:<{NAME_WIDTH}}" + "".join(f"{_heading(stage, token):>{COLUMN}}" for token in columns)]
    for draw in draws:
        shares = [
            _share(draw.now[token]) if token in draw.now else "cut" if len(draw.now) < MAX_LOGPROBS else "-"
            for token in columns
        ]
        name = draw.title
        if len(name) > NAME_WIDTH:
            lines.append(f"   {name}")
            name = ""
        lines.append(f"   {name:<{NAME_WIDTH}}" + "".join(f"{share:>{COLUMN}}" for share in shares))
    note = f"\n\n{UNLISTED}" if any(line.endswith("-") or " - " in line for line in lines) else ""
    return "\n".join(lines) + note


def _share(share: float) -> str:
    """Returns a probability with as many digits as the ratios of two probabilities need."""
    return "100%" if share > 0.99995 else f"{share:.2%}"


def _heading(stage: Stage, token: int) -> str:
    text = repr(text_of(stage, token))
    return text if len(text) < COLUMN else text[: COLUMN - 2] + "…"


def _title(stage: Stage, settings: dict[str, Any]) -> str:
    if not settings:
        return "no setting"
    named = {
        name: ", ".join(f"“{text_of(stage, token)}” {bias:+g}" for token, bias in value.items())
        if isinstance(value, dict) else f"{value:g}"
        for name, value in settings.items()
    }
    return ", ".join(f"{name} {value}" for name, value in named.items())


WORDS = (" key", " value", " token")  # each is one token; a reply has no other tokens
PROMPT = "Say a word, please."
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
    tokenizer = stage.tokenizer
    names = {tokenizer.encode(word)[0]: word.strip() for word in WORDS}
    written, shares = await _same_reply(stage, stage.prompt(PROMPT), tuple(names))
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
    params = SamplingParams(temperature=HOT, max_tokens=REPLY - len(given), ignore_eos=True, seed=seed)
    deltas = await stage.complete([*stage.prompt(QUESTION, stage.system), *given], params)
    return [token for delta in deltas for token in delta.ids]


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

LESSON = read_lesson(globals(), kv_blocks=96, logprobs_mode="processed_logprobs")
