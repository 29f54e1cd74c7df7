"""Experiments: what do the settings of the sampler do to the probabilities of a reply's first token?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from engine.errors import EngineError
from engine.params import MAX_LOGPROBS, PARAMETERS, RECOMMENDED, SamplingParams
from minitui.teaching.lessons.page import Seen
from minitui.teaching.stage import Stage
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
SETTINGS = [*RECOMMENDED, "seed"]


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
        if name not in SETTINGS:
            raise EngineError(f"there is no setting {name[:40]!r} here; the settings are {', '.join(SETTINGS)}")
        try:
            settings[name] = PARAMETERS[name].parse(value)
        except ValueError:
            raise EngineError(f"{name} needs a number, not {value[:40]!r}") from None
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
    assert stage.chats.codec is not None
    for words in PROMPTS:
        ids = stage.chats.codec.apply_chat_template([{"role": "user", "content": words}], add_generation_prompt=True)
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
    assert stage.chats.codec is not None
    return stage.chats.codec.decode([token], skip_special_tokens=False)


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
