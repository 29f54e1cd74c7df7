"""L7: token ids become text while a reply streams."""

from __future__ import annotations

from itertools import pairwise

from engine.params import SamplingParams
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.merges import shown_piece
from minitui.teaching.stage import Stage
from minitui.viewmodel.board import Pieces

TEXT = "a😀b漢é"

CHARACTER = "漢"  # of TEXT, in the closing questions
ARRIVED = 7  # tokens of TEXT, in a closing question
STOP = "b漢"  # part of TEXT, in a closing question

SILENT = (0, 3, 6, 9)  # choices of the question: tokens that emit nothing


async def byte_by_byte(stage: Stage) -> Seen:
    """Decodes a text with unusual characters, token by token."""
    tokenizer = stage.tokenizer
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.detokenizer()
    lines, silent = [], 0
    for token in ids:
        raw = tokenizer.token_bytes(token)
        text = stream.push([token])
        silent += not text
        lines.append(f"   token {token:>5}   bytes {raw.hex(' '):<12} emitted “{text}”")
    lines.append(f"   at the end                       “{stream.flush()}”")
    lines.append(
        f"\n{silent} of the {len(ids)} tokens emitted nothing. The engine holds the bytes of a character back until "
        "its last byte arrives. Then it emits the character. All emitted texts together are the text of the reply."
    )
    return Seen("\n".join(lines), SILENT.index(silent) if silent in SILENT else None)


PAIR = (" the", " cache")  # two tokens of the reply of `held_back`, one after the other
STOPS = ("the zebra", "the cache")  # the first begins with a word of the reply but does not occur; the second occurs


async def held_back(stage: Stage) -> Seen:
    """Runs a reply with two stop strings: one begins with a word of the reply and does not occur, the other occurs. The
    answer: is the word's text sent at once (0), with the next token (1), or at the end (2)?"""
    ids = stage.prompt("What is paged attention?", stage.system)

    async def pieces(*stop: str) -> list[str]:
        deltas = await stage.complete(ids, SamplingParams(temperature=0.0, max_tokens=9, stop=stop))
        return [delta.text for delta in deltas]

    free = await pieces()
    at = next((i for i, two in enumerate(pairwise(free)) if two == PAIR), None)
    assert at is not None, f"the reply is {free}"
    runs = [("no stop string", free), *[(f"stop string “{stop}”", await pieces(stop)) for stop in STOPS]]
    lines = []
    for name, parts in runs:
        lines += [f"   {name}", "      " + " ".join(f"“{piece}”" for piece in parts)]
    word, got = PAIR[0].strip(), runs[1][1]
    return Seen(
        "The text that came with each token:\n\n" + "\n".join(lines) + "\n\n"
        f"“{word}” could be the beginning of “{STOPS[0]}”, so this text was held back until the next token. (The space "
        f"was sent at once: “{STOPS[0]}” does not begin with a space.) “{STOPS[1]}” did occur: the reply ended, and no "
        "part of the stop string was sent. So this engine emits a text as soon as it cannot be a part of a stop "
        "string. vLLM holds back as many characters as the stop string has, without one, until the end of the reply.",
        0 if word in got[at] else 1 if word + PAIR[1] in got[at + 1] else 2,
    )


async def close(stage: Stage) -> None:
    """Shows the tokens of TEXT."""
    tokenizer = stage.tokenizer
    ids = tokenizer.encode(TEXT)
    pieces = tuple(shown_piece(tokenizer.token_bytes(token)) for token in ids)
    stage.view.put(Pieces(f"Tokens of {TEXT}", pieces, "each token, with its id under it", tuple(ids)))


def _completes(stage: Stage) -> str:
    """Returns the token with the last byte of CHARACTER."""
    board = stage.view.board
    assert isinstance(board, Pieces)
    at = len(TEXT[: TEXT.index(CHARACTER) + 1].encode()) - 1  # every token is one byte
    return f"{board.pieces[at]}, the last byte of {CHARACTER}: until it arrives, the other bytes are held back"


def _emitted(stage: Stage) -> str:
    board = stage.view.board
    assert isinstance(board, Pieces)
    text = TEXT.encode()[:ARRIVED].decode(errors="ignore")
    held = "".join(board.pieces[len(text.encode()) : ARRIVED])
    return f"{text} has been emitted; {held}, the first byte of {CHARACTER}, is held back"


LESSON = read_lesson(globals(), kv_blocks=96)
