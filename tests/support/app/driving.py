"""Driving an application as its user does, without waiting for a machine that has nothing else to do.

Textual's pilot waits after every key until the process uses no CPU. An application that draws twenty frames a second
with an engine beside it never does that: each wait then lasts its whole second. Here a wait ends when the
application has handled everything that was posted, however busy the machine is. tests/conftest.py puts `settled` in
the place of the pilot's wait for every test; the rest is for applications whose frames a timer draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from textual import events
from textual._context import active_app
from textual.app import App
from textual.message_pump import MessagePump
from textual.pilot import Pilot
from textual.widget import Widget

ROUNDS = 12  # from a widget to the application and back, several times
NAMES = {" ": "space", "/": "slash", "?": "question_mark"}


async def settled(min_sleep: float = 0.0, max_sleep: float = 10.0) -> None:
    """Return when what was posted to the active application has been handled, and its screen is laid out. A message may
    post others: it goes on until no queue held any before and after, at most `ROUNDS` times (a timer posts for ever)
    and for `max_sleep` seconds (somebody is in a handler that takes long). Both parameters are the pilot's."""
    app, end = active_app.get(), time.monotonic() + max_sleep
    while (keys := getattr(app, "_keys", None)) is not None and keys.waiting and time.monotonic() < end:
        await asyncio.sleep(0.005)  # the screen of the key before may be gone
    for _ in range(ROUNDS):
        if not app.is_running or not app.screen_stack or time.monotonic() > end:
            return
        screen = app.screen
        busy = _busy(app)
        on_the_way = screen.focused.ancestors_with_self if screen.focused else (screen, app)
        await _handled({*busy, *on_the_way, app}, end)
        screen._on_timer_update()  # lay out and draw now
        if app._resize_event is not None:
            app._check_resize()  # else it would wait for others to follow
        if not busy and app.screen_stack and not _busy(app):
            return


def _busy(app: App[Any]) -> list[MessagePump]:
    """Whose queue holds something."""
    return [pump for pump in (app, *app.screen.walk_children(with_self=True)) if pump.message_queue_size]


async def _handled(pumps: Iterable[MessagePump], end: float) -> None:
    """Each of them has come to the end of what is in its queue now, or is closing."""
    waiting = []
    for pump in pumps:
        reached = asyncio.Event()
        if pump.call_later(reached.set):
            waiting.append((pump, reached))
    for pump, reached in waiting:
        while not reached.is_set() and pump.is_running and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reached.wait(), 0.02)


def lines(app: App[Any]) -> list[str]:
    """Returns the lines of the screen."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


def text_of(app: App[Any]) -> str:
    """Returns the text of the screen."""
    return "\n".join(lines(app))


async def drawn(pilot: Pilot[Any]) -> None:
    """Two frames, now: each draws half of the panels. What they show is on the screen."""
    for _ in range(2):
        pilot.app._frame()
        await settled()


async def click_at(pilot: Pilot[Any], widget: Widget, column: int, row: int) -> None:
    """Click on a cell of a widget, once the widget stands still: a card may have appeared above it."""
    region = None
    while region != (region := widget.region):
        await drawn(pilot)
    await pilot.click(widget, offset=(column, row))
    await drawn(pilot)


async def until(pilot: Pilot[Any], true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until `true()`, with the picture of that moment on the screen. AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not come about; {_doing(pilot.app)}"
        await asyncio.sleep(0.01)
    await drawn(pilot)


def _doing(app: App[Any]) -> str:
    """What an application does that does not get on: its screens, and where each task and each thread is."""
    frames = [task.get_stack(limit=1) for task in asyncio.all_tasks()]
    tasks = [f"{frame.f_code.co_qualname} in line {frame.f_lineno}" for [frame] in filter(None, frames)]
    threads = ["".join(traceback.format_stack(frame, limit=3)) for frame in sys._current_frames().values()]
    return f"screens {app.screen_stack}, tasks {tasks}, threads:\n" + "\n".join(threads)


async def press(pilot: Pilot[Any], *keys: str) -> None:
    """Press keys one after the other, each when the one before has been handled; the picture is drawn."""
    await pilot.press(*keys)
    await drawn(pilot)


async def type_text(pilot: Pilot[Any], text: str) -> None:
    """Type into what has the focus, as fast as a paste comes."""
    for character in text:
        pilot.app.post_message(events.Key(NAMES.get(character, character), character))
    await settled()
    await drawn(pilot)
