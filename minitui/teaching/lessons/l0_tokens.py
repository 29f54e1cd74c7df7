"""L0: text becomes tokens, and a forward pass gives one more token, again and again."""

from __future__ import annotations

import math

from engine.errors import EngineError
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.chat.conversation import Session
from minitui.teaching.lessons.page import Seen, TypeIn
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.merges import merges, quoted, shown_piece
from minitui.teaching.stage import Stage
from minitui.text import count, percent
from minitui.viewmodel.board import Pieces

TEXT = "What is prefill? My name is Anna."
WORDS = (" prefill", " Anna")  # compared by the first prediction
QUESTION = "What is prefill?"
LONGEST = 120  # characters of a typed text
LISTED = 8  # merges in the text of the result
REPLY = 8
CANDIDATES = 4
TYPE = TypeIn("Your text", TEXT, LONGEST)
ASK = TypeIn("Your question", QUESTION, LONGEST)


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, ...]:
    return tuple(shown_piece(tokenizer.token_bytes(token)) for token in ids)


async def cut_up(stage: Stage) -> Seen:
    """Cuts the typed text into tokens, one merge rule after the other."""
    text = stage.typed or TEXT
    tokenizer = stage.tokenizer
    begin, done = merges(tokenizer, text)
    pieces = tuple(map(shown_piece, begin))
    stage.view.put(Pieces("Text", pieces, f"{count(len(pieces), 'byte')}, one by one"))
    await stage.pause(1.5)
    for n, merge in enumerate(done, 1):
        left, right = map(shown_piece, merge.pair)
        stage.view.put(
            Pieces(
                f"Merge {n} of {len(done)}", tuple(map(shown_piece, merge.pieces)),
                f"rule {merge.rule}: “{left}” and “{right}” become “{left}{right}”", lit=merge.new,
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
    ids, tokenizer = stage.prompt(stage.typed or QUESTION), stage.tokenizer
    stage.view.put(
        Pieces("Prompt", _pieces(tokenizer, ids), f"{count(len(ids), 'prompt token')}", tuple(ids), prompt=len(ids))
    )
    await stage.pause(1.5)
    deltas = await stage.complete(ids, SamplingParams(temperature=0.0, max_tokens=1, logprobs=CANDIDATES))
    best = deltas[0].logprobs[0].top
    shares = [(repr(_pieces(tokenizer, [token])[0]), math.exp(value)) for token, value in best]
    rows = [(piece, share, percent(share)) for piece, share in shares]
    return Seen(
        f"One forward pass computed the {len(ids)} prompt tokens. It gave one number for each token of the vocabulary. "
        "The next page says how these numbers become probabilities. The most likely tokens:\n" + stage.bars(rows),
        2 if sum(chunk[2] for chunk in stage.last_row().chunks) == len(ids) and len(rows) > 1 else 0,
    )


def show_tokens(stage: Stage, session: Session, prompt: int) -> None:
    """Shows the prompt and the reply so far, token by token."""
    pieces = _pieces(stage.tokenizer, session.ids)
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
    computed = [row.tokens for row in stage.rows()]
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


LESSON = read_lesson(globals(), kv_blocks=48)
