"""L4: from logits to a token."""

from __future__ import annotations

import math
from typing import Any

from engine.params import SamplingParams
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage

QUESTION = "What is temperature?"


async def draw(stage: Stage, **params: Any) -> tuple[str, list[Any]]:
    """Ask QUESTION with these sampling parameters: the text, and the logprobs of each token if asked for."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": QUESTION}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)
    stream = stage.source.submit(ids, SamplingParams(**params), group="sampler")
    await stage.open()
    text = ""
    logprobs: list[Any] = []
    async for delta in stream:
        text += delta.text
        logprobs += getattr(delta, "logprobs", [])
    stage.state()
    await stage.gate()
    return text, logprobs


async def look_at_logits(stage: Stage) -> Seen:
    """The first token's candidates."""
    assert stage.chats.codec is not None
    text, logprobs = await draw(stage, temperature=0.0, max_tokens=3, logprobs=4)
    first = logprobs[0]
    rows = [
        (repr(stage.chats.codec.decode([token])), math.exp(logprob), f"{math.exp(logprob):6.1%}")
        for token, logprob in first.top
    ]
    return Seen(
        f"The reply begins {text!r}. The four most likely first tokens, by the model's own "
        f"distribution:\n\n{stage.bars(rows)}\n\n"
        "Greedy (temperature 0) takes the first of them, always.",
    )


async def same_seed(stage: Stage) -> Seen:
    """The same seed alone, in a crowd, and other seeds."""
    hot: dict[str, Any] = {"temperature": 2.5, "max_tokens": 9, "ignore_eos": True}
    alone, _ = await draw(stage, **hot, seed=7)
    crowd = [stage.chat(max_tokens=30, whole=True) for _ in range(3)]
    for session in crowd:
        await stage.ask(session, "What is top-k sampling?")
    await stage.step(2)
    together, _ = await draw(stage, **hot, seed=7)
    others = [(await draw(stage, **hot, seed=seed))[0] for seed in (8, 9)]
    lines = [
        f"   seed 7, alone         {_short(alone)}", f"   seed 7, with 3 others {_short(together)}",
        *(f"   seed {seed}                {_short(text)}" for seed, text in zip((8, 9), others, strict=True)),
    ]  # fmt: skip
    return Seen("\n".join(lines), 0 if alone == together else 1)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) < 46 else text[:45] + "…")


async def close(stage: Stage) -> None:
    """A greedy reply, standing."""
    session = stage.chat(max_tokens=40, whole=True)
    stage.show(session)
    await stage.ask(session, QUESTION)
    await stage.step(6)


def _first(stage: Stage) -> str:
    item = stage.view.first_tokens.items[-1]
    return f"{item.prefill_ms + item.sample_ms:.1f} ms: computing the prompt, and drawing from its last token's logits"


def _drawn(stage: Stage) -> str:
    row = stage.view.steps.get(stage.view.steps.last)
    assert row is not None
    return f"{row.decodes + sum(chunk[3] for chunk in row.chunks)}"


def _prompt_drew(stage: Stage) -> str:
    steps = stage.view.steps
    drew = next(steps.chunks(s)[0][3] for s in range(steps.last, -1, -1) if steps.chunks(s))
    return ("yes" if drew else "no") + ": the reply's first token is drawn from the logits of the prompt's last token"


LESSON = Lesson(
    4,
    "Sampler",
    "How does a row of scores become one token?",
    (
        Page(
            "The order of things",
            """
            The model ends with a score for every token of the vocabulary: the logits. In this order:

              1 forbid or favour   grammar mask, logit_bias
              2 min_tokens         what would end the reply is forbidden at first
              3 penalties          repetition, presence, frequency: what was said loses
              4 temperature        divide: below 1 the best stand out more, above 1 less
              5 top_k              keep the k best
              6 top_p              keep the fewest best whose probabilities reach p
              7 min_p              keep what is at least p times as likely as the best
              8 draw               by chance, in proportion to what is left

            With temperature 0 it is the largest logit and nothing else: greedy. Each row of a batch has its own
            settings, and what no row asks for is not computed: without top_p nothing is ever sorted.
            """,
            code="engine.worker.sampler:Sampler.sample",
        ),
        Page(
            "Candidates",
            """
            Here is the first step of a reply, with the model's own probabilities asked for (logprobs=4). They
            are those before temperature and before anything was cut away.
            """,
            panel="step",
            run=look_at_logits,
        ),
        Page(
            "Chance without dice",
            """
            To draw in proportion to probabilities, add noise of a certain shape (Gumbel) to the logits and take the
            largest: that is exactly such a draw, in one pass and without sorting. The noise is a hash of four
            numbers: the seed, which of several samples it is, the position and the token's id. There is no
            generator whose state moves on from draw to draw.
            """,
            panel="step",
            code="engine.kernels.noise:gumbel",
            run=same_seed,
            predict=Prediction(
                "A reply is drawn hot, with seed 7: once alone, once while three others are in the batch. The second "
                "is …",
                ("the same, token for token", "another one: the batch uses up random numbers in another order"),
            ),
        ),
        Page(
            "What this is good for",
            """
            Since a draw depends on the position and not on how the engine came there, a request may be chunked,
            preempted, resumed, cached or batched with anybody, and its tokens stay the same for the same seed. A
            request without a seed is given one, and it is recorded, so that any reply can be drawn again.

            One thing can still change a reply: arithmetic. A sum of rounded numbers depends on the order of its
            terms, most of all in half precision, and another batch size may use another order. Where two tokens are
            almost equally likely, that can decide. The tests of this engine therefore compare tokens in double
            precision, where they must be equal.

            If the logits of a row are not finite numbers, that request ends with an error, and the others go on.
            """,
            code="engine.kernels.noise:request_keys",
        ),
    ),
    close,
    (
        Check(
            "How many tokens did the last step draw?",
            "step",
            "the step bar: every request that decodes draws one.",
            _drawn,
        ),
        Check(
            "Did the prompt's chunk draw a token, too?",
            "lanes",
            "the batch lanes: the request decodes from the step after its prefill on, so its first token was drawn "
            "by it.",
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
