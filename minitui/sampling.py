"""The sampling options of a chat: what /set, the command line and settings.toml can set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass, replace
from typing import Any

from engine.errors import InvalidRequest
from engine.params import LARGEST, PARAMETERS, RECOMMENDED, SamplingParams

OPTIONS = {name: parameter for name, parameter in PARAMETERS.items() if parameter.chat}
_FIELDS = [(name, f"{option.types[0].__name__} | None", None) for name, option in OPTIONS.items()]
_Options: Any = make_dataclass("_Options", _FIELDS)


class Sampling(_Options):
    """A field for each of OPTIONS. None: the checkpoint's value, or a default if the checkpoint has none."""

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Returns the engine's parameters; `defaults` is the checkpoint's generation_config."""
        chosen: dict[str, Any] = {"temperature": 0.7, "max_tokens": None}
        chosen |= {name: value for name in RECOMMENDED if (value := defaults.get(name)) is not None}
        chosen |= {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        return SamplingParams(**chosen)

    def set(self, name: str, text: str, cannot_use: Callable[[str], str] = lambda name: "") -> str:
        """Sets the option `name` to the typed `text`; returns a sentence for the user. Raises InvalidRequest.
        `cannot_use`: Source.cannot_use of the engine or server that answers."""
        if name not in OPTIONS:
            raise InvalidRequest(f"there is no setting {name!r}; the settings are {', '.join(OPTIONS)}", name)
        value = None if text in ("", "default", "none") else OPTIONS[name].parse(text)
        changed = replace(self, **{name: value})
        changed.params({}).validate(LARGEST)
        if value is not None and (reason := cannot_use(name)):
            raise InvalidRequest(reason, name)
        setattr(self, name, value)
        return f"{name} is {'the default' if value is None else value}, from the next message on"
