"""Plays a demo in the application, on a stage: the engine and the chats of the application."""

from __future__ import annotations

from typing import Any

from engine.errors import EngineError
from minitui.teaching.scenarios import Demo
from minitui.teaching.stage import Restart, Stage
from minitui.tui.apps.app import MinituiApp
from minitui.tui.glyphs import glyphs


def stage_of(app: MinituiApp, **options: Any) -> Stage:
    """Returns a stage with the engine and the chats of the application. It waits while the view is frozen."""

    def say(text: str) -> None:
        app.story = text

    return Stage(
        app.source, app.feed, app.chats, system=app.system, bar=glyphs().active, held=lambda: app.feed.frozen,
        **{"say": say, "show": app.select_session} | options,
    )


async def play_in_app(demo: Demo, app: MinituiApp, restart: Restart | None, beat: float = 1.0) -> None:
    """Play the demo. `beat` scales its pauses."""

    async def again() -> None:
        """Play the demo again, with an empty chat and an engine with the original options. The chats in which the user
        has asked a question stay."""
        app.story = "The demo starts again."
        stage.remove_chats()
        app.select_session(app.chats.new(app.system))
        if restart is not None:
            app.feed.restart()
            await restart({})
            app.feed.replaced()
            await app.feed.sync()
            for session in app.chats.sessions:
                session.request = None  # of the earlier engine
        await play_in_app(demo, app, restart, beat)

    app.play_again = again

    stage = stage_of(app, look=app.switch_mode, restart=restart, beat=beat, keys=True, think=app.THINK_S)
    app.asking = stage
    app.set_focus(None)
    try:
        await demo.play(stage)
        app.story += "\nPress 1 for the chats, 2 to inspect, X to play again (space pauses)."
    except EngineError as error:
        app.story = f"The demo stopped: {error}"
    finally:
        app.asking = None
