"""L6: ids back to text, while they come."""

from __future__ import annotations

from pathlib import Path

from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage
from minitui.viewmodel.model import Lane

TEXT = "a🫨b漢é"


async def byte_by_byte(stage: Stage) -> Seen:
    """A text of odd characters, pushed token by token."""
    tokenizer = Tokenizer(Path(stage.source.info["model_dir"]))
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.detokenizer()
    lines, answer = [], None
    for token in ids:
        raw = tokenizer.token_bytes(token)
        text = stream.push([token])
        if raw[:1] == b"\xf0" and answer is None:
            answer = 0 if not text else 1 if "\ufffd" in text else 2
        lines.append(f"   token {token:>5}   bytes {raw.hex(' '):<12} emitted “{text}”")
    lines.append(f"   at the end                       “{stream.flush()}”")
    return Seen("\n".join(lines), answer)


async def held_back(stage: Stage) -> Seen:
    """A stop string, and what is held back because of it."""
    assert stage.chats.codec is not None
    messages = [{"role": "system", "content": stage.system}, {"role": "user", "content": "What is paged attention?"}]
    ids = stage.chats.codec.apply_chat_template(messages, add_generation_prompt=True)

    async def pieces(stop: tuple[str, ...]) -> tuple[list[str], str]:
        stream = stage.source.submit(ids, SamplingParams(temperature=0.0, max_tokens=24, stop=stop), group="stop")
        await stage.open()
        out, reason = [], ""
        async for delta in stream:
            out.append(delta.text)
            reason = delta.finish_reason or reason
        await stage.gate()
        return out, reason

    free, _ = await pieces(())
    text = "".join(free)
    words = text.split()
    stop = " ".join(words[4:6])
    stopped, reason = await pieces((stop,))
    cut = "".join(stopped)
    return Seen(
        f"Without a stop string the reply goes “{' '.join(words[:9])} …”. With stop={stop!r} it ends with reason "
        f"“{reason}” after "
        f"“{cut}”, in {len(stopped)} deltas. {sum(not piece for piece in stopped)} of them carried no text: what had "
        "come could still have become the stop string, and was held back.",
        1 if stop not in cut and text.startswith(cut) else 0,
    )


async def close(stage: Stage) -> None:
    """A reply, ended by its last token."""
    session = stage.chat(max_tokens=12, whole=True)
    stage.show(session)
    await stage.ask(session, "What is incremental detokenization?")
    await stage.step(6)


def _lane(stage: Stage) -> Lane:
    return stage.view.lanes.lanes[max(stage.view.lanes.lanes)]


def _written(stage: Stage) -> str:
    request = stage.state().requests[max(stage.state().requests)]
    return f"{stage.state().computed(request) - request.prompt_tokens + 1}"


LESSON = Lesson(
    6,
    "Detokenizer",
    "Why can a token not simply be printed?",
    (
        Page(
            "Tokens are bytes",
            """
            A tokenizer of the common kind (byte-level BPE) knows 256 bytes and many sequences of bytes that are
            frequent. Text is cut into such pieces, and each has a number. So any text can be written, also one that
            the tokenizer has never seen. But a piece need not end where a character ends: an emoji is four bytes in
            UTF-8 and may be two, three or four tokens.

            When a reply streams, each token arrives alone. Decoding it alone would print a replacement character
            for half an emoji. Decoding the whole reply again with every token would be right, and slower with every
            token.

            So the detokenizer of a reply keeps state: the bytes at its end that may be the beginning of a
            character. They are held back until the rest comes. All pieces together are always exactly the decoding
            of all ids at once.
            """,
            code="engine.text.tokenizer:Tokenizer.detokenizer",
        ),
        Page(
            "Byte by byte",
            f"""
            The text {TEXT} through the bundled model's own tokenizer, which has few pieces and so shows many bytes.
            """,
            code="engine.text.detokenizer:_ByteDetokenizer",
            run=byte_by_byte,
            predict=Prediction(
                "The first bytes of the emoji arrive. What is emitted?",
                ("nothing yet", "a replacement character", "the emoji"),
            ),
        ),
        Page(
            "Stop strings",
            """
            A request may name strings at which its reply shall end. They need not be tokens: one may begin in the
            middle of a token and end in another. So the end of the text that could still become a stop string is
            held back, too. Once it is certain that it does not, it is sent.
            """,
            panel="events",
            code="engine.text.output:OutputProcessor",
            run=held_back,
            predict=Prediction(
                "Is the stop string itself part of the reply?",
                ("yes, the reply ends after it", "no, the reply ends before it, unless it is asked for"),
            ),
        ),
        Page(
            "The way in",
            """
            The same care is needed on the way in. A conversation is written as one text by the model's chat
            template, with control tokens between the messages. If a user types the name of a control token, it must
            stay text, or anybody could end his own message and begin another in the name of the system. Here
            control tokens come from the template alone.

            A chat keeps the ids it sent and received. The next turn's prompt uses those ids where the text is the
            same, even if the tokenizer would cut it in other pieces than the model did. Only so does it find its
            blocks in the cache.

            All of this is done off the step's path: while text is made of one step's ids, the next step may already
            run.
            """,
            code="engine.text.tokenizer:Tokenizer.apply_chat_template",
        ),
    ),
    close,
    (
        Check(
            "How many tokens has this reply so far?",
            "lanes",
            "the batch lanes: its steps since the prompt, the prompt's included.",
            _written,
        ),
        Check(
            "How many of the prompt's tokens were computed?",
            "events",
            "the events tell what came from the tree; the rest was computed.",
            lambda stage: f"{_lane(stage).computed_tokens} of {_lane(stage).prompt_tokens}",
        ),
        Check(
            "Has the reply ended, and if it has, why?",
            "events",
            "the events: an end is told with its reason, stop, length, abort or error.",
            lambda stage: "not yet" if stage.state().requests else "it has",
        ),
    ),
    {"kv_blocks": 96},
)
