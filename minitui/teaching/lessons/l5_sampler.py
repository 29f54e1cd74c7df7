"""L5: from logits to a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from engine.errors import EngineError
from engine.params import MAX_LOGPROBS, SamplingParams
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen, TypeIn
from minitui.teaching.lessons.penalties import compare_penalties
from minitui.teaching.stage import Stage
from minitui.viewmodel.board import Candidate, Candidates

QUESTION = "What is temperature?"
SEED = 7
UNKNOWN = "The blocks"  # the model has no answer to this prompt: several first tokens are likely
SHOWN = 8  # tokens in the panel
COLUMNS = 5  # tokens in the text
NAME_WIDTH = 21  # of a line of the table, which has at most 60 cells
COLUMN = 7
BIAS = 2.0
KEPT = 3
SHARP = 0.5  # the temperature of the prediction: it doubles the difference of two scores
HOT = 2.5  # the temperature of the replies with a seed
TIMES = 3  # in the prediction, one token is so many times as likely as another
CLOSING = {"top_k": KEPT}
MIN_P = 0.1  # of a closing question
UNLISTED = "The engine lists only the likeliest tokens. A dash marks a token that was not cut, but is not in this list."
PICTURES: tuple[dict[str, float], ...] = (
    {"temperature": SHARP}, {"temperature": 1.0}, {"temperature": 2.0}, {"top_k": KEPT}, {"top_p": 0.6}, {"min_p": 0.1},
)  # fmt: skip
SETTINGS: dict[str, Callable[[str], float]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float, "seed": int,
}  # fmt: skip


async def draw(stage: Stage, **params: Any) -> str:
    """Asks QUESTION with these sampling parameters; returns the reply's text."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": QUESTION}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)
    deltas = await stage.complete(ids, SamplingParams(**params))
    return "".join(delta.text for delta in deltas)


def parse_settings(text: str) -> dict[str, Any]:
    """Returns sampling settings from pairs such as "temperature 0.7 top_k 5". Raises EngineError."""
    words = text.replace("=", " ").replace(",", " ").split()
    settings: dict[str, Any] = {}
    for name, value in zip_longest(words[::2], words[1::2], fillvalue=""):
        if name not in SETTINGS:
            raise EngineError(f"there is no setting {name[:40]!r} here; the settings are {', '.join(SETTINGS)}")
        try:
            settings[name] = SETTINGS[name](value)
        except ValueError:
            raise EngineError(f"{name} needs a number, not {value[:40]!r}") from None
    return settings


async def likeliest(stage: Stage, ids: list[int], **settings: Any) -> tuple[dict[int, float], int]:
    """Draws one token after `ids`. Returns {token: probability} of the likeliest tokens, and the drawn token.

    The probabilities are those of the engine's own sampler, after all its stages; a token that was cut is absent.
    """
    params = SamplingParams(**({"seed": SEED} | settings), max_tokens=1, logprobs=MAX_LOGPROBS)
    [entry] = (await stage.complete(ids, params))[0].logprobs
    return {token: math.exp(value) for token, value in entry.top if value > -math.inf}, entry.token_id


def candidates(
    stage: Stage, title: str, before: dict[int, float], now: dict[int, float], drawn: int, seed: int
) -> Candidates:
    """Returns the picture of one draw: the tokens that are likeliest by themselves, and the drawn token."""
    shown = list(before)[:SHOWN]
    if drawn not in shown:
        shown = [*shown[:-1], drawn]
    rest = min(now.values()) if len(now) == MAX_LOGPROBS else None  # an unlisted token has at most this probability
    tokens = [
        Candidate(
            _text(stage, token), before.get(token, 0.0), now.get(token, rest), token not in now and rest is not None
        )
        for token in shown
    ]
    line = f"drawn with seed {seed}: “{_text(stage, drawn)}”"
    return Candidates(title, tuple(tokens), line, shown.index(drawn))


def _text(stage: Stage, token: int) -> str:
    assert stage.chats.codec is not None
    return stage.chats.codec.decode([token], skip_special_tokens=False)


async def move_the_bars(stage: Stage) -> Seen:
    """Redraws the probabilities of a reply's first token with other settings, or with the settings that were typed."""
    assert stage.chats.codec is not None
    ids = stage.chats.codec.apply_chat_template([{"role": "user", "content": UNKNOWN}], add_generation_prompt=True)
    before, _ = await likeliest(stage, ids)
    columns = list(before)[:COLUMNS]
    if typed := parse_settings(stage.typed):
        pictures = [{}, typed]
    else:
        pictures = [*PICTURES, {"logit_bias": {columns[-1]: BIAS}}]
    lines = [f"   {'':<{NAME_WIDTH}}" + "".join(f"{_heading(stage, token):>{COLUMN}}" for token in columns)]
    sharp: dict[int, float] = {}
    for settings in pictures:
        now, drawn = await likeliest(stage, ids, **settings)
        title = _title(stage, settings)
        sharp = now if settings == PICTURES[0] else sharp
        stage.view.put(candidates(stage, title, before, now, drawn, settings.get("seed", SEED)))
        shares = [
            f"{now[token]:.1%}" if token in now else "cut" if len(now) < MAX_LOGPROBS else "-" for token in columns
        ]
        lines += [f"   {title}"] if len(title) > NAME_WIDTH else []
        name = "" if len(title) > NAME_WIDTH else title
        lines.append(f"   {name:<{NAME_WIDTH}}" + "".join(f"{share:>{COLUMN}}" for share in shares))
        await stage.pause(2.5)
    last = {"temperature": 2.0} | typed
    seed = last.pop("seed", SEED)
    draws, tokens = [], []
    for again in (seed, seed, seed + 1, seed + 2, seed + 3):
        now, drawn = await likeliest(stage, ids, **last, seed=again)
        stage.view.put(candidates(stage, _title(stage, last), before, now, drawn, again))
        draws.append(f"seed {again}: “{_text(stage, drawn)}”")
        tokens.append(drawn)
        await stage.pause(1.5)
    same = "the same token" if tokens[0] == tokens[1] else "two different tokens"
    two = _ratios(before, sharp, columns[0], columns[2]) if not typed else None
    return Seen(
        (_ratio_lines(stage, columns[0], columns[2], two) if two is not None else "")
        + "\n".join(lines)
        + (f"\n\n{UNLISTED}" if any(line.endswith("-") or " - " in line for line in lines) else "")
        + f"\n\nDrawn with {_title(stage, last)}:\n   {', '.join(draws[:2])}\n   {', '.join(draws[2:])}"
        + f"\nThe same seed gave {same}.",
        None if two is None else _growth(*two),
    )


def _heading(stage: Stage, token: int) -> str:
    text = repr(_text(stage, token))
    return text if len(text) < COLUMN else text[: COLUMN - 2] + "…"


def _title(stage: Stage, settings: dict[str, Any]) -> str:
    if not settings:
        return "no setting"
    named = {
        name: ", ".join(f"“{_text(stage, token)}” {bias:+g}" for token, bias in value.items())
        if isinstance(value, dict) else f"{value:g}"
        for name, value in settings.items()
    }  # fmt: skip
    return ", ".join(f"{name} {value}" for name, value in named.items())


def _ratios(before: dict[int, float], sharp: dict[int, float], one: int, other: int) -> tuple[float, float]:
    """Returns how many times as likely `one` is as `other`: without settings, and at temperature SHARP."""
    return before[one] / before[other], sharp[one] / sharp[other]


def _ratio_lines(stage: Stage, one: int, other: int, two: tuple[float, float]) -> str:
    """Returns a table of the two numbers of `_ratios`, and a sentence about the pair."""
    names = [f"“{_text(stage, token)}”" for token in (one, other)]
    return (
        f"How many times as likely is {names[0]} as {names[1]}?\n"
        f"   {'temperature 1':<{NAME_WIDTH}}{two[0]:>{COLUMN}.1f}\n   {_title(stage, PICTURES[0]):<{NAME_WIDTH}}"
        f"{two[1]:>{COLUMN}.1f}, about {two[0]:.1f} × {two[0]:.1f}\n\n"
    )


def _growth(before: float, sharp: float) -> int:
    """Returns the right choice: did the ratio stay, double, or was it multiplied by itself?"""
    expected = before, 2 * before, before * before
    return min(range(3), key=lambda i: abs(math.log(expected[i] / sharp)))


async def same_seed(stage: Stage) -> Seen:
    """Samples a reply with one seed, alone and in a batch, and then with other seeds."""
    hot: dict[str, Any] = {"temperature": HOT, "max_tokens": 9, "ignore_eos": True}
    alone = await draw(stage, **hot, seed=SEED)
    crowd = [stage.chat(max_tokens=30, whole=True) for _ in range(3)]
    for session in crowd:
        await stage.ask(session, "What is top-k sampling?")
    await stage.step(2)
    together = await draw(stage, **hot, seed=SEED)
    replies = [(f"seed {SEED}, alone", alone), (f"seed {SEED}, with {len(crowd)} others", together)]
    replies += [(f"seed {seed}", await draw(stage, **hot, seed=seed)) for seed in (SEED + 1, SEED + 2)]
    lines = [f"   {name:<22}{_short(text)}" for name, text in replies]
    if alone != together:
        return Seen("\n".join(lines) + "\n\nThe two replies with one seed differ: the next page says why.")
    return Seen(
        "\n".join(lines) + "\n\nBoth replies with the same seed are the same. The noise is computed from the seed, the "
        "position in the text and the token's id. (If a request asks for several replies, the number of the reply is "
        "used, too.) No other request can change these numbers.",
        1,
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) < 46 else text[:45] + "…")


async def close(stage: Stage) -> None:
    """Draws one token with top_k."""
    assert stage.chats.codec is not None
    ids = stage.chats.codec.apply_chat_template([{"role": "user", "content": UNKNOWN}], add_generation_prompt=True)
    before, _ = await likeliest(stage, ids)
    now, drawn = await likeliest(stage, ids, **CLOSING)
    stage.view.put(candidates(stage, _title(stage, CLOSING), before, now, drawn, SEED))


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


LESSON = Lesson(
    5,
    "Sampler",
    "How do the scores of all tokens become one token?",
    (
        Page(
            "The order of the stages",
            """
            The model gives a score for every token: the logits. The sampler chooses one token by the scores. This
            engine's sampler has these stages:

              1 forbid and favour  forbids tokens; logit_bias adds a number to a score
              2 min_tokens         forbids the end until the reply has this many tokens
              3 penalties          lower the scores of tokens that have occurred
              4 temperature        divides the scores: below 1, the best become likelier
              5 top_k              keeps the k likeliest tokens and cuts the others
              6 top_p              keeps the likeliest until they add up to p
              7 min_p              cuts tokens below p × the largest probability
              8 draw               chooses one of the kept tokens by probability

            Stage 1 forbids words (bad_words), all tokens outside a list (allowed_token_ids), or tokens that break a
            given form, such as JSON (grammar). Temperature 0 is greedy: the token with the largest score is taken. The
            order differs between engines: vLLM applies min_p before top_k.
            """,
            code="engine.worker.sampler:Sampler.sample",
        ),
        Page(
            "Settings move the bars",
            f"""
            The bars show how likely each token is as the first token of a reply to “{UNKNOWN}”. The model has learned
            no answer to this prompt, so several first tokens are likely. Each picture is a request with other settings.
            A token that was cut is crossed out. The engine lists only the likeliest tokens: a token with “<” is less
            likely than each token of the list.

            If two scores differ by 1, the token with the larger score is e = 2.7 times as likely; if by 2, e × e times.
            Temperature {SHARP} doubles each difference. Key i lets you type your own settings.
            """,
            panel="candidates",
            code="engine.worker.sampler:Sampler._truncate",
            run=move_the_bars,
            type_in=TypeIn("Your settings", "temperature 1.5 top_p 0.9 seed 3", 200),
            predict=Prediction(
                f"One token is {TIMES} times as likely as another. And at temperature {SHARP}?",
                (f"still {TIMES} times", f"{2 * TIMES} times", f"{TIMES * TIMES} times"),
                (
                    "the temperature would change no probability. But it doubles the difference of the two scores.",
                    "twice the difference would give twice the ratio. But each difference multiplies the probability: "
                    f"the same difference a second time multiplies by {TIMES} a second time.",
                    "",
                ),
            ),
        ),
        Page(
            "Three penalties",
            """
            A penalty lowers the scores of tokens that have occurred:

              repetition_penalty  in prompt or reply: divides scores above 0, multiplies others
              presence_penalty    in the reply: is subtracted from the score once
              frequency_penalty   in the reply: is subtracted once for each occurrence

            Four requests, one without a penalty, may write only three words. So far, all have the first word several
            times, the second once, the third not yet.
            """,
            panel="candidates",
            code="engine.worker.sampler:Sampler._apply_penalties",
            run=compare_penalties,
            predict=Prediction(
                "The third word's score does not change. And its probability?",
                ("it stays as it was", "it grows with each penalty", "it grows or falls: this depends on the penalty"),
                (
                    "the three probabilities would add up to less than 1: a penalty makes the other words less likely.",
                    "",
                    "a penalty would have to raise the score of a word. But here each penalty lowers scores.",
                ),
            ),
        ),
        Page(
            "Repeating a reply",
            f"""
            To draw a token, this sampler adds a random number (noise) to each score. The token with the largest sum is
            the next token. The noise has the Gumbel distribution. For this distribution, mathematics proves: a token
            with a probability of 30 % has the largest sum in 30 % of the draws, on average.

            A request may have a seed, so that its reply can be repeated. The experiment samples a reply with seed
            {SEED} at temperature {HOT:g}: first alone, then with three others in the batch. Both replies should be the
            same.
            """,
            panel="step",
            code="engine.kernels.noise:gumbel",
            run=same_seed,
            predict=Prediction(
                "From which numbers can the engine compute the noise of a token?",
                (
                    "from the seed and the number of the engine's step",
                    "from the seed, the position and the id of the token",
                    "from the seed and the row of the request",
                ),
                (
                    "the second reply would have got other noise, because it began in a later step. But both replies "
                    "are the same.",
                    "",
                    "the second reply would have got other noise: alone, the request had the first row; beside three "
                    "others, it had the fourth. But both replies are the same.",
                ),
            ),
        ),
        Page(
            "What can still change a reply",
            """
            In this engine, the noise of a token does not depend on the batch, on the cache or on a preemption (L6
            Scheduler). A request without a seed gets a random seed. The seed is recorded, so every reply can be sampled
            again.

            One thing can still change a reply: rounding. Each sum of a forward pass is rounded, and the result depends
            on the order of its terms, most of all in half precision (16 bits). In most programs for GPUs, this order
            changes with the batch size. If two tokens are almost equally likely, rounding may decide between them. The
            tests of this engine compare tokens in double precision (64 bits). There, rounding practically never
            decides.

            If the logits of a request are not finite numbers, this request ends with an error. The others continue.
            """,
            code="engine.kernels.noise:request_keys",
        ),
    ),
    close,
    (
        Check(
            "How likely was the drawn token, with and without the settings?",
            "candidates",
            "the candidates: the two numbers beside the arrow.",
            _drawn_from,
        ),
        Check(
            "Which is the likeliest token that was cut, and why?",
            "candidates",
            "the candidates: the first bar that is crossed out, and the title.",
            _first_cut,
        ),
        Check(
            f"Which of these tokens would min_p {MIN_P} cut, instead of top_k?",
            "candidates",
            "the candidates: the numbers in brackets, without settings. Compare them with a tenth of the largest.",
            _below_min_p,
        ),
    ),
    {"kv_blocks": 96, "logprobs_mode": "processed_logprobs"},
)
