"""L0: text becomes tokens, and a forward pass gives one more token, again and again."""

from __future__ import annotations

import math
from pathlib import Path

from engine.errors import EngineError
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.chat.conversation import Session
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen, TypeIn
from minitui.teaching.merges import merges, quoted, shown_piece
from minitui.teaching.stage import Stage
from minitui.text import count
from minitui.viewmodel.board import Pieces

TEXT = "What is prefill? My name is Anna."
WORDS = (" prefill", " Anna")  # compared by the first prediction
QUESTION = "What is prefill?"
LONGEST = 120  # characters of a typed text
LISTED = 8  # merges in the text of the result
REPLY = 8
CANDIDATES = 4
LEAST = 0.001  # a smaller probability is not shown exactly
TYPE = TypeIn("Your text", TEXT, LONGEST)
ASK = TypeIn("Your question", QUESTION, LONGEST)


def _tokenizer(stage: Stage) -> Tokenizer:
    return Tokenizer(Path(stage.source.info.model_dir))


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, ...]:
    return tuple(shown_piece(tokenizer.token_bytes(token)) for token in ids)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= LEAST else f"<{LEAST:.1%}"


async def cut_up(stage: Stage) -> Seen:
    """Cuts the typed text into tokens, one merge rule after the other."""
    text = stage.typed or TEXT
    tokenizer = _tokenizer(stage)
    begin, done = merges(tokenizer, text)
    pieces = tuple(map(shown_piece, begin))
    stage.view.put(Pieces("Text", pieces, f"{count(len(pieces), 'byte')}, one by one"))
    await stage.pause(1.5)
    for n, merge in enumerate(done, 1):
        left, right = map(shown_piece, merge.pair)
        stage.view.put(
            Pieces(
                f"Merge {n} of {len(done)}",
                tuple(map(shown_piece, merge.pieces)),
                f"rule {merge.rule}: “{left}” and “{right}” become “{left}{right}”",
                lit=merge.new,
            )
        )
        await stage.pause(min(0.7, 15 / len(done)))
    ids = tokenizer.encode(text)
    pieces = _pieces(tokenizer, ids)
    made = f"{count(len(begin), 'byte')} became {count(len(ids), 'token')}, by {count(len(done), 'rule')}"
    stage.view.put(Pieces("Tokens", pieces, made, tuple(ids)))
    pairs = [" + ".join(quoted(shown_piece(half)) for half in merge.pair) for merge in done[:LISTED]]
    listed = f" The rules, in order: {', '.join(pairs)}{' …' if len(done) > LISTED else ''}." if pairs else ""
    common, name = (_pieces(tokenizer, tokenizer.encode(word)) for word in WORDS)
    words = [f"   {quoted(word)}: " + " | ".join(_pieces(tokenizer, tokenizer.encode(word))) for word in WORDS]
    return Seen(
        f"{made}.{listed} The tokens, and their ids:\n\n   "
        + " | ".join(pieces) + "\n   " + " ".join(map(str, ids))
        + "\n\nThe two words of the question:\n\n" + "\n".join(words)
        + f"\n   tokens in the vocabulary: {tokenizer.vocab_size:,}",
        {(True, True): 0, (True, False): 1}.get((len(common) == 1, len(name) == 1), 2),
    )


async def score(stage: Stage) -> Seen:
    """Runs one forward pass over the typed question, and lists the tokens with the best scores."""
    assert stage.chats.codec is not None
    question = stage.typed or QUESTION
    ids = stage.chats.codec.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    tokenizer = _tokenizer(stage)
    stage.view.put(
        Pieces("Prompt", _pieces(tokenizer, ids), f"{count(len(ids), 'prompt token')}", tuple(ids), prompt=len(ids))
    )
    await stage.pause(1.5)
    deltas = await stage.complete(ids, SamplingParams(temperature=0.0, max_tokens=1, logprobs=CANDIDATES))
    best = deltas[0].logprobs[0].top
    shares = [(repr(_pieces(tokenizer, [token])[0]), math.exp(value)) for token, value in best]
    rows = [(piece, share, _percent(share)) for piece, share in shares]
    return Seen(
        f"One forward pass computed the {len(ids)} prompt tokens. It gave one number for each token of the vocabulary. "
        "The next page says how these numbers become probabilities. The most likely tokens:\n" + stage.bars(rows),
        2 if sum(chunk[2] for chunk in stage.last_row().chunks) == len(ids) and len(rows) > 1 else 0,
    )


def show_tokens(stage: Stage, session: Session, prompt: int) -> None:
    """Shows the prompt and the reply so far, token by token."""
    pieces = _pieces(_tokenizer(stage), session.ids)
    line = f"{count(prompt, 'prompt token')}, {count(len(pieces) - prompt, 'reply token')}"
    if len(pieces) > prompt:
        line += f"; the last one is “{pieces[-1]}”"
    stage.view.put(Pieces("The text so far", pieces, line, lit=frozenset({len(pieces) - 1}), prompt=prompt))


async def grow(stage: Stage, steps: int, seconds: float) -> tuple[Session, int]:
    """Writes a reply to the typed question, token by token; returns its chat and the length of the prompt."""
    session = await stage.write(stage.typed or QUESTION, REPLY, 0, system="")
    prompt = stage.request(session).prompt_tokens
    for n in range(1, steps + 1):
        await stage.step(1)
        await stage.until("the token", lambda n=n: len(session.ids) >= prompt + n)  # type: ignore[misc]
        show_tokens(stage, session, prompt)
        await stage.pause(seconds)
    return session, prompt


async def again(stage: Stage) -> Seen:
    """Writes a reply token by token, and counts what each step computed. The answer: more than each token once (0),
    each token once (1), or all but the last (2)."""
    session, prompt = await grow(stage, REPLY, 1.0)
    steps = stage.view.history.steps
    rows = [steps.get(step) for step in range(steps.last - stage.figures().steps + 1, steps.last + 1)]
    computed = [row.tokens for row in rows if row is not None]
    if len(computed) < 2:
        raise EngineError("the reply ended after one token: type another question")
    reply, together = len(session.ids) - prompt, sum(computed)
    rows_of_table = (
        ("tokens of each step", " ".join(map(str, computed))), ("tokens of all steps", f"{together}"),
        ("prompt and reply", f"{prompt} + {reply} = {prompt + reply}"),
    )
    return Seen(
        "\n".join(f"   {name:<22}{value}" for name, value in rows_of_table)
        + "\n\nThe first step computed the whole prompt. This is the prefill. Each later step computed one token: the "
        "token that the step before had sampled. This is decode. No step computed the last sampled token.",
        {prompt + reply: 1, prompt + reply - 1: 2}.get(together, 0),
    )


async def close(stage: Stage) -> None:
    """Stops the engine in the middle of a reply."""
    stage.typed = ""
    await grow(stage, REPLY - 2, 0.0)


def _board(stage: Stage) -> Pieces:
    board = stage.view.board
    assert isinstance(board, Pieces)
    return board


def _tokens(stage: Stage) -> str:
    board = _board(stage)
    return f"{board.prompt} of the prompt, {len(board.pieces) - (board.prompt or 0)} of the reply"


def _last(stage: Stage) -> str:
    return f"“{_board(stage).pieces[-1]}”: no step has computed it yet; it is the input of the next step"


def _passes(stage: Stage) -> str:
    decodes = stage.figures().steps - 1
    return f"{decodes + 1}: one prefill and {decodes} decode steps"


LESSON = Lesson(
    0,
    "Tokens",
    "What does a language model read, and what does it write?",
    (
        Page(
            "Text becomes tokens",
            """
            A model computes with numbers. A tokenizer cuts a text into pieces, the tokens. Each has a number, the token
            id. All tokens of a model are its vocabulary. (The top line may say PAUSED: the model is not needed yet.)

            This tokenizer first cuts a text into words, numbers and signs. A space before a word belongs to the word.
            Each part is cut into bytes: a letter has one or more. Last, merge rules join neighbours, in an order: the
            first rule that fits two neighbours joins them, again and again, until none fits. Frequent pairs of certain
            texts, about inference engines, became rules.
            """,
            panel="pieces",
            code="minitui.teaching.merges:merges",
            run=cut_up,
            type_in=TYPE,
            predict=Prediction(
                "How are “prefill” and “Anna” cut?",
                (
                    "each is one token", "prefill is one token, Anna has several",
                    "Anna is one token, prefill has several",
                ),
                (
                    "Anna would have been frequent in those texts, as prefill was. (Page 3 says what an inference "
                    "engine is, and page 7 what prefill is.)",
                    "",
                    "a short word would need fewer tokens than a long one. But what counts is how frequent its pairs "
                    "were in those texts.",
                ),
            ),
        ),
        Page(
            "A forward pass",
            """
            A prompt is a text that a model continues. The continuation is the reply. Here, tokens such as <|im_start|>
            mark who speaks in a chat.

            A model consists mainly of layers. A layer has many fixed numbers, the weights. Each token id selects a list
            of numbers. These lists go into the first layer. The result of a layer goes into the next layer. A forward
            pass computes each layer once. The experiment runs one forward pass over a whole question.
            """,
            panel="pieces",
            code="engine.model.decoder:Decoder.forward",
            run=score,
            type_in=ASK,
            predict=Prediction(
                "What does one forward pass give?",
                ("the whole reply", "one token", "one number for each token of the vocabulary"),
                (
                    "the same prompt would always give the same reply. But the same question can get a different "
                    "reply.",
                    "the first token of a reply would always be the same. But the forward pass only says how likely "
                    "each token is. The next token is drawn later.",
                    "",
                ),
            ),
        ),
        Page(
            "Logits and sampling",
            """
            The forward pass gives one number for each token of the vocabulary: its logit. A higher logit means a more
            likely token. A formula (softmax) turns the logits into probabilities: all are positive, and their sum is 1.
            Sampling draws one token at random: on average, a token with twice the probability is drawn twice as often.
            (Settings can change this: L5 Sampler.) The sampled token is the next token of the reply.

            Then the model runs again: it now continues the text with this token at its end. A reply of 100 tokens
            usually needs about 100 forward passes, one after the other: each pass needs the token of the pass before. A
            reply ends, for example, when the model's end token is sampled, or when the reply has the largest length
            that is allowed.

            The inference engine is the program that runs the model. This engine works in steps, with one forward pass
            in each step. If several users wait for replies, one step can compute tokens for several of them.
            """,
            code="engine.worker.sampler:Sampler.sample",
        ),
        Page(
            "Query, key and value",
            """
            With attention, a token uses numbers of earlier tokens. A layer computes:

              query   a list of numbers for each token: what it looks for
              key     a list of numbers for each token: what it can be found by
              value   a list of numbers for each token: what it gives when it is found

            A token's query is compared with its own key and with the keys of all earlier tokens (in some layers of some
            models, only of near ones). The values are added up: the better a key fits the query, the more its value
            counts. The sum changes the token's numbers. From the changed numbers, the next layer makes its key and
            value: so both depend on earlier tokens, too.

            A layer does this several times side by side, in heads. Each query head has its own queries and sums. In
            many models, several query heads share the keys and values of one KV head: this saves memory. The model of
            the lessons has 6 query heads and 2 KV heads. The head size, the length of a list, is 64.
            """,
            code="engine.attention.torch_backend:TorchAttention._attend",
        ),
        Page(
            "Again and again",
            f"""
            The experiment asks “{QUESTION}” and runs {REPLY} steps, one at a time. Each step gives one token of the
            reply. The panel shows the prompt, and each token of the reply when it is sampled.

            To compute a token means: its numbers pass through all layers. Its key and its value in each layer are then
            known. Later tokens do not change them, and the engine has memory for them. To compute a new token here, a
            layer needs the keys and values of all tokens before it.
            """,
            panel="pieces",
            code="engine.core.engine:Engine.step",
            run=again,
            type_in=ASK,
            predict=Prediction(
                "Which tokens does the engine compute in these steps?",
                (
                    "in each step, the whole text so far",
                    "each token of the prompt and of the reply, once",
                    "each token once, except the last token of the reply",
                ),
                (
                    "keys and values would be computed again in each step. But a later token does not change them, so "
                    "the engine keeps them.",
                    "the last token of the reply would be the input of another step. But the reply ends with this "
                    "token, so there is no such step.",
                    "",
                ),
            ),
        ),
        Page(
            "What is kept",
            """
            While a reply is written, the engine keeps the keys and values of the prompt and of all computed tokens of
            the reply. The memory for them is the KV cache (K: keys, V: values). The KV cache is divided into blocks.
            Here, a block has room for the keys and values of 16 tokens. All blocks together are the pool.

            When a reply has ended, the keys and values of prompt and reply can stay in the pool. They are useful again
            if a later prompt begins with the same tokens. Such a common beginning is a prefix. If the keys and values
            of a prefix are still in the pool, the prefix is cached, and the engine need not compute the prefix again.
            (This engine keeps only full blocks.) In a chat, this is frequent: each question is usually sent together
            with all earlier messages.
            """,
            code="engine.attention.kv_pool:KVPool",
        ),
        Page(
            "The words of the other lessons",
            """
            These words have these meanings in all lessons:

              request    a prompt, the largest length of its reply, and the settings of the sampling
              step       planning, then one forward pass, then sampling
              prefill    the work of computing the tokens of a prompt, usually many in a step
              decode     the work of computing the newest token of a reply, usually one in a step
              batch      the requests that are computed together
              row        the place of one request in the batch
              host       the CPU, which plans the steps
              device     the processor that runs the forward passes: a GPU, or the same CPU
              latency    how long one user waits: for the first token (TTFT), between tokens
            """,
            code="engine.core.request:Request",
        ),
    ),
    close,
    (
        Check(
            "How many tokens of the text so far are of the prompt, and how many of the reply?",
            "pieces",
            "the panel of tokens: the line under the tokens.",
            _tokens,
        ),
        Check(
            "Which token is the input of the next step?",
            "pieces",
            "the panel of tokens. Page 3 says what the model reads next.",
            _last,
        ),
        Check(
            "How many forward passes has this request needed so far?",
            "lanes",
            "the batch lanes: one column is one step, and a step is one forward pass.",
            _passes,
        ),
    ),
    {"kv_blocks": 48},
)
