"""The chat screen, driven like a user drives it, over the scripted source."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from engine.errors import EngineError
from engine.process.heartbeat import Condition
from engine.trace.views import CACHED
from minitui.chat.alternatives import known_tokens
from minitui.chat.conversation import Message
from minitui.chat.sessions import Chats
from minitui.chat.store import Store
from minitui.settings import Settings
from minitui.teaching.stage import Stage
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.audience import JoinScreen
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.screens.dialogs import ChoiceDialog, EngineDownDialog, TextDialog
from minitui.tui.screens.help import HelpScreen, bindings_here
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.widgets.bars import StatusBar, TopBar
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.prompt import Prompt
from minitui.tui.widgets.chat.session_tabs import SessionTabs
from minitui.tui.widgets.chat.transcript import MOST_SHOWN, Transcript
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import RadixTree
from tests.support.app.chat_file import open_chats
from tests.support.app.driving import press, text_of, type_text, until
from tests.support.app.fake_client import ByteCodec, FakeSource

SYSTEM = "You explain inference engines. " * 3
KNOWN = ["What is a block table?", "What is a radix tree?", "Why is decode slow?"]


@contextlib.asynccontextmanager
async def running(
    source: FakeSource | None = None, size: tuple[int, int] = (120, 36), store: Store | None = None, **settings: Any
) -> AsyncIterator[tuple[MinituiApp, Pilot[Any], ChatScreen]]:
    source = source or FakeSource()
    app = MinituiApp(
        source, Chats(source, store), Settings(**settings), system=SYSTEM, known_questions=KNOWN, speaker="tutor",
        load_codec=lambda info: ByteCodec(),
    )
    with patch("minitui.tui.screens.chat.TEXT_EVERY", 0.0):  # every frame has the text of its moment
        async with app.run_test(size=size, notifications=True) as pilot:
            screen = app.screen
            assert isinstance(screen, ChatScreen)
            if source.loaded.is_set():
                await until(pilot, lambda: app.progress is None)
            yield app, pilot, screen


@contextlib.asynccontextmanager
async def in_mid_answer(**options: Any) -> AsyncIterator[tuple[MinituiApp, Pilot[Any], ChatScreen]]:
    """As `running`, when the first letters of an answer of 3,000 are there."""
    async with running(FakeSource(lambda prompt: "y" * 3000, speed=0.002), **options) as (app, pilot, screen):
        app.submit("go on")
        await until(pilot, lambda: app.session.messages[-1].text)
        yield app, pilot, screen


async def ask(app: MinituiApp, pilot: Pilot[Any], text: str) -> None:
    session = app.session
    assert app.screen.query_one(Prompt).has_focus, "letters would be keys"
    await type_text(pilot, text)
    await press(pilot, "enter")
    await until(pilot, lambda: session.messages and not session.busy)


async def test_an_answer_without_text_says_so():
    async with running(FakeSource(lambda prompt: "")) as (app, pilot, screen):
        await ask(app, pilot, "hello")
        await until(pilot, lambda: "prompt tokens from cache" in screen.transcript.text)
        assert "(empty reply)" in screen.transcript.text


async def test_a_token_of_an_answer_shows_what_else_it_could_have_been() -> None:
    async with running(FakeSource(lambda prompt: "Paged.")) as (app, pilot, _):
        await press(pilot, "ctrl+g", "k")
        assert "not known here" in [notice.message for notice in app._notifications][-1]
        app.chats.send(app.session, "hello")
        with pytest.raises(EngineError, match="still being answered"):
            known_tokens(app.chats, app.session)
        await until(pilot, lambda: not app.session.busy)
        await press(pilot, "k")
        await until(pilot, lambda: "75.0%" in text_of(app))
        shown = text_of(app)
        prompt = app.session.messages[-1].metrics["prompt_tokens"]
        assert f"token {prompt + 1} of {len(app.session.ids)}" in shown and re.search("→ “P” +█+ +75.0%", shown)
        assert re.search("  “Q” +█+ +25.0%", shown) and "rank 1 in the model's own" in shown
        await press(pilot, "right", "right")
        await until(pilot, lambda: re.search("→ “g” +█+ +<25.0%", text_of(app)))  # the script lists only “P” and “Q”
        assert "rank below 2" in text_of(app)
        requests = [lane.request for lane in app.view.history.lanes.lanes.values()]
        asked = {request.prompt_tokens for request in requests if request.group == "tokens"}
        assert asked >= {prompt, prompt + 2}, "each is a request for the tokens before it"
        await press(pilot, "escape")
        app.session.ids_model = "another"
        with pytest.raises(EngineError, match="not known here"):
            known_tokens(app.chats, app.session)


async def test_a_question_is_answered_and_its_figures_stand_under_it():
    async with running() as (app, pilot, screen):
        await ask(app, pilot, "What is a block table?")
        text = screen.transcript.text
        assert "you      What is a block table?" in text
        assert "tutor    A block table maps positions to blocks." in text  # Markdown's stars are gone
        assert "prompt tokens from cache" in text
        assert "first token" in text
        assert "block table ✓" in screen.query_one(SessionTabs).text


async def test_inspect_shows_the_phases_of_a_start_until_the_engine_is_there():
    source = FakeSource(loads_at_once=False)
    async with running(source) as (app, pilot, _):
        await press(pilot, "escape", "2")
        panel = app.screen.query_one(StepTimings)
        await until(pilot, lambda: "loading weights" in panel.text)
        found = re.findall(r"([\d,]+) ms  (.+?) *(?:│|$)", panel.text, re.MULTILINE)
        assert [name for _, name in found] == ["the application", "loading weights", "all"]
        first, second, both = (int(ms.replace(",", "")) for ms, _ in found)
        assert first > 0 and abs(first + second - both) <= 1 and "Start" in panel.text
        source.loaded.set()
        await until(pilot, lambda: "loading weights" not in panel.text)


async def test_what_is_asked_of_the_engine_while_it_loads_is_done_when_it_is_there():
    source = FakeSource(loads_at_once=False)
    async with running(source) as (app, pilot, screen):
        app.submit("/slow 20")
        app.submit("/pause")
        app.submit("early")
        await _said(app, pilot, "the engine is starting: the command is sent as soon as this has ended")
        assert app.pace == 1 and not source.info
        assert "waits for the engine" in screen.query_one(SessionTabs).text
        source.loaded.set()
        await until(pilot, lambda: app.pace == 20 and app.gated)
        await asyncio.sleep(0.05)
        assert app.session.busy and not app.session.messages[-1].text
        app.submit("/pause")
        app.submit("/slow 1")
        await until(pilot, lambda: not app.session.busy)


async def test_a_dialog_stands_before_the_dimmed_picture_which_costs_little_meanwhile():
    async with running(size=(120, 36)) as (app, pilot, _screen):
        await ask(app, pilot, "What is a block table?")
        await press(pilot, "escape", "2")
        await press(pilot, "u")
        assert isinstance(app.screen, ChoiceDialog)
        below = app.screen_stack[-2]
        painted = below.painter.frames

        def drawn(*words: str) -> bool:
            picture = app.export_screenshot().replace("&#160;", " ")
            return all(word in picture for word in words)

        await until(pilot, lambda: drawn("Run until", "Batch lanes"))
        frames = app._frames
        for _ in range(10):
            app._frame()
        assert below.painter.frames <= painted + 1 + (app._frames - frames) // app.settings.fps
        await press(pilot, "escape")
        await until(pilot, lambda: below.painter.frames > painted)


async def test_a_chat_with_huge_messages_is_shown_in_part_and_says_how_much_is_left_out():
    """The whole would take minutes. The newest messages have the room first."""
    texts = ["old " * 3_000_000, "**word** " * 30_000, "short", "[" * 10_000_000]
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    async with running() as (app, pilot, screen):
        app.session.messages[:] = messages
        transcript = screen.query_one(Transcript)
        await until(pilot, lambda: "9,700,000 characters are not shown" in transcript.text)
        text = transcript.text
        assert sum(map(len, text.split())) < 2 * MOST_SHOWN
        missing = [n for n in ("12,000,000", "270,000", "5") if f"… {n} characters are not shown …" not in text]
        assert not missing
        app.session.messages.append(Message("user", "a new question"))
        transcript.sync()
        assert transcript.text.endswith("a new question\n") and "9,750,000 characters" in transcript.text


async def test_one_key_replays_the_system_prompt_in_a_new_chat_and_tells_the_hit():
    async with running() as (app, pilot, screen):
        await press(pilot, "escape", "r")  # in an empty chat it asks there first
        await until(pilot, lambda: not any(s.busy for s in app.chats.sessions))
        assert len(app.chats.sessions) == 2
        metrics = app.session.messages[-1].metrics
        assert metrics["cached_tokens"] > 0
        note = " ".join(screen.transcript.text.split())
        assert (
            f"replayed: {metrics['cached_tokens']} of {metrics['prompt_tokens']} prompt tokens came from the cache"
            in note
        )


async def test_a_replay_shows_a_hit_also_after_the_cache_was_emptied():
    async with running() as (app, pilot, screen):
        await ask(app, pilot, "What is a block table?")
        await press(pilot, "escape", "X")
        await until(pilot, lambda: any("the cache is empty" in n.message for n in app._notifications))
        assert len(app.view.history.live.state.nodes) == 1
        await press(pilot, "r")
        await until(pilot, lambda: "replayed" in app.session.note)
        assert app.session.messages[-1].metrics["cached_tokens"] > 0
        assert "so a first request computed it. Then replayed:" in " ".join(screen.transcript.text.split())


async def test_completion_offers_what_the_model_knows():
    async with running() as (_app, pilot, screen):
        await type_text(pilot, "what is a r")
        assert screen.completions.display
        assert screen.prompt.suggestion == "adix tree?"
        await press(pilot, "tab")
        assert screen.prompt.text == "What is a radix tree?"
        assert not screen.completions.display
        screen.prompt.put("")
        await type_text(pilot, "decode")  # in the middle of a question
        await press(pilot, "down", "enter")
        assert screen.prompt.text == "Why is decode slow?"


async def test_ctrl_j_breaks_the_line_and_up_brings_back_what_was_asked():
    async with running() as (app, pilot, screen):
        await type_text(pilot, "one")
        await press(pilot, "ctrl+j")
        await type_text(pilot, "two")
        assert screen.prompt.text == "one\ntwo"
        await press(pilot, "enter")
        await until(pilot, lambda: not app.session.busy)
        assert app.session.messages[0].text == "one\ntwo"
        await press(pilot, "up")
        assert screen.prompt.text == "one\ntwo"


async def test_letters_act_only_outside_the_prompt_and_the_footer_says_which():
    async with running() as (app, pilot, screen):
        await until(pilot, lambda: screen.query_one(StatusBar).text.startswith(" TYPING "))
        await type_text(pilot, "of")
        assert len(app.chats.sessions) == 1
        await press(pilot, "escape", "escape")  # the list, then the prompt
        assert screen.query_one(StatusBar).text.startswith(" KEYS ")
        await press(pilot, "o")
        assert len(app.chats.sessions) == 2


async def test_escape_cancels_the_answer_before_it_leaves_the_prompt():
    async with in_mid_answer() as (app, pilot, screen):
        await press(pilot, "escape")
        await until(pilot, lambda: not app.session.busy)
        assert app.session.state == "cancelled"
        assert screen.prompt.has_focus
        assert "cancelled" in screen.transcript.text


@pytest.mark.parametrize("key", ["ctrl+g", "f8"])
async def test_a_key_leaves_the_prompt_while_the_answer_goes_on(key):
    keys = {"keys": key} if key != "ctrl+g" else {}
    async with in_mid_answer(size=(80, 24), keys=keys) as (app, pilot, screen):
        footer = screen.query_one(StatusBar)
        assert f"esc cancel  {key} keys  / commands" in footer.text
        await press(pilot, key)
        await until(pilot, lambda: footer.text.startswith(" KEYS "))
        assert app.session.busy
        await press(pilot, "2")
        assert app.current_mode == "inspect"
        assert app.session.busy
        await press(pilot, "1", "escape")
        await until(pilot, lambda: app.session.state == "cancelled")


async def test_a_click_on_a_tab_shows_its_screen_from_within_the_prompt():
    async with in_mid_answer() as (app, pilot, screen):
        for mode, label in (("lecture", "3 Lecture"), ("inspect", "2 Inspect"), ("chat", "1 Chat")):
            bar = app.screen.query_one(TopBar)
            await until(pilot, lambda bar=bar, label=label: label in bar.text)
            await pilot.click(bar, offset=(bar.text.index(label) + 3, 0))
            await until(pilot, lambda mode=mode: app.current_mode == mode)
        assert app.session.state != "cancelled"
        assert screen.transcript.has_focus


async def test_a_fork_and_one_prompt_to_all_chats():
    async with running() as (app, pilot, screen):
        await ask(app, pilot, "What is a block table?")
        await press(pilot, "escape", "f")
        assert "fork of #1" in app.session.title
        await until(pilot, lambda: "forked from #1" in screen.transcript.text)
        await type_text(pilot, "/all and again")
        await press(pilot, "enter")
        await until(pilot, lambda: not any(s.busy for s in app.chats.sessions))
        assert [s.messages[-2].text for s in app.chats.sessions] == ["and again"] * 2
        assert all(s.messages[-1].metrics["cached_tokens"] > 100 for s in app.chats.sessions)


async def test_rename_system_prompt_and_close_by_slash_commands():
    async with running() as (app, pilot, _screen):
        for command in ("/rename paging", "/system Be brief.", "/new other", "/1"):
            await type_text(pilot, command)
            await press(pilot, "escape")  # the list of commands
            app.focus_prompt(command)
            await press(pilot, "enter")
        assert [(s.title, s.system) for s in app.chats.sessions] == [("paging", "Be brief."), ("other", SYSTEM)]
        assert app.session is app.chats.sessions[0]
        for command in ("/²", "/go ²", "/" + "1" * 5000, "/step ²", "/attach ~nobody-at-all/x", "/export a\0b"):
            app.submit(command)
        for words in ("no command /²", "no chat '²'", "no command /11", "a number of steps", "user", "zero byte"):
            await _said(app, pilot, words)
        assert max(len(n.message) for n in app._notifications) < 500
        app.commands.run("close")
        assert [s.title for s in app.chats.sessions] == ["other"]
        app.commands.run("close")  # the last one makes room for a new one
        assert [s.title for s in app.chats.sessions] == ["new chat"]


async def test_dialogs_ask_and_escape_leaves_everything_as_it_was():
    async with running() as (app, pilot, _screen):
        await press(pilot, "escape", "e")
        assert isinstance(app.screen, TextDialog)
        await type_text(pilot, "mine")
        await press(pilot, "escape")
        assert app.session.title == "new chat"
        await press(pilot, "e")
        app.screen.query_one("Prompt").put("mine")
        await press(pilot, "enter")
        assert app.session.title == "mine"
        await press(pilot, "a")
        assert isinstance(app.screen, ChoiceDialog)
        await type_text(pilot, "slow")
        await press(pilot, "enter")
        await until(pilot, lambda: app.session.messages and not app.session.busy)
        assert app.session.messages[0].text == "Why is decode slow?"


async def test_every_command_is_in_the_help_with_its_key_and_in_the_palette():
    from minitui.tui.actions import key_label

    async with running(size=(120, 60)) as (app, pilot, _screen):
        await press(pilot, "escape", "question_mark")
        assert isinstance(app.screen, HelpScreen)
        texts = [str(s.render()) for s in app.screen.query("Static")]
        assert texts[0] == "Keys: chat" and "f fork" in texts[1], "the help begins with keys"
        text = "\n".join(texts)
        assert "[keys]" in text and all(b.id and b.tooltip for b in MinituiApp.BINDINGS)
        for action in app.actions:
            assert action.id in text
            assert not action.slash or f"/{action.slash}" in text
            assert not action.key or key_label(action.key) in text
        await press(pilot, "escape", "colon")
        assert isinstance(app.screen, ChoiceDialog)
        shown = " ".join(str(option.prompt) for option in app.screen.query_one("OptionList").options)
        assert "Fork this" in shown and "Leave the prompt" not in shown, "the palette has no prompt to leave"
        await type_text(pilot, "fork thisx")
        await until(pilot, lambda: "has these words" in str(app.screen.query_one(".hint").render()))
        await press(pilot, "backspace")
        await until(pilot, lambda: "enter accepts" in str(app.screen.query_one(".hint").render()))
        app.chats.send(app.session, "x")
        await until(pilot, lambda: not app.session.busy)
        await press(pilot, "enter")
        assert len(app.chats.sessions) == 2


async def test_a_click_takes_what_was_clicked_also_if_typing_has_changed_the_list_meanwhile():
    async with running() as (app, pilot, _screen):
        taken: list[str] = []
        app.choose("Which?", [(name, "") for name in ("ash", "beech", "cedar", "oak")], taken.append)
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        options = app.screen.query_one(OptionList)
        options.highlighted = 3
        options.action_select()  # posts a message
        app.screen._fill("ash")
        await until(pilot, lambda: taken)
        assert taken == ["oak"]


@pytest.mark.parametrize("choice", [0, 1])
async def test_letters_answer_a_demos_prediction_and_are_keys_again_afterwards(choice):
    async with running() as (app, pilot, _screen):
        await press(pilot, "escape")
        said: list[str] = []
        held = lambda: app.feed.frozen  # noqa: E731
        app.asking = stage = Stage(app.source, app.feed, app.chats, "", said.append, held=held, keys=True)
        asked = asyncio.create_task(stage.predict("Whose blocks go first?", ["Alpha", "Bravo"]))
        await until(pilot, lambda: stage.open_choices == 2)
        assert "Press a b. The answer comes in 6 s; space stops the time." in said[0]
        await press(pilot, "space")
        await until(pilot, lambda: "The time is stopped; space continues." in said[-1])
        await press(pilot, "u")
        await _said(app, pilot, "the demo controls the engine")
        assert not app.gated and stage.open_choices == 2, "nothing has been shown"
        await press(pilot, "ab"[choice], "space")
        await until(pilot, asked.done)
        right, wrong = f"You said {'ab'[choice]}: correct. ", f"You said {'ab'[choice]}: the answer is {'ba'[choice]}. "
        assert (stage.verdict(choice), stage.verdict(1 - choice)) == (right, wrong)
        await press(pilot, "e")
        assert isinstance(app.screen, TextDialog), "e renames, as ever"


async def test_a_demo_waits_while_it_is_held_and_nobody_else_steps_its_engine():
    async with running() as (app, pilot, _screen):
        await press(pilot, "escape")
        held = lambda: app.feed.frozen  # noqa: E731
        app.asking = stage = Stage(app.source, app.feed, app.chats, "", lambda text: None, held=held, keys=True)
        await press(pilot, "p")
        assert app.feed.frozen and not app.gated, "p means: wait"
        reading = asyncio.create_task(stage.pause(0.05))
        await press(pilot, "n", "N", "less_than_sign")
        await asyncio.sleep(0.15)
        assert not reading.done() and not [verb for verb, _ in app.source.calls if verb in ("step", "pace", "pause")]
        await press(pilot, "p")
        await reading


async def test_keys_of_panel_and_screen_are_in_the_help_and_in_the_palette():
    async with running(size=(120, 60), keys={"tree.search": "f9"}) as (app, pilot, _screen):
        await press(pilot, "escape", "2")
        for panel in app.screen.query(LinePanel):
            if panel.focusable and panel.painted:
                panel.focus()
                await until(pilot, lambda panel=panel: app.focused is panel)
                told = {b.id for here in bindings_here(app) for b in here.bindings}
                refused = {f"timings.{key}" for key in ("up", "down", "left", "right")}
                refused |= {f"map.{key}" for key in ("unzoom", "pageup", "pagedown")}
                assert told >= {b.id for b in [*type(panel).BINDINGS, *InspectScreen.BINDINGS]} - refused
                assert not told & refused, "the map is not zoomed, and Timings have no list to choose from"
        app.screen.query_one(RadixTree).focus()
        await press(pilot, "question_mark")
        text = "\n".join(str(s.render()) for s in app.screen.query("Static"))
        assert "The panel with the focus: Radix tree" in text and "tree.search f9 " in text
        for binding in [*RadixTree.BINDINGS, *InspectScreen.BINDINGS]:
            assert re.search(rf"{re.escape(binding.id)} +\S+ +{re.escape(binding.description)}", text), binding.id
        await press(pilot, "escape", "colon")
        await type_text(pilot, "another property")
        await press(pilot, "enter")
        await until(pilot, lambda: app.screen.query_one(BlockMap).mode == "owner")


async def test_gate_step_pace_and_run_until_reach_the_engine():
    length = 4000  # asked for at every step
    source = FakeSource(lambda prompt: "y" * length, speed=0.001)
    async with running(source) as (app, pilot, screen):
        app.submit("go")
        await until(pilot, lambda: app.session.messages[-1].text)
        await press(pilot, "escape")  # cancels
        await until(pilot, lambda: not app.session.busy)
        app.submit("again")
        await until(pilot, lambda: app.session.busy and app.session.messages[-1].text)
        app.screen.set_focus(None)
        await press(pilot, "p")
        await until(pilot, lambda: app.gated)
        await press(pilot, "i")
        app._frame()
        assert "esc keys (engine paused)  esc esc cancel" in screen.query_one(StatusBar).text
        await press(pilot, "escape")  # leaves the prompt: a paused answer would be lost
        assert app.session.busy and app.focused is screen.transcript
        assert "PAUSED" in screen.query_one(TopBar).text
        step = app.view.history.live.state.step
        await press(pilot, "n")
        await until(pilot, lambda: app.view.history.live.state.step == step + 1)
        await press(pilot, "N")
        await until(pilot, lambda: app.view.history.live.state.step == step + 11)
        await press(pilot, "less_than_sign")
        await until(pilot, lambda: app.pace == 2)
        await press(pilot, "less_than_sign")
        await until(pilot, lambda: app.pace == 5)
        await press(pilot, "greater_than_sign")
        await until(pilot, lambda: app.pace == 2)
        assert "slow motion" in screen.query_one(TopBar).text
        app.commands.run_slash("/until eviction")
        await until(pilot, lambda: "RUNNING until the next eviction" in screen.query_one(TopBar).text)
        app.commands.run_slash("/until finish")
        await until(pilot, lambda: source.calls[-1][1].get("predicate") == {"event": "finish"})
        length = 1
        await until(pilot, lambda: not app.session.busy)
        await until(pilot, lambda: "PAUSED at step" in screen.query_one(TopBar).text)
        await press(pilot, "p")
        await until(pilot, lambda: not app.gated)
        verbs = [verb for verb, _ in source.calls]
        assert verbs == ["pause", "step", "step", "pace", "pace", "pace", "run_until", "run_until", "resume"]


async def test_the_chat_screen_shows_its_own_chat_whatever_is_selected_elsewhere():
    async with running() as (app, pilot, _screen):
        await ask(app, pilot, "What is a block table?")
        other = app.view.history.requests_of(app.session.id)[-1]
        await press(pilot, "escape", "o")
        await ask(app, pilot, "What is a radix tree?")
        await until(pilot, lambda: app.view.history.requests_of(app.session.id))
        own = app.view.history.requests_of(app.session.id)[-1]
        await press(pilot, "escape", "2")
        app.view.select("request", other)
        await until(pilot, lambda: f"r{other}" in app.screen.query_one(BlockTable).text)
        await press(pilot, "1")
        await until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await until(pilot, lambda: f"r{own}" in app.screen.query_one(BlockTable).text)
        assert app.view.subject() == own
        await press(pilot, "2")
        await until(pilot, lambda: f"r{other}" in app.screen.query_one(BlockTable).text)


async def test_freezing_stops_the_picture_not_the_engine():
    async with running(FakeSource(lambda prompt: "y" * 300, speed=0.001)) as (app, pilot, screen):
        await press(pilot, "escape", "space")
        assert app.feed.frozen
        app.submit("go")
        await until(pilot, lambda: not app.session.busy)  # the engine ran
        assert app.view.history.live.state.step <= 0
        assert app.feed.steps_behind >= 300
        assert "steps behind" in screen.query_one(TopBar).text
        await press(pilot, "space")
        await until(pilot, lambda: app.feed.backlog == 0)
        assert app.view.history.live.state.step >= 300
        assert app.feed.dropped == 0


async def test_the_engines_death_is_told_and_one_key_starts_it_again():
    async with in_mid_answer() as (app, pilot, screen):
        source = app.source
        source.die("the engine process ended by signal SIGKILL")
        await until(pilot, lambda: isinstance(app.screen, EngineDownDialog))
        assert "SIGKILL" in "".join(str(s.render()) for s in app.screen.query("Static"))
        await until(pilot, lambda: "SIGKILL" in screen.transcript.text)
        await press(pilot, "r")
        await until(pilot, lambda: app.progress is None and source.error is None)
        app.commands.run("retry")
        await until(pilot, lambda: app.session.messages[-1].text)
        assert app.view.history.live.state.step >= 0  # the panels live again, too


def hung(source):
    source.condition = Condition("step", 9.0, 6.0, "the engine's process 7 has given no sign of life for 6 s")


async def test_an_engine_that_hangs_is_told_until_it_answers_again():
    source = FakeSource()
    async with running(source) as (app, pilot, screen):
        hung(source)
        await until(pilot, lambda: isinstance(app.screen, EngineDownDialog))
        assert "no sign of life for 6 s" in "".join(str(s.render()) for s in app.screen.query("Static"))
        source.condition = Condition()
        await until(pilot, lambda: app.screen is screen)
        hung(source)
        await until(pilot, lambda: isinstance(app.screen, EngineDownDialog))
        await press(pilot, "escape")
        await until(pilot, lambda: "does not answer" in screen.query_one(TopBar).text)
        assert app.screen is screen, "it was closed: it does not come again by itself"
        app.submit("/restart")
        await until(pilot, lambda: app.progress is None and not source.condition.hung)
        await until(pilot, lambda: "does not answer" not in screen.query_one(TopBar).text)
        assert app.screen is screen
        source.condition = Condition(preparing="capturing CUDA graphs: 12/52")
        await until(pilot, lambda: "capturing CUDA graphs: 12/52" in screen.query_one(TopBar).text)


async def test_escape_then_q_quits_while_the_engine_hangs():
    async with in_mid_answer() as (app, pilot, screen):
        source = app.source
        source.abort = lambda stream: None  # nothing is acknowledged any more
        hung(source)
        await until(pilot, lambda: isinstance(app.screen, EngineDownDialog))
        await press(pilot, "escape")
        await until(pilot, lambda: app.screen is screen and not screen.prompt.has_focus)
        await press(pilot, "q")
        await until(pilot, lambda: app._exit)
    assert source.closed
    assert app.session.messages[-1].state == "cancelled"


async def test_an_answer_cancelled_twice_ends_without_the_engines_word():
    async with in_mid_answer() as (app, pilot, _screen):
        app.source.abort = lambda stream: None
        await press(pilot, "escape")
        assert app.session.busy
        await press(pilot, "escape")
        await until(pilot, lambda: not app.session.busy)
        assert app.session.messages[-1].state == "cancelled"


async def test_an_empty_chat_shows_what_the_engine_says_about_itself():
    source = FakeSource(loads_at_once=False, notes=["the weights are rounded to 8 bits"])
    async with running(source) as (_, pilot, screen):
        await until(pilot, lambda: "Several chats" in screen.transcript.text)
        source.loaded.set()
        await until(pilot, lambda: "the weights are rounded to 8 bits" in screen.transcript.text)


async def test_a_long_system_prompt_ends_with_a_whole_word():
    async with running(FakeSource()) as (app, pilot, screen):
        app.session.messages.append(Message("user", "Why?"))
        for word in ("tree", "block", "prefix"):
            app.session.system = " ".join([word] * 80)
            await until(pilot, lambda word=word: f" {word} …" in screen.transcript.text)


async def test_an_engine_that_cannot_start_says_why():
    async with running(FakeSource(start_error="there is not enough memory for this model")) as (app, pilot, screen):
        await until(pilot, lambda: isinstance(app.screen, EngineDownDialog))
        assert "not enough memory" in "".join(str(s.render()) for s in app.screen.query("Static"))
        assert not app.session.messages or app.session.state == "error"
        rail = screen.query_one("#rail")
        await until(pilot, lambda: all("the engine could not start" in panel.text for panel in rail.query(LinePanel)))
        await press(pilot, "q")
    assert app.return_code == 1


@pytest.mark.parametrize("size", [(99, 30), (100, 30)])
async def test_the_screen_fits_every_size_and_keeps_what_matters(size):
    async with running(size=size) as (app, pilot, screen):
        await ask(app, pilot, "What is a block table?")
        assert screen.has_class("-wide") == (size[0] >= 100)
        assert bool(screen.query_one("#rail").display) == (size[0] >= 100)
        assert bool(screen.query_one("#glance").display) == (size[0] < 100)
        assert screen.transcript.size.height >= 8
        assert screen.prompt.region.bottom <= size[1] - 1
        assert max(len(line) for line in screen.transcript.text.splitlines()) <= screen.transcript.size.width
        assert all(panel.region.right <= size[0] for panel in screen.query(LinePanel) if panel.region.height)


async def test_ascii_mode_draws_only_ascii():
    """Prompt and dialogs, whose frames Textual draws, too."""
    async with running(ascii=True) as (app, pilot, screen):
        await ask(app, pilot, "What is a block table?")
        for bar in screen.query("Bar"):
            assert bar.text.isascii(), bar.text  # type: ignore[attr-defined]
        await press(pilot, "escape")
        for key in ("", "e"):
            if key:
                await press(pilot, key)
            shown = text_of(app)
            assert not set(shown) & set("╭╮╰╯│─▌▊▎…"), shown
        await press(pilot, "escape", "question_mark")
        assert isinstance(app.screen, HelpScreen)
        shown = text_of(app)
        assert not {c for c in shown if not c.isascii()} and "esc closes" in shown


async def test_leaving_keeps_the_answer_as_far_as_it_is(tmp_path: Path):
    path = tmp_path / "chats.sqlite"
    async with in_mid_answer(store=Store(path)) as (app, pilot, _screen):
        await press(pilot, "escape")
        app.submit("once more")
        await until(pilot, lambda: app.session.messages[-1].text)
        app.commands.run("quit")
    [kept] = open_chats(Store(path))
    assert [m.state for m in kept.messages] == ["done", "cancelled", "done", "cancelled"]
    assert kept.messages[-1].text.startswith("y")


async def test_thinking_is_folded_and_unfolds():
    source = FakeSource(lambda prompt: "<think>first this, then that</think>\n\nSo: yes.")
    async with running(source) as (app, pilot, screen):
        await ask(app, pilot, "why")
        assert "thinking: 4 words" in screen.transcript.text
        assert "then that" not in screen.transcript.text
        await press(pilot, "escape", "t")
        await until(pilot, lambda: "then that" in screen.transcript.text)
        assert "So: yes." in screen.transcript.text
    async with running() as (app, pilot, _screen):
        await ask(app, pilot, "why")
        app.commands.run("think")
        await _said(app, pilot, "has thinking to show")


async def test_unknown_commands_and_wrong_arguments_are_sentences():
    async with running() as (app, pilot, screen):
        for command, words in (
            ("/nonsense", "no command"),
            ("/slow fast", "factor"),
            ("/go 9", "chats 1 to 1"),
            ("/theme pink", "no theme"),
            ("/until never", "admission"),
            ("/set temperature hot", "it must be a finite number"), ("/set ignore_eos maybe", "on or off"),
            ("/s", "is ambiguous"),
            ("/step x", "number"),
        ):
            app.submit(command)
            await pilot.pause()
            shown = [n.message for n in app._notifications]
            assert any(words in message for message in shown), (command, shown)
            assert screen.prompt.text == command, "it can be corrected"


async def test_the_settings_are_listed_with_the_defaults_that_are_known():
    async with running() as (app, pilot, _screen):
        app.submit("/set top_k 5")
        app.submit("/set")
        await _said(app, pilot, "temperature 0.0 (default); top_p default; top_k 5; ")


async def test_the_code_for_phones_is_above_the_middle_of_its_address():
    pytest.importorskip("segno", reason="the extra 'web' is not installed")
    async with running() as (app, pilot, _):
        app.push_screen(JoinScreen("http://192.0.2.2:8941/paging-e9zq7tf6k2"))
        await until(pilot, lambda: len(app.screen.query(Static)) == 2)
        await pilot.pause()
        code, address = app.screen.query(Static)
        assert abs(code.region.x + code.region.right - address.region.x - address.region.right) <= 1


async def _said(app: MinituiApp, pilot: Pilot[Any], words: str) -> None:
    await until(pilot, lambda: any(words in n.message for n in app._notifications))


async def test_the_last_question_is_edited_and_asked_in_its_place(tmp_path: Path):
    async with running(store=Store(tmp_path / "chats.sqlite")) as (app, pilot, _screen):
        await ask(app, pilot, "What is a block?")
        await ask(app, pilot, "And why?")
        await press(pilot, "escape", "E")
        assert isinstance(app.screen, TextDialog)
        await press(pilot, *"ever", "enter")
        await until(pilot, lambda: not app.session.busy)
        asked = [m.text for m in app.session.messages if m.role == "user"]
        assert asked == ["What is a block?", "And why?ever"]
        assert len(app.session.messages) == 4
        kept = app.chats.store.load(app.session.id)
        assert [m.text for m in kept.messages] == [m.text for m in app.session.messages]


async def test_a_closed_chat_is_found_by_its_words_and_comes_back(tmp_path: Path):
    async with running(store=Store(tmp_path / "chats.sqlite")) as (app, pilot, _screen):
        await ask(app, pilot, "Tell me of walruses")
        first = app.session.id
        app.submit("/close")
        app.submit("/search walrus")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await press(pilot, "enter")
        await until(pilot, lambda: app.session.id == first)
        assert [s.id for s in app.chats.sessions].count(first) == 1
        await press(pilot, "i")
        await ask(app, pilot, "And now?")
        assert len(app.session.messages) == 4
        app.submit("/search walrus")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await press(pilot, "enter")
        await until(pilot, lambda: not isinstance(app.screen, ChoiceDialog))
        assert [s.id for s in app.chats.sessions].count(first) == 1, "one that is open is only shown"
        app.submit("/search nothing-of-the-kind")
        await _said(app, pilot, "no chat contains")


async def test_a_found_chat_opens_at_the_passage_not_at_its_end(tmp_path: Path):
    async with running(store=Store(tmp_path / "chats.sqlite")) as (app, pilot, screen):
        await ask(app, pilot, "Tell me of walruses")
        app.session.messages[1:1] = [Message("assistant", "line\n\n" * 60)]
        app.submit("/search walrus")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await press(pilot, "enter")
        await until(pilot, lambda: not isinstance(app.screen, ChoiceDialog))
        transcript = screen.transcript
        await until(pilot, lambda: transcript.max_scroll_y > 20 and transcript.scroll_y < 5)
        assert app.screen.get_selected_text() == "walrus"


async def test_messages_and_code_are_copied_and_files_attached(tmp_path: Path):
    async with running() as (app, pilot, screen):
        app.session.messages += [Message("user", "Show"), Message("assistant", "So:\n```python\nx = 1\n```\ndone")]
        app.submit("/copy")
        assert app.clipboard == "So:\n```python\nx = 1\n```\ndone"
        app.submit("/copy code")
        assert app.clipboard == "x = 1"
        app.submit("/pick")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await press(pilot, "down", "down", "enter")
        await until(pilot, lambda: app.clipboard == "Show")
        path = tmp_path / "a.json"
        app.submit(f"/export {path}")
        assert '"content": "Show"' in path.read_text()
        notes = tmp_path / "notes.txt"
        notes.write_text("two\nlines\n")
        app.submit(f"/attach {notes}")
        await until(pilot, lambda: screen.prompt.text == "notes.txt:\n```\ntwo\nlines\n```\n")
        assert screen.prompt.has_focus


async def test_one_key_starts_over():
    source = FakeSource()
    async with running(source) as (app, pilot, _screen):
        await ask(app, pilot, "What is a block?")
        assert app.view.history.live.state.counts[CACHED] > 0
        await press(pilot, "escape", "p")
        await until(pilot, lambda: app.gated)
        app.ask_question("And another?")
        await until(pilot, lambda: app.view.history.live.state.requests)
        await press(pilot, "3", "X")
        await _said(app, pilot, "started over")
        state = app.view.history.live.state
        assert not app.gated and not state.requests and state.counts[CACHED] == 0
        assert not app.view.history.lanes.lanes, "the history begins anew"
        assert app.session.messages[-1].state == "cancelled", "chats stay"


async def test_what_makes_the_engine_go_on_and_a_question_lead_back_from_the_past():
    async with running(FakeSource(lambda prompt: "y" * 2000, speed=0.002), size=(80, 24)) as (app, pilot, _screen):
        await ask_paused(app, pilot)
        for keys in (["end"], ["p"], ["p", "N"], ["u", "enter"]):
            await press(pilot, "comma", "comma")
            assert app.view.moment.travel_text and " end now " in app.screen.query_one(StatusBar).text
            if keys[-1] == "N":
                await press(pilot, keys.pop(0))  # pausing leaves the past as it is
                assert app.view.moment.travel_text
            await press(pilot, *keys)
            assert not app.view.moment.travel_text, keys
        await press(pilot, "comma")
        assert app.view.moment.travel_text
        app.submit("/all and you?")
        app.submit("/new")
        app.submit("And you?")
        assert not app.view.moment.travel_text


async def ask_paused(app: MinituiApp, pilot: Pilot[Any]) -> None:
    app.submit("go on")
    await until(pilot, lambda: len(app.session.messages[-1].text) > 20)
    await press(pilot, "ctrl+g", "3", "p")
    await until(pilot, lambda: app.gated)
