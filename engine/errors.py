"""The engine's errors. Each message is a sentence that gives the numbers and says what to do."""

from __future__ import annotations


class EngineError(Exception):
    """The base class of the errors that the engine raises on purpose; `str(error)` can be shown to a user."""


class CheckpointError(EngineError):
    """A model directory cannot be used. The message names the file and the fault, and says what to do."""


class InvalidRequest(EngineError, ValueError):
    """A request was refused when it was submitted; the engine is unchanged. `field` names the parameter to change."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt alone has more tokens than the model's context. `tokens`: how many were counted; it may have more."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(f"the chat has more than {context:,} tokens, the size of the context: shorten it", "messages")
        self.tokens, self.context = tokens, context


class EngineDead(EngineError):
    """The engine process has ended. Every open request ends with this error; the process can be started again."""


def how_to_install(extra: str) -> str:
    """Returns a phrase with the command that installs an extra, and the folder in which the command must run."""
    return f"pip install '.[{extra}]' in the folder of minitui"


def not_installed(what: str, error: ImportError, extra: str) -> str:
    """Returns a sentence that says which package the feature `what` needs and how to install it."""
    package = (error.name or "a package").partition(".")[0]
    return f"{what} needs {package}, which is not installed: {how_to_install(extra)}"


class DeviceLost(RuntimeError):
    """The CUDA context or a rank is lost: this process cannot continue and must be started again."""


def loses_device(error: BaseException) -> bool:
    """Returns True if this error means that the device is lost. After most CUDA errors, no further call succeeds."""
    if not isinstance(error, RuntimeError):
        return False  # the text of other errors may contain "CUDA error" by chance
    return isinstance(error, DeviceLost) or "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
