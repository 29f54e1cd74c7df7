"""L7: token ids become text while a reply streams."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
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
    tokenizer = Tokenizer(Path(stage.source.info["model_dir"]))
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
        f"\n{silent} of the {len(ids)} tokens emitted nothing: a character is emitted with the last of its bytes."
    )
    return Seen("\n".join(lines), SILENT.index(silent) if silent in SILENT else None)


PAIR = (" the", " cache")  # two tokens of the reply of `held_back`, one after the other
STOPS = ("the zebra", "the cache")  # the first begins with a word of the reply but does not occur; the second occurs


async def held_back(stage: Stage) -> Seen:
    """Runs a reply with two stop strings: one begins with a word of the reply and does not occur, the other occurs. The
    answer: is the word's text sent at once (0), with the next token (1), or at the end (2)?"""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": "What is paged attention?"}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)

    async def pieces(*stop: str) -> list[str]:
        deltas = await stage.complete(ids, SamplingParams(temperature=0.0, max_tokens=12, stop=stop))
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
        f"“{word}” could become “{STOPS[0]}”, so this text was held back until the next token. (The space before it "
        f"was sent at once: “{STOPS[0]}” does not begin with a space.) “{STOPS[1]}” did occur: the reply ended, and no "
        "part of the stop string was sent.",
        0 if word in got[at] else 1 if word + PAIR[1] in got[at + 1] else 2,
    )


async def close(stage: Stage) -> None:
    """Shows the tokens of TEXT."""
    tokenizer = Tokenizer(Path(stage.source.info["model_dir"]))
    ids = tokenizer.encode(TEXT)
    pieces = tuple(shown_piece(tokenizer.token_bytes(token)) for token in ids)
    stage.view.put(Pieces(f"Tokens of {TEXT}", pieces, "each token, with its id under it", tuple(ids)))


def _completes(stage: Stage) -> str:
    """Returns the token with the last byte of CHARACTER."""
    board = stage.view.board
    assert isinstance(board, Pieces)
    at = len(TEXT[: TEXT.index(CHARACTER) + 1].encode()) - 1  # every token is one byte
    return f"{board.pieces[at]}, the token {board.ids[at]}: before it, the bytes of {CHARACTER} are held back"


def _emitted(stage: Stage) -> str:
    board = stage.view.board
    assert isinstance(board, Pieces)
    text = TEXT.encode()[:ARRIVED].decode(errors="ignore")
    held = "".join(board.pieces[len(text.encode()) : ARRIVED])
    return f"{text} has been emitted; {held}, the first byte of {CHARACTER}, is held back"


LESSON = Lesson(
    7,
    "Detokenizer",
    "Why can a token not simply be printed?",
    (
        Page(
            "Tokens are bytes",
            """
            A common kind of tokenizer (byte-level BPE) knows the 256 bytes and many frequent sequences of bytes. It
            splits text into these pieces; each piece has a number. So it can encode any text, even text that it was not
            trained on. But a piece need not end where a character ends: 😀 has four bytes in UTF-8, and they may
            belong to two, three or four tokens.

            When a reply streams, its tokens arrive one by one. Decoding each token alone would print a replacement
            character for half an emoji. Decoding the whole reply with every token would take longer and longer.

            So the detokenizer of a reply has state: the last bytes, if they may be the beginning of a character. These
            bytes are held back until the rest of the character arrives. With byte-level BPE the emitted texts together
            equal the decoding of all ids at once: the text is the joined bytes. With other tokenizers, the text of a
            token can depend on the token before. Then the engine decodes with and without the new token: the difference
            is new.
            """,
            code="engine.text.tokenizer:Tokenizer.detokenizer",
        ),
        Page(
            "Byte by byte",
            f"""
            The bundled model's tokenizer encodes the text {TEXT}. Its vocabulary is small: here every token is a single
            byte. In UTF-8, a and b have one byte each, é has two, 漢 has three and 😀 has four.
            """,
            code="engine.text.detokenizer:_ByteDetokenizer",
            run=byte_by_byte,
            predict=Prediction(
                f"The {len(TEXT.encode())} tokens of this text arrive one by one. How many of them emit nothing?",
                (
                    f"{SILENT[0]}: each token emits something",
                    f"{SILENT[1]}: only the first bytes of the emoji",
                    f"{SILENT[2]}: of each character, all bytes but the last",
                    f"{SILENT[3]}: all bytes of the characters outside ASCII",
                ),
                (
                    "each incomplete character would be emitted as a replacement character, which later text "
                    "cannot take back.",
                    "漢 and é would have one byte. But they have three and two.",
                    "",
                    "these characters would appear only at the end of the reply. But the last byte of a character "
                    "completes it, so it can be emitted.",
                ),
            ),
        ),
        Page(
            "Stop strings",
            f"""
            A request may give stop strings. The reply ends when a stop string occurs in it, and the client gets no part
            of the stop string. A stop string need not be a token: it may begin in the middle of one token and end in
            another.

            A reply has the tokens “{PAIR[0]}” and “{PAIR[1]}”, one after the other. The stop string is “{STOPS[0]}”.
            """,
            code="engine.text.output:OutputProcessor",
            run=held_back,
            predict=Prediction(
                f"When does the client get the word “{PAIR[0].strip()}”?",
                ("at once", "with the next token", "at the end of the reply"),
                (
                    "the next token could be “ zebra”. Then a part of the stop string would already have been sent. "
                    "(With include_stop_str_in_output, a request asks for the stop string.)",
                    "",
                    "the engine could not tell earlier whether the stop string occurs. But the next token shows that "
                    f"it does not: “{STOPS[1]}” is not the beginning of “{STOPS[0]}”.",
                ),
            ),
        ),
        Page(
            "From text to ids",
            """
            Input needs the same care. The model's chat template writes a conversation as one text, with control tokens
            between the messages. If a user types the name of a control token, the typed name must stay text. Otherwise
            a user could end the message and start another message in the name of the system. In minitui's chats, only
            the template makes control tokens.

            A chat keeps the ids that it sent and received. The model may have written a text with other ids than the
            tokenizer would choose for the same text. So the next prompt uses the kept ids wherever the text is the
            same: the cache finds blocks by ids, not by text.

            Encoding and decoding happen outside the step: with overlap, the next step runs while the last ids become
            text.
            """,
            code="engine.text.tokenizer:Tokenizer.apply_chat_template",
        ),
    ),
    close,
    (
        Check(
            f"The first {ARRIVED} tokens of {TEXT} have arrived. Which text has been emitted, and what is held back?",
            "pieces",
            "the tokens: each is one byte. A character is emitted with the last of its bytes.",
            _emitted,
        ),
        Check(
            f"The tokens of {TEXT} arrive one by one. With which token is {CHARACTER} emitted?",
            "pieces",
            f"the tokens: {CHARACTER} has three bytes, and each token here is one byte.",
            _completes,
        ),
        Check(
            f"The request has the stop string {STOP}. Which part of the text is emitted?",
            "pieces",
            "the tokens: text that may begin the stop string is held back.",
            lambda stage: (
                f"{TEXT[: TEXT.index(STOP)]}: b is held back, and with the last byte of {CHARACTER} the stop "
                "string is complete"
            ),
        ),
    ),
    {"kv_blocks": 96},
)
