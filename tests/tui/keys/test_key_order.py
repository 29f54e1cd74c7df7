"""Keys that arrive in one packet take effect in their order, as if they had been pressed one after the other."""

from __future__ import annotations

import time

import pytest
from textual._xterm_parser import XTermParser

from minitui.tui.apps.app import MinituiApp
from tests.support.app.driving import until
from tests.tui.screens.test_chat_screen import ask, running


def send(app: MinituiApp, packet: str) -> None:
    """Let the application read these bytes of a terminal at once."""
    parser = XTermParser()
    for event in [*parser.feed(packet), *_rest(parser)]:
        app.post_message(event)


def _rest(parser: XTermParser) -> list:
    time.sleep(0.11)  # after this time, an escape is a key, not the begin of a sequence
    return list(parser.tick())


async def test_tab_and_enter_in_one_packet_send_the_completed_question() -> None:
    async with running() as (app, pilot, _):
        send(app, "what is a b\t\r")
        await until(pilot, lambda: app.session.messages)
        assert app.session.messages[0].text == "What is a block table?"


@pytest.mark.parametrize("before", ["", "x"])
async def test_escape_and_a_letter_in_one_packet_are_two_keys(before: str) -> None:
    async with running() as (app, pilot, screen):
        await ask(app, pilot, "why")
        send(app, f"{before}\x1br")
        await until(pilot, lambda: len(app.chats.sessions) == 2 and not app.session.busy)
        assert screen.prompt.text == before, "the letter is a key, not text"
        send(app, "\x1b2")
        await until(pilot, lambda: app.current_mode == "inspect")


@pytest.mark.parametrize("alt", ["\x1br", "\x1b[114;3u"])
async def test_alt_and_a_letter_run_a_command_from_the_prompt_and_the_answer_continues(alt: str) -> None:
    async with running() as (app, pilot, screen):
        await ask(app, pilot, "why")
        await app.source.control("pause")
        app.ask_question("and how")
        answer = app.session.messages[-1]
        screen.prompt.put("a draft")
        screen.prompt.focus()
        await pilot.pause()
        send(app, alt)
        await until(pilot, lambda: len(app.chats.sessions) == 2)
        assert screen.prompt.text == "a draft" and answer.state in ("queued", "running")
        send(app, alt)
        await until(pilot, lambda: len(app.chats.sessions) == 3)
        assert answer.state in ("queued", "running"), "outside the prompt, alt does not cancel"


async def test_keys_after_a_key_that_opens_a_dialog_go_to_the_dialog() -> None:
    async with running() as (app, pilot, screen):
        send(app, "\x1b:rename\rpaging\r")
        await until(pilot, lambda: app.session.title.endswith("paging") and len(app.screen_stack) == 1)
        assert not screen.prompt.text and not app.session.messages


async def test_a_key_whose_screen_is_gone_does_not_stop_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (app, pilot, screen):
        monkeypatch.setattr(app._keys, "came", lambda done: None)  # as if no key reached the end of its path
        send(app, "ab")
        await until(pilot, lambda: screen.prompt.text == "ab")
