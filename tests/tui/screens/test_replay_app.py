"""The application over a recording, and its picture."""

from __future__ import annotations

import re
import shutil
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.errors import EngineError
from minitui.cli.recordings import run_export
from minitui.export import png
from minitui.export.png import find_browser
from minitui.export.svg import screen_svg
from minitui.teaching.scenarios import DEMOS
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceError
from minitui.tui.apps.demo import play_in_app
from minitui.tui.apps.replay_app import ReplayApp, replay_app
from minitui.tui.widgets.bars import StatusBar
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.viewmodel.history.spans import Timeline
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate
from minitui.viewmodel.words.teller import Teller
from tests.support.app.driving import press, text_of, until
from tests.support.records.golden import GOLDEN, random_trace


@pytest.fixture
async def playing(tmp_path: Path) -> AsyncIterator[tuple[ReplayApp, Pilot[Any]]]:
    path = tmp_path / "a.trace"
    shutil.copy(GOLDEN, path)
    app = replay_app(str(path), speed=0.05)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: app.feed.live and app.replay.step > 3)
        yield app, pilot


async def test_a_recording_that_was_cut_off_says_so_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "cut.trace").write_bytes(GOLDEN.read_bytes()[:-2000])
    app = replay_app(str(tmp_path / "cut.trace"), speed=1000.0)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.feed.live and app.replay.ended and not app.feed.backlog)
        app._frame()
        last = app.replay.trace.last_step
        assert not app.replay.trace.complete
        seconds = app.replay.trace.end_t - app.replay.trace.begin_t
        assert f"REPLAY cut off here  {seconds:.1f} of {seconds:.1f} s" in text_of(app)
        assert f"step {last} of 0–{last} " in text_of(app)
        await press(pilot, "question_mark")
        lines = text_of(app).splitlines()
        entry = next(line for line in lines if "previous or next bookmark" in line)
        after = lines[lines.index(entry) + 1]
        assert re.search(r"│ {21}\S", after[after.index("│", 3) :]) or re.search(r" {19}\w", after), after


async def test_a_recording_plays_stands_steps_and_jumps(playing: tuple[ReplayApp, Pilot[Any]]) -> None:
    app, pilot = playing
    assert "REPLAY plays ×0.05" in text_of(app) and "simulation" in text_of(app)
    await press(pilot, "p")
    stood = app.replay.step
    await pilot.pause(0.1)
    assert app.replay.step == stood and "REPLAY paused" in text_of(app) and "PAUSED" not in text_of(app)
    await press(pilot, "n")
    await until(pilot, lambda: app.replay.step == stood + 1 == app.view.history.live.state.step)
    assert app.story == narrate(app.view, stood + 1) != ""
    await press(pilot, "right_parenthesis")
    await until(pilot, lambda: app.replay.step == stood + 8 and not app.feed.backlog)
    assert app.view.history.live.state.step == stood + 8 and not app.feed.dropped
    await press(pilot, "left_parenthesis")
    await until(pilot, lambda: app.position == stood + 1 == app.view.moment.horizon)
    await press(pilot, "greater_than_sign", "greater_than_sign")
    assert app.replay.speed == 0.2
    await press(pilot, "less_than_sign")
    assert app.replay.speed == 0.1


def panels_of(app: Any) -> list[str]:
    """Returns the texts of the panels, except for the lanes, whose rows depend on what was shown before, and for the
    stall in the top bar, which is the worst of those rows."""
    panels = [panel for panel in app.screen.query(LinePanel) if panel.display and not isinstance(panel, BatchLanes)]
    return [re.sub(r" +r[\d,]+ stalled .*? {2,}", " ", panel.text) for panel in panels]


def bar(app: ReplayApp) -> str:
    app._frame()
    return text_of(app).splitlines()[-1]


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_the_bar_is_the_only_clock_and_keys_go_to_the_begin_and_the_end(size: tuple[int, int]) -> None:
    app = replay_app(str(GOLDEN), speed=0.05)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.feed.live and app.replay.step > 3)
        trace = app.replay.trace
        last, seconds = trace.last_step, trace.end_t - trace.begin_t
        assert "REPLAY plays ×0.05" in bar(app)
        await press(pilot, "E")
        await until(pilot, lambda: app.view.moment.horizon == last and not app.feed.backlog)
        assert re.search(rf"REPLAY end  {seconds:.1f} of {seconds:.1f} s  step {last} of 0–{last} ", bar(app))
        await press(pilot, "comma", "comma")  # a step back also pauses
        assert app.replay.paused and app.view.moment.horizon == app.position == last - 2
        ended = app.view.history.steps.get(last - 2)
        assert ended is not None and ended.ended is not None
        assert f"REPLAY paused  {ended.ended - trace.begin_t:.1f} of" in bar(app)
        assert f"step {last - 2} of 0–{last} " in bar(app)
        assert "PAST" not in text_of(app) and "end now" not in text_of(app)
        await press(pilot, "full_stop")
        assert app.view.moment.horizon == last - 1
        await press(pilot, "B")
        await until(pilot, lambda: app.view.moment.horizon == 0)
        assert "REPLAY paused  0.0 of" in bar(app) and f"step 0 of 0–{last} " in bar(app)
        await press(pilot, "w", "end")  # the waterfall has another use of the key
        await until(pilot, lambda: app.view.moment.horizon == last)
        await press(pilot, "2", "home")
        await until(pilot, lambda: app.view.moment.horizon == 0)
        await press(pilot, "n")  # goes on from the step that is shown
        await until(pilot, lambda: app.view.moment.horizon == 1 == app.replay.step and not app.view.moment.travel_text)
        await press(pilot, "full_stop")  # after the last step that is known
        await until(pilot, lambda: app.view.moment.horizon == 2)
        await press(pilot, "comma", "space")
        await until(pilot, lambda: not app.replay.paused and 1 < app.view.moment.horizon < last)
        assert not app.feed.frozen
        assert "REPLAY plays" in bar(app)


async def test_a_step_has_one_picture_whether_the_recording_plays_or_is_paused() -> None:
    pictures = []
    for paused in (False, True):
        app = replay_app(str(find_trace("h200-8b")), speed=0.05)  # the next step is planned before a step ends
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda app=app: app.feed.live and app.replay.step > 8)  # type: ignore[misc]
            await press(pilot, *["p"] * paused, "w", "g", *"58", "enter")
            await until(pilot, lambda app=app: app.position == 58 == app.view.moment.horizon)  # type: ignore[misc]
            text = bar(app) and text_of(app)
            line = Timeline(app.view.history.steps, app.view.moment.horizon)
            assert app.view.moment.exact and line.last == 58 and re.search(r"step 58 .* took \d", text)
            ended = app.view.moment.shown.state.t - app.replay.trace.begin_t
            assert f"REPLAY paused  {ended:.1f} of 4.9 s  step 58 of 4–746 " in text
            first = re.search(r"([\d.]+) s +│\+", text)  # the time at the left edge of the waterfall
            assert first is not None and 0 < ended - float(first[1]) < 0.3
            lines = Teller(View()).tell_all(app.replay.trace)
            assert next(line.t for line in lines if (line.step, line.kind) == (58, "step")) == ended, "one origin"
            # The history in the vitals consists of means over frames: it is not compared.
            pictures.append([row for row in text.splitlines() if not set(row) <= set(" ▁▂▃▄▅▆▇█")])
            await press(pilot, "comma", "full_stop")
            assert bar(app) and text_of(app) == text, "in the history, too"
    assert pictures[0] == pictures[1]


async def test_a_recording_has_one_end_with_the_steps_in_flight_however_it_is_reached() -> None:
    ends = []
    for paused in (False, True):
        app = replay_app(str(find_trace("vllm-8b")), speed=0.05)
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda app=app: app.feed.live and app.replay.step > 2510)  # type: ignore[misc]
            await press(pilot, *["p"] * paused, "E")
            await until(pilot, lambda app=app: app.replay.ended and not app.feed.backlog)  # type: ignore[misc]
            last = bar(app)
            shown = f"{app.view.moment.horizon:,}"
            assert "REPLAY end" in last and f"step {shown} of 2,509–{shown} " in last
            assert app.view.history.steps.last == app.replay.trace.last_planned == 2845
            running = sum(request.state == "running" for request in app.view.moment.shown.state.requests.values())
            moment = app.view.moment
            ends.append((moment.horizon, running, moment.reused.hit_rate, moment.reused_lately.saved, panels_of(app)))
            await press(pilot, "comma", "E")  # from the past of the end
            await until(pilot, lambda app=app: not app.view.moment.travel_text)  # type: ignore[misc]
            assert bar(app) == last
            assert app.view.moment.exact and "Press p to pause" not in text_of(app)
            app.view.select("step", 2700)  # as Enter in a list of steps does
            await press(pilot, "g", *"2564", "enter")  # at the end, which plays unless it is paused
            await until(pilot, lambda app=app: app.position == 2564 == app.view.moment.horizon)  # type: ignore[misc]
            assert app.replay.paused and app.view.selection is None and "REPLAY paused" in bar(app)
    assert ends[0] == ends[1] and ends[0][0] == 2843 and len(ends[0][4]) > 5


async def test_bookmarks_are_visited_and_kept(playing: tuple[ReplayApp, Pilot[Any]]) -> None:
    app, pilot = playing
    await press(pilot, "p")
    await app.seek(5)  # a busy machine may have played it to its end
    marks = app.replay.trace.bookmarks
    following = next(step for step, _ in marks if step > app.position)
    await press(pilot, "right_curly_bracket")
    await until(pilot, lambda: app.position == following == app.view.moment.horizon)
    await press(pilot, "m")
    await press(pilot, *"stall", "enter")
    await until(pilot, lambda: (following, "stall") in app.replay.trace.bookmarks)
    await press(pilot, "g")
    await press(pilot, *"100", "enter")
    await until(pilot, lambda: app.position == 100 == app.view.moment.horizon)
    await press(pilot, "g")
    below = app.screen_stack[-2].query_one(StatusBar)
    await until(pilot, lambda: " TYPING   enter accept  esc cancel  " in below.text)  # the keys of the dialog
    await press(pilot, *"9999", "enter")
    assert app.position == 100, "there is no such step: it stays"
    assert any("steps 0 to 139 can be shown" in notice.message for notice in app._notifications)
    assert app.view.moment.shown.state.step == 100
    assert app.view.history.steps.get(60) is not None, "after a jump the panels have a history"


async def test_a_bookmark_narrates_its_step(playing: tuple[ReplayApp, Pilot[Any]]) -> None:
    app, pilot = playing
    await press(pilot, "p")
    await until(pilot, lambda: app.replay.paused)
    step = app.replay.trace.last_step - 20
    for text in ("Here the pool is full.", "I: first eviction", "Watch r3."):
        app.replay.bookmark(step, text)
    told = "Here the pool is full. I: first eviction. Watch r3."
    for mode in ("inspect", "lecture"):
        app.switch_mode(mode)
        for at, shown in ((step - 1, False), (step, True), (step + 1, False)):
            await app.seek(at)
            await until(pilot, lambda at=at: app.position == at)
            await until(pilot, lambda shown=shown: (told in text_of(app)) is shown)


async def test_it_takes_no_questions(playing: tuple[ReplayApp, Pilot[Any]]) -> None:
    app, pilot = playing
    for key in ("1", "o", "r", "slash"):
        await press(pilot, key)
        assert app.current_mode == "inspect" and len(app.chats.sessions) == 1
    assert {n.message for n in app._notifications} == {
        "this is a recording: it has no chats; `minitui chat` starts an engine"
    }
    app.submit("hello")
    await until(pilot, lambda: app.chats.sessions[0].state == "error")
    assert "recording" in app.chats.sessions[0].messages[-1].error
    shown = text_of(app)
    assert "1 Chat" not in shown and "r replay" not in shown and "g go to" in shown


async def test_random_text_is_said_to_be_random(tmp_path: Path) -> None:
    app = replay_app(str(random_trace(tmp_path / "a.trace")), speed=0.2)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: app.feed.live and app.replay.step > 6 and app.story)
        assert "its text is random and not shown" in text_of(app)
        await press(pilot, "p")
        assert re.search(r"node \d+", text_of(app)), "in the tree"
        await press(pilot, "3")
        assert app.story == "" and "REPLAY paused" in text_of(app) and "Why" in text_of(app)
        await app.seek(130)
        await until(pilot, lambda: app.view.history.steps.last == 130)
        await press(pilot, "X")
        await until(pilot, lambda: not app.gated and app.view.history.steps.last < 130)


async def test_a_screen_of_a_recording_is_a_picture_without_a_network() -> None:
    svg = await screen_svg(str(GOLDEN), 40, (120, 36))
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert "Radix tree" in text and re.search(r"step 40 of 0–139", text)
    assert "http" not in svg.replace("http://www.w3.org", "") and "monospace" in svg


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_a_picture_of_a_recording_is_drawn_by_the_browser(tmp_path: Path) -> None:
    path = run_export(GOLDEN, "png", tmp_path / "a.png", 40, "80x24", "light")
    data = path.read_bytes()
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks.append((kind, body))
        at += 12 + length
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and chunks[0][0] == b"IHDR" and chunks[-1] == (b"IEND", b"")
    width, height, depth, colours = struct.unpack_from(">IIBB", chunks[0][1])
    assert 1200 < width < 1800 and 700 < height < 1200 and (depth, colours) in {(8, 2), (8, 6)}
    pixels = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    assert len(pixels) == height * (1 + width * {2: 3, 6: 4}[colours]) and len(set(pixels)) > 20


def test_a_png_without_a_browser_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(png, "BROWSERS", ("chromium", str(tmp_path / "chrome")))
    with pytest.raises(TraceError, match=r"needs Chromium.*install one, or use --export svg"):
        run_export(GOLDEN, "png", tmp_path / "a.png", None, "80x24", None)
    broken = tmp_path / "chrome"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(TraceError, match="exit code 3"):
        png.write_png('<svg viewBox="0 0 10 10"/>', tmp_path / "a.png")


def test_exports_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="columns x rows"):
        run_export(GOLDEN, "svg", tmp_path / "a.svg", None, "huge", None)
    with pytest.raises(TraceError, match="choose one of perfetto"):
        run_export(GOLDEN, "pdf", None, None, "120x36", None)
    with pytest.raises(TraceError, match="cannot be read"):
        run_export(tmp_path / "none.trace", "json", None, None, "120x36", None)


async def test_a_demo_plays_in_the_application() -> None:
    from minitui.chat.sessions import Chats
    from minitui.settings import Settings
    from minitui.tui.apps.app import MinituiApp
    from tests.support.app.fake_client import ByteCodec, FakeSource, sampling

    demo = DEMOS["shared-prefix"]
    source = FakeSource(num_blocks=200)
    system = "You explain inference engines, in blocks of sixteen."
    app = MinituiApp(
        source, Chats(source, sampling=sampling(24)), Settings(), system=system,
        load_codec=lambda info: ByteCodec(), script=lambda app: play_in_app(demo, app, None, 0.0),
    )
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "X to play" in app.story)
        assert "saved" in app.story and "X to play" in text_of(app).replace("\n", " ")
        assert len(app.chats.sessions) == 4
        own, *_ = app.chats.sessions
        app.chats.send(own, "mine")
        await until(pilot, lambda: not own.busy)
        await press(pilot, "X")
        await until(pilot, lambda: "X to play" not in app.story)
        await until(pilot, lambda: "X to play" in app.story)
        assert len(app.chats.sessions) == 5 and app.chats.sessions[0] is own, "a chat with a question of mine stays"
