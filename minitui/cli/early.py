"""Starts the engine's process before the command line is imported: it imports torch meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from engine.errors import EngineError
from engine.process import early_process
from minitui.settings import SettingsError, data_dir

KEPT_LOGS = 10
COMMANDS = ("ask", "chat", "serve")  # these start an engine; so does `minitui doctor --profile-start`
WITHOUT = ("--connect", "--web", "--help", "-h")  # with one of these options they do not


def begin(arguments: Sequence[str]) -> None:
    """Start the engine's process if these words of the command line need one."""
    words = {word.split("=")[0] for word in arguments}
    starts = "--profile-start" in words or (bool(arguments) and arguments[0] in COMMANDS)
    if starts and not words & {*WITHOUT}:
        with contextlib.suppress(EngineError):  # the command reports it
            early_process.begin(log_path())


def log_path() -> Path:
    """Returns the path of the log file for this process's engine. Deletes old logs except the newest KEPT_LOGS."""
    directory = data_dir() / "logs"
    try:
        directory.mkdir(exist_ok=True)
        for old in sorted(directory.glob("engine-*.log"), key=_modified)[:-KEPT_LOGS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be written: {error.strerror}. Set MINITUI_DATA to a writable directory."
        ) from None
    return directory / f"engine-{os.getpid()}.log"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another minitui has just deleted this log
        return 0.0
