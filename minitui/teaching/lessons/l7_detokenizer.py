"""L7: token ids become text while a reply streams."""

from __future__ import annotations

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


async def held_back(stage: Stage) -> Seen:
    """Stops a reply at a string and counts the empty deltas: their text was held back."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": "What is paged attention?"}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)

    async def pieces(stop: tuple[str, ...]) -> tuple[list[str], str]:
        deltas = await stage.complete(ids, SamplingParams(temperature=0.0, max_tokens=24, stop=stop))
        return [delta.text for delta in deltas], deltas[-1].finish_reason

    free, _ = await pieces(())
    text = "".join(free)
    words = text.split()
    stop = " ".join(words[4:6])
    stopped, reason = await pieces((stop,))
    cut = "".join(stopped)
    return Seen(
        f"Without a stop string the reply is “{' '.join(words[:9])} …”. With stop={stop!r} it ends after “{cut}”, with "
        f"the reason “{reason}”, in {len(stopped)} pieces. Pieces without text: {sum(not piece for piece in stopped)}. "
        "Their text could still have become the stop string, so it was held back.",
        1 if cut == text[: text.index(stop)] else 0 if stop in cut else 2,
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
            trained on. But a piece need not end where a character ends: an emoji has four bytes in UTF-8, and they may
            belong to two, three or four tokens.

            When a reply streams, its tokens arrive one by one. Decoding each token alone would print a replacement
            character for half an emoji. Decoding the whole reply with every token would take longer and longer.

            So the detokenizer of a reply has state: the last bytes, if they may be the beginning of a character. These
            bytes are held back until the rest of the character arrives. With byte-level BPE the emitted texts together
            equal the decoding of all ids at once: the text is the joined bytes. With other tokenizers, the text of a
            token can depend on the token before. Then the new text is the difference of two decodings: without and with
            the new token.
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
                    "漢 and é would have one byte, as in an encoding for one language.",
                    "",
                    "these characters would appear only at the end of the reply. But the last byte of a character "
                    "completes it, so it can be emitted.",
                ),
            ),
        ),
        Page(
            "Stop strings",
            """
            A request may give strings at which its reply should end. A stop string need not be a token: it may begin
            in the middle of one token and end in another. So the end of the text is also held back while it could
            still become a stop string. Otherwise it is sent at once.
            """,
            panel="events",
            code="engine.text.output:OutputProcessor",
            run=held_back,
            predict=Prediction(
                "A stop string has two tokens. What does the client get of it?",
                ("all of it", "nothing: the reply ends before it", "its first token"),
                (
                    "no text would have to be held back. (A request can ask for this: include_stop_str_in_output.)",
                    "",
                    "the first token would be sent before the second arrives. But then its text can still become the "
                    "stop string, so it is held back.",
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

            Encoding and decoding happen outside the step: the next step may already run while the ids of the last step
            become text.
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
            f"The request has the stop string {STOP}. Which text is emitted at all?",
            "pieces",
            "the tokens: from the first byte on that may begin the stop string, everything is held back.",
            lambda stage: (
                f"{TEXT[: TEXT.index(STOP)]}: b is held back, and with the last byte of {CHARACTER} the stop "
                "string is complete"
            ),
        ),
    ),
    {"kv_blocks": 96},
)
