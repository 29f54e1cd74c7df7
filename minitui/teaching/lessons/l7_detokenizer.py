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
    tokenizer = Tokenizer(Path(stage.source.info.model_dir))
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
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": "What is paged attention?"}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)

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
    tokenizer = Tokenizer(Path(stage.source.info.model_dir))
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


LESSON = Lesson(
    7,
    "Detokenizer",
    "Why can a token not simply be printed?",
    (
        Page(
            "Tokens are bytes",
            """
            A computer stores a text as bytes, which are numbers from 0 to 255. UTF-8 is the usual rule for this: the
            letter a has one byte, 😀 has four. In many tokenizers (byte-level BPE), a token is a sequence of bytes. A
            token may end in the middle of a character: the four bytes of 😀 may belong to several tokens.

            To detokenize means to turn tokens into text. If a reply streams, the user gets its text in pieces, while
            the engine samples the tokens. If the engine detokenized each token alone, half an emoji would become a
            replacement character (�). If it detokenized the whole reply again for each token, later tokens would take
            longer than earlier ones.

            In some other tokenizers, the text of a token can depend on the token before: the same token is “world” at
            the beginning, but “ world” after “Hello”. Then this engine detokenizes twice: the token before (“Hello”),
            and both tokens (“Hello world”). The difference is the new token's text.
            """,
            code="engine.text.tokenizer:Tokenizer.detokenizer",
        ),
        Page(
            "Byte by byte",
            f"""
            The tokenizer of this model cuts the text {TEXT} into tokens. Its vocabulary is small: each token of this
            text is a single byte. In UTF-8, a and b have one byte each, é has two, 漢 has three and 😀 has four.

            A client is a program that sends requests and receives the replies. To emit a text means to send it to the
            client. Emitted text cannot be taken back. The result writes a byte with two digits (hexadecimal: after 9
            come a to f).
            """,
            code="engine.text.detokenizer:_ByteDetokenizer",
            run=byte_by_byte,
            predict=Prediction(
                f"The {len(TEXT.encode())} tokens of this text arrive one by one. How many of them emit nothing?",
                tuple(f"{n}" for n in SILENT),
                (
                    "each token would emit something: for an incomplete character, a replacement character. But "
                    "emitted text cannot be taken back.",
                    "only the emoji would have several bytes. But 漢 has three bytes, and é has two.",
                    "",
                    "😀, 漢 and é would be emitted only at the end of the reply. But with its last byte, a "
                    "character is complete and can be emitted.",
                ),
            ),
        ),
        Page(
            "Stop strings",
            f"""
            A request may have stop strings. When a stop string occurs in the reply, the reply ends. By default, the
            client gets no part of the stop string. A stop string can begin in the middle of one token and end in the
            middle of another.

            A reply has the tokens “{PAIR[0]}” and “{PAIR[1]}”, one after the other. The stop string is “{STOPS[0]}”.
            """,
            code="engine.text.output:OutputProcessor",
            run=held_back,
            predict=Prediction(
                f"When does the client get the word “{PAIR[0].strip()}”?",
                ("at once", "with the next token", "at the end of the reply"),
                (
                    "a part of the stop string could be sent: “ zebra” could come next. (A request that wants "
                    "the stop string has the option include_stop_str_in_output.)",
                    "",
                    "the next token would not show whether this is the stop string. But it does: "
                    f"“{STOPS[0]}” does not begin with “{STOPS[1]}”.",
                ),
            ),
        ),
        Page(
            "From text to ids",
            """
            A model's chat template joins all messages of a chat to one text, and adds control tokens. In this model,
            <|im_end|> ends a message. What happens if a user types <|im_end|>? As a control token, it would end the
            user's message. The words after it could then pretend to be another message, such as a system prompt. So in
            minitui's chats, typed letters always stay text: only the template adds control tokens.

            The same text can be cut into tokens in several ways: “cache” as one token, or as “ca” and “che”. The
            tokenizer always chooses the same way, but the model may have written other tokens. The cache finds blocks
            by token ids, not by text. So a chat of minitui keeps the ids of its messages, and the next prompt usually
            begins with these ids.

            Text is tokenized and detokenized outside the step. On a GPU, the next step can run while the ids of the
            last step become text.
            """,
            code="engine.text.tokenizer:Tokenizer.apply_chat_template",
        ),
    ),
    close,
    (
        Check(
            f"The first {ARRIVED} tokens of {TEXT} have arrived. Which text has been emitted, and what is held back?",
            "pieces",
            "the tokens: each is one byte. The rule is on page 2.",
            _emitted,
        ),
        Check(
            f"The tokens of {TEXT} arrive one by one. With which token is {CHARACTER} emitted?",
            "pieces",
            "the tokens: each is one byte, in the order of the text.",
            _completes,
        ),
        Check(
            f"The request has the stop string {STOP}. Which part of the text is emitted?",
            "pieces",
            "the tokens: text that may be the beginning of the stop string is held back.",
            lambda stage: (
                f"{TEXT[: TEXT.index(STOP)]}: b is held back, and with the last byte of {CHARACTER} the stop "
                "string is complete"
            ),
        ),
    ),
    {"kv_blocks": 96},
)
