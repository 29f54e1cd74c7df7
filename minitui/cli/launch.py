"""Functions that several commands share: they make engines, recordings and logs, and run the application."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.params import LARGEST
from engine.process import early_process
from minitui import settings as settings_file
from minitui.chat.model_choice import Choice, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.early import log_path
from minitui.cli.options import engine_config
from minitui.sampling import OPTIONS, Sampling
from minitui.sources.base import Source
from minitui.sources.local import LocalSource
from minitui.tui.terminal.guard import TerminalGuard, takes_unicode, tolerant_input

if TYPE_CHECKING:
    from minitui.teaching.stage import Restart
    from minitui.tui.apps.app import MinituiApp

NO_MODEL = Choice("", "", "", "model")


def live_source(choice: Choice, options: dict[str, Any]) -> LocalSource:
    """Returns a source with a new local engine for `choice`. Its process begins to import torch; `start` loads the
    model."""
    config, log_file = engine_config(choice.name, **options), log_path()
    early_process.begin(log_file)
    return LocalSource(config, log_file, choice.label)


def changing_source(
    choice: Choice, options: dict[str, Any], first: dict[str, Any] | None = None, record: Path | None = None
) -> tuple[Any, Restart]:
    """Returns a source with a new local engine, and a coroutine that replaces this engine by one with its argument's
    options. `options`: of all engines; `first`: more options of the first; `record`: the file of a recording."""
    source = recorded(live_source(choice, options | (first or {})), record)

    async def restart(changes: dict[str, Any]) -> None:
        await source.reconfigure(engine_config(choice.name, **(options | changes)))

    return source, restart


def make_sampling(options: dict[str, Any], defaults: settings_file.ChatSettings) -> Sampling:
    """Returns the sampling options. The command line overrides the settings; the settings override the checkpoint.
    Raises InvalidRequest for an invalid value."""
    given = {name: value for name, value in options.items() if value is not None}
    sampling = Sampling(**{name: getattr(defaults, name) for name in OPTIONS} | given)
    sampling.params({}).validate(LARGEST)
    return sampling


def settings_with(looks: dict[str, Any]) -> settings_file.Settings:
    """Returns the settings, with theme, fps and ascii as given on the command line. Does not save them."""
    settings = settings_file.load()
    if looks["theme"] is not None:
        settings.theme = settings_file.theme_name(looks["theme"])
    for name in ("fps", "ascii"):
        if looks[name] is not None:
            setattr(settings, name, looks[name])
    return settings


def recorded(source: Source, path: Path | None) -> Source:
    """Returns a source that also records `source` to the file `path`; without a path, returns `source` itself."""
    if path is None:
        return source
    from minitui.sources.recording import RecordingSource

    return RecordingSource(source, path)


def report_recording(source: Source, status: int = 0) -> int:
    """Prints an error if the recording is incomplete. Returns the exit code: `status`, or 1 if only the recording
    failed."""
    if error := source.recording_error:
        print(f"minitui: the recording is not complete: {error}", file=sys.stderr)
        return status or 1
    return status


def run_app(
    make: Callable[..., MinituiApp] | None, source: Any, settings: settings_file.Settings, choice: Choice = NO_MODEL,
    sampling: Sampling | None = None, store: Any = None, resume: bool = False, **options: Any,
) -> int:
    """Runs the application until it exits; returns the exit code. `make` creates it; None: MinituiApp. `options`: of
    this application."""
    # How many times per second Textual checks for redraws. With its default of 60, a typed letter appears after up to
    # 17 ms. While eight chats are answered, 120 lowers the 95th percentile of this delay by a quarter.
    os.environ.setdefault("TEXTUAL_FPS", "120")
    from minitui.tui.apps.app import MinituiApp

    if not takes_unicode(sys.__stderr__):  # Textual draws on this stream
        settings.ascii = True
    chats = Chats(source, store, sampling or Sampling())
    if resume:
        chats.restore()
    guard = TerminalGuard()
    app = (make or MinituiApp)(
        source, chats, settings, system=choice.system, known_questions=choice.known_questions, speaker=choice.speaker,
        load_codec=load_codec, guard=guard, **options,
    )
    status = 1
    try:
        status = show(app, guard)
    finally:
        status = report_recording(source, status)
        if unsaved := len(chats.saver.unsaved):
            print(f"minitui: {unsaved} chats could not be saved: {chats.saver.error}", file=sys.stderr)
            status = status or 1
    return status


def show(app: MinituiApp, guard: TerminalGuard) -> int:
    """Runs the application, restores the terminal and returns the exit code. If it crashed, raises its exception."""
    with guard.watching(), tolerant_input():
        app.run()
    if app.crash is not None:
        raise app.crash
    return 128 + guard.signal if guard.signal else app.return_code or 0
