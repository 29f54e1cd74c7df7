"""L5: from logits to a token."""

from __future__ import annotations

from typing import Any

from engine.params import SamplingParams
from minitui.teaching.lessons.bars import KEPT, SEED, SHARP, UNKNOWN, cuts, show_draw, temperatures
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen, TypeIn
from minitui.teaching.lessons.penalties import compare_penalties
from minitui.teaching.stage import Stage
from minitui.viewmodel.board import Candidate, Candidates

QUESTION = "What is temperature?"
HOT = 2.5  # the temperature of the replies with a seed
TIMES = 3  # in the prediction, one token is so many times as likely as another
CLOSING = {"top_k": KEPT}
MIN_P = 0.1  # of a closing question


async def draw(stage: Stage, **params: Any) -> str:
    """Asks QUESTION with these sampling parameters; returns the reply's text."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": QUESTION}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)
    deltas = await stage.complete(ids, SamplingParams(**params))
    return "".join(delta.text for delta in deltas)


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


LESSON = Lesson(
    5,
    "Sampler",
    "How do the logits of all tokens become one token?",
    (
        Page(
            "The order of the stages",
            """
            The model gives a logit for each token (L0 Tokens). The sampler chooses one token. In this engine, it does
            this in 8 stages:

              1 forbid and favour  forbids tokens; logit_bias adds a number to a logit
              2 min_tokens         forbids the end token below this length
              3 penalties          lower the logits of tokens that have occurred
              4 temperature        divides the logits: below 1, likely tokens gain
              5 top_k              keeps the k likeliest tokens, and cuts the others
              6 top_p              keeps the likeliest tokens that together reach p
              7 min_p              cuts tokens below p × the largest probability
              8 draw               draws one of the tokens that are left

            Stage 1 forbids words (bad_words), all tokens outside a list (allowed_token_ids), or tokens that break a
            given form, such as JSON (grammar). Temperature 0 is greedy: the token with the largest logit is taken. The
            order differs between engines: vLLM applies min_p before top_k.
            """,
            code="engine.worker.sampler:Sampler.sample",
        ),
        Page(
            "Temperature",
            f"""
            The bars show how likely each token is as the first token of a reply to “{UNKNOWN}”. The model has learned
            no reply to this prompt, so several first tokens are likely. Each picture is a request with another
            temperature. The engine lists only the likeliest tokens: “<” marks a less likely token.

            If the logits of two tokens differ by 1, one token is e = 2.7 times as likely as the other. If they differ
            by 2, it is e × e times as likely. Temperature {SHARP} divides each logit by {SHARP}: this doubles each
            difference.
            """,
            panel="candidates",
            code="engine.worker.sampler:Sampler.sample",
            run=temperatures,
            predict=Prediction(
                f"One token is {TIMES} times as likely as another token. And at temperature {SHARP}?",
                (f"still {TIMES} times", f"{2 * TIMES} times", f"{TIMES * TIMES} times"),
                (
                    "the temperature would change no probability. But it doubles the difference of the two logits.",
                    "twice the difference would double the ratio. But the same difference again multiplies the ratio "
                    f"by {TIMES} again.",
                    "",
                ),
            ),
        ),
        Page(
            "Cuts",
            """
            Three settings cut tokens: top_k, top_p and min_p. Only the kept tokens can be drawn. The experiment uses
            the same prompt at temperature 1. Each picture is a request with another setting. A token that was cut is
            crossed out. The last picture has no cut: logit_bias adds a number to the logit of one token.

            Key i lets you type your own settings. Then the picture shows your settings.
            """,
            panel="candidates",
            code="engine.worker.sampler:Sampler._truncate",
            run=cuts,
            type_in=TypeIn("Your settings", "temperature 1.5 top_p 0.9 seed 3", 200),
            predict=Prediction(
                f"top_k {KEPT} keeps three tokens. What happens to their probabilities?",
                ("they stay as they were", "all three grow by the same factor", "only the largest grows"),
                (
                    "the probabilities would add up to less than 1. But one of the kept tokens is always drawn.",
                    "",
                    "the largest would get all that was cut. But a cut does not change the ratio of two kept tokens.",
                ),
            ),
        ),
        Page(
            "Three penalties",
            """
            A penalty lowers the logits of tokens that have occurred:

              repetition_penalty  in prompt or reply: makes the logit lower by a factor
              presence_penalty    in the reply: is subtracted from the logit once
              frequency_penalty   in the reply: is subtracted once for each occurrence

            Four requests, one without a penalty, may use only three words in their replies. All four replies begin
            alike: the first word several times, the second word once, the third word not yet.
            """,
            panel="words",
            code="engine.worker.sampler:Sampler._apply_penalties",
            run=compare_penalties,
            predict=Prediction(
                "The logit of the third word does not change. And its probability?",
                ("it stays as it was", "it grows with each penalty", "it grows or falls: this depends on the penalty"),
                (
                    "the sum would be less than 1: a penalty makes the other words less likely.",
                    "",
                    "a penalty would have to raise the logit of a word. But here each penalty lowers logits.",
                ),
            ),
        ),
        Page(
            "Repeating a reply",
            f"""
            To draw a token, this sampler adds a random number (noise) to each logit. The token with the largest sum is
            the next token. The noise has the Gumbel distribution. It is proved that with this noise, a token with a
            probability of 30 % has the largest sum in 30 % of the draws, on average.

            A request may have a seed: a number with which its reply can be repeated. The experiment samples a reply
            with seed {SEED} at temperature {HOT:g}: first alone, then beside three other requests. Both replies should
            be the same.
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
            Scheduler). A request without a seed gets a random seed. The seed is recorded, so a reply can be sampled
            again with the same noise.

            One thing can still change it: rounding. A forward pass rounds its sums. A rounded sum depends on the
            order in which its terms are added, most of all if each number has only 16 bits (half precision). In most
            programs for GPUs, this order changes with the batch size. If two tokens are almost equally likely, rounding
            may decide between them. The tests of this engine compare tokens in double precision (64 bits). There,
            rounding practically never decides.

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
