"""What can go wrong, as sentences: each message carries the numbers and the way out."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose; `str(error)` may be shown to a user as it stands."""


class CheckpointError(EngineError):
    """A model directory that cannot be used: which file, what is wrong with it, what to do."""


class InvalidRequest(EngineError):
    """A request refused at submission. `field` names what to change; the engine has not been touched."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class EngineDead(EngineError):
    """The engine process has ended; every open request ends with this error and it can be started again."""


def how_to_install(extra: str) -> str:
    """The command that adds an optional part, for whoever installed minitui from its folder."""
    return f"pip install '.[{extra}]' in the folder of minitui"


def not_installed(what: str, error: ImportError, extra: str) -> str:
    """The sentence for a feature (`what`, its subject) whose optional package could not be imported."""
    package = (error.name or "a package").partition(".")[0]
    return f"{what} needs {package}, which is not installed: {how_to_install(extra)}"


class DeviceLost(RuntimeError):
    """The device's context (a CUDA error) or a rank is gone: this process cannot go on and must be started again."""


def loses_device(error: BaseException) -> bool:
    """Does this error mean that the device is lost? CUDA accepts no call after most of its errors."""
    if not isinstance(error, RuntimeError):
        return False  # the text of a refusal may quote anything
    return isinstance(error, DeviceLost) or "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
