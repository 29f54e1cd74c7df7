"""L5: from logits to a token."""

from __future__ import annotations

import math
from typing import Any

from engine.params import SamplingParams
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage
from minitui.text import ms

QUESTION = "What is temperature?"
SEED = 7


async def draw(stage: Stage, **params: Any) -> tuple[str, list[Any]]:
    """Asks QUESTION with these sampling parameters; returns the reply's text and, if requested, its logprobs."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": QUESTION}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)
    deltas = await stage.complete(ids, SamplingParams(**params))
    return "".join(delta.text for delta in deltas), [one for delta in deltas for one in delta.logprobs]


async def look_at_logits(stage: Stage) -> Seen:
    """Shows the candidates for the first token."""
    assert stage.chats.codec is not None
    text, logprobs = await draw(stage, temperature=0.0, max_tokens=3, logprobs=4)
    first = logprobs[0]
    rows = [
        (repr(stage.chats.codec.decode([token])), math.exp(logprob), f"{math.exp(logprob):6.1%}")
        for token, logprob in first.top
    ]
    return Seen(
        f"The reply begins with {text!r}. The four most likely first tokens, in the model's own "
        f"distribution:\n\n{stage.bars(rows)}\n\n"
        "Greedy sampling (temperature 0) always takes the first of these tokens.",
    )


async def same_seed(stage: Stage) -> Seen:
    """Samples a reply with one seed, alone and in a batch, and then with other seeds."""
    hot: dict[str, Any] = {"temperature": 2.5, "max_tokens": 9, "ignore_eos": True}
    alone, _ = await draw(stage, **hot, seed=SEED)
    crowd = [stage.chat(max_tokens=30, whole=True) for _ in range(3)]
    for session in crowd:
        await stage.ask(session, "What is top-k sampling?")
    await stage.step(2)
    together, _ = await draw(stage, **hot, seed=SEED)
    replies = [(f"seed {SEED}, alone", alone), (f"seed {SEED}, with {len(crowd)} others", together)]
    replies += [(f"seed {seed}", (await draw(stage, **hot, seed=seed))[0]) for seed in (SEED + 1, SEED + 2)]
    lines = [f"   {name:<22}{_short(text)}" for name, text in replies]
    return Seen("\n".join(lines), 0 if alone == together else 1)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) < 46 else text[:45] + "…")


async def close(stage: Stage) -> None:
    """Stops the engine in the middle of a greedy reply."""
    await stage.write(QUESTION, 40, 6)


def _first(stage: Stage) -> str:
    item = stage.view.first_tokens.items[-1]
    return f"{ms(item.prefill_ms)} ms: computing the prompt, and sampling from the logits of its last token"


def _drawn(stage: Stage) -> str:
    row = stage.last_row()
    return f"{row.decodes + sum(chunk[3] for chunk in row.chunks)}"


def _prompt_drew(stage: Stage) -> str:
    steps = stage.view.steps
    drew = next(steps.chunks(s)[0][3] for s in range(steps.last, -1, -1) if steps.chunks(s))
    return ("yes" if drew else "no") + ": the reply's first token is sampled from the logits of the prompt's last token"


LESSON = Lesson(
    5,
    "Sampler",
    "How do the scores of all tokens become one token?",
    (
        Page(
            "The order of the stages",
            """
            The model computes a score for every token: the logits. This engine's sampler has these stages:

              1 allow and favour   grammar, allowed_token_ids, bad_words, logit_bias
              2 min_tokens         forbids the end until the reply has this many tokens
              3 penalties          lower the scores of tokens that already occurred
              4 temperature        divides the scores: below 1 the best tokens become likelier, above 1 less likely
              5 top_k              keeps the k best tokens
              6 top_p              keeps the best tokens up to a total probability of p
              7 min_p              keeps tokens at least p times as likely as the best
              8 draw               samples one of the remaining tokens, by probability

            Temperature 0 is greedy: it takes the largest logit. A stage that no request uses is skipped. The order
            differs between engines: vLLM applies min_p before top_k.
            """,
            code="engine.worker.sampler:Sampler.sample",
        ),
        Page(
            "Candidates",
            """
            This is the first step of a reply, with the model's own probabilities (logprobs=4): the probabilities before
            temperature is applied and before any token is removed.
            """,
            panel="step",
            run=look_at_logits,
        ),
        Page(
            "Random numbers without state",
            """
            To sample by probability, add noise of a certain distribution (Gumbel) to the logits and take the token with
            the largest sum. The result is an exact sample, in one pass and without sorting. The noise is a hash of
            four numbers: the seed, the index of the sample if a request has several, the position, and the token's id.
            There is no random generator whose state changes from draw to draw.
            """,
            panel="step",
            code="engine.kernels.noise:gumbel",
            run=same_seed,
            predict=Prediction(
                f"A reply is sampled twice at a high temperature with seed {SEED}: alone, then with three others in "
                "the batch. The second reply is …",
                ("the same, token for token", "different: the batch uses random numbers in another order"),
                (
                    "",
                    "all requests would have to draw from one generator, whose state the other requests change. "
                    "But this noise depends on the request's own seed and position alone.",
                ),
            ),
        ),
        Page(
            "The same draw in every batch",
            """
            A draw depends on the position in the text, not on the steps before it. So a request may be chunked,
            preempted, resumed, cached or batched with any other requests: with the same seed its tokens stay the same.
            A request without a seed gets a random seed. The seed is recorded, so every reply can be sampled again.

            One thing can still change a reply: arithmetic. A sum of rounded numbers depends on the order of its terms,
            most of all in half precision. With another batch size the order may change. This can decide between two
            tokens that are almost equally likely. So the tests of this engine compare tokens in double precision, where
            they must be equal.

            If the logits of a request are not finite numbers, it ends with an error and the others continue.
            """,
            code="engine.kernels.noise:request_keys",
        ),
    ),
    close,
    (
        Check(
            "How many tokens did the last step sample?",
            "step",
            "the step bar: without speculation, every decoding request samples one token.",
            _drawn,
        ),
        Check(
            "Did the prompt's chunk sample a token, too?",
            "lanes",
            "the batch lanes: the request decodes in the step right after its prefill, so the prefill sampled its "
            "first token.",
            _prompt_drew,
        ),
        Check(
            "How long did it take from admission to the first token?",
            "timings",
            "the timings: time to first token, prefill part.",
            _first,
        ),
    ),
    {"kv_blocks": 96},
)
