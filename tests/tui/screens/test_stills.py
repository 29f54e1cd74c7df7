"""What the Chat screen and the Lesson screen look like, in two sizes: the pictures stand in tests/snapshots."""

from __future__ import annotations

import pytest

from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.tui.apps.app import MinituiApp
from tests.support.app.driving import settled, until
from tests.support.app.fake_client import ByteCodec
from tests.support.app.stills import SIZES, Album, Clock, StillSource

SYSTEM = "You are a patient teacher. You answer briefly, and explain how inference engines work."
ANSWERS = {
    "KV cache": "The keys and values of all tokens so far, kept so that they need not be computed again.",
    "batch": "<think>\nThe user asks about batches. A step serves several requests at once, and reads the weights "
    "once for all of them.\n</think>\n\nA **batch** is what one step computes together:\n\n- the next token of every "
    "request that decodes\n- a piece of a prompt, if one has come\n\nThe weights are read once for all.",
    "position": "Divide by the size of a block:\n\n```python\ndef slot(table: list[int], position: int) -> int:\n"
    '    """Where the keys of a token lie."""\n'
    "    return table[position // 16] * 16 + position % 16  # a long line of code goes on below\n"
    "```\n\nNothing is copied when a request grows.",
}
QUESTIONS = ["What is a KV cache?", "What is a batch?", "How do I find the block of a position?"]


def answer(prompt: str) -> str:
    question = prompt.rpartition("user\n")[2]
    return next(text for word, text in ANSWERS.items() if word in question)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_chats_look_as_they_did(size: tuple[int, int]) -> None:
    clock = Clock()
    with clock.everywhere():
        source = StillSource(clock, answer=answer)
        app = MinituiApp(
            source, Chats(source), Settings(), system=SYSTEM, known_questions=QUESTIONS, speaker="tutor",
            load_codec=lambda info: ByteCodec(),
        )
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.progress is None and app.feed.live)

            async def ask(text: str) -> None:
                app.ask_question(text)
                await until(pilot, lambda: app.session.request in source.engine.scheduler.requests)

            album = Album("chat", size, app, clock)
            await album.take("an empty chat")
            await ask(QUESTIONS[0])
            await source.steps()
            await album.take("an answer, and where its tokens lie", rest=0.5)
            app.commands.run("new")
            app.chats.sessions[0].title = "KV cache"
            await ask(QUESTIONS[2])
            await source.steps(30)
            app.commands.run("new")
            await ask(QUESTIONS[1])
            await source.steps(200)
            text = await album.take("three chats; an answer is written behind folded thinking")
            assert "thinking: " in text and "tok/s" in text
            app.commands.run("previous")
            await source.steps()
            text = await album.take("a block of code", rest=0.5)
            assert "return table[" in text
            app.commands.run("palette")
            await settled()
            await pilot.press(*"fork")
            await album.take("the commands with a word")
            await pilot.press("escape")
        album.compare()
