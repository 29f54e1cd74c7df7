"""The user's settings, a TOML file: theme, keys, and defaults for new chats.

    theme = "minitui-light"
    fps = 20
    ascii = false

    [keys]                  # binding id = key; the help (?) lists the ids
    freeze = "f8"

    [chat]                  # a system prompt, and what /set lists
    system = "You are terse."
    temperature = 0.0
    max_tokens = 400

The file is read at the start, and again before a new theme is saved. Saving replaces the file by an atomic rename, so a
crash leaves the old file intact.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.sampling import Sampling

THEMES = ("dark", "light", "projector")
KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {  # of the fields: the types in a file, and their name there
    "str": (str, "a text in quotes"), "bool": (bool, "true or false"), "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
}
LARGEST = 1 << 20  # bytes of the file; reading them takes about a second


class SettingsError(EngineError):
    """A settings file or data directory cannot be used. The message says what is wrong and what is valid."""


def config_path() -> Path:
    """Returns the path of the settings file: $MINITUI_CONFIG, or settings.toml in the user's directory for settings."""
    if named := os.environ.get("MINITUI_CONFIG"):
        return Path(named)
    from platformdirs import user_config_path

    return user_config_path("minitui") / "settings.toml"


def data_dir() -> Path:
    """Returns the directory for chats and logs: $MINITUI_DATA, or the user's data directory. Creates it if missing.
    Raises SettingsError if the directory cannot be created."""
    if named := os.environ.get("MINITUI_DATA"):
        path = Path(named)
    else:
        from platformdirs import user_data_path

        path = user_data_path("minitui")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{path}, the directory for chats and logs, cannot be created: {error.strerror}. Set MINITUI_DATA to a "
            "writable directory."
        ) from None
    return path


@dataclass
class ChatSettings(Sampling):
    """Defaults for new chats. None: the model's default."""

    system: str | None = None


@dataclass
class Settings:
    """All settings."""

    theme: str = "minitui-dark"
    fps: int = 20  # frames per second; lower it on a slow connection
    ascii: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    chat: ChatSettings = field(default_factory=ChatSettings)


def load(path: Path | None = None) -> Settings:
    """Returns the settings in the file, or the defaults if there is no file. Raises SettingsError with the reason."""
    path = path or config_path()
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")  # reading a FIFO or a device might not end
        if path.exists() and (size := path.stat().st_size) > LARGEST:
            raise OSError(f"it has {size:,} bytes, and the limit is {LARGEST:,}")
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read: {error}. Correct it, or rename it to use the defaults.") from None
    settings = Settings()
    chat = data.pop("chat", {})
    keys = data.pop("keys", {})
    if not isinstance(chat, dict) or not isinstance(keys, dict):
        raise SettingsError(f"{path}: [chat] and [keys] must be tables")
    if bad := [name for name, value in keys.items() if not isinstance(value, str)]:
        raise SettingsError(f"{path}: keys.{bad[0]} is {keys[bad[0]]!r}; it must be the name of a key, as text")
    _fill(settings, data, path, "")
    _fill(settings.chat, chat, path, "chat.")
    settings.keys = dict(keys)
    settings.theme = theme_name(settings.theme, f"{path}: ")
    if not 1 <= settings.fps <= 60:
        raise SettingsError(f"{path}: fps is {settings.fps}; it must be from 1 to 60")
    return settings


def theme_name(theme: str, where: str = "") -> str:
    """Returns the full name of a theme. Raises SettingsError, with `where`, for an unknown theme."""
    name = theme.removeprefix("minitui-")
    if name not in THEMES:
        raise SettingsError(f"{where}there is no theme {theme!r}: the themes are dark, light and projector")
    return f"minitui-{name}"


def _fill(target: Any, data: dict[str, Any], path: Path, prefix: str) -> None:
    known = {f.name: f for f in fields(target) if f.name not in ("keys", "chat")}
    for name, value in data.items():
        if name not in known:
            tables = "" if prefix else ", and those of the tables [chat] and [keys]"
            raise SettingsError(
                f"{path}: {prefix}{name} is not a setting; the settings are {', '.join(known)}{tables}"
                if prefix or name not in ChatSettings.__dataclass_fields__
                else f"{path}: {name} is a setting of the table [chat]: write the line [chat] above it"
            )
        kind = str(known[name].type).removesuffix(" | None")
        types, words = KINDS[kind]
        if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool"):
            raise SettingsError(f"{path}: {prefix}{name} is {value!r}; it must be {words}")
        setattr(target, name, value)


def save(settings: Settings, path: Path | None = None) -> None:
    """Writes the settings. Raises OSError."""
    replace_file(path or config_path(), to_toml(settings))


def replace_file(path: Path, text: str) -> None:
    """Writes a text to a new file, which only its owner can read, and renames it, so no reader sees half a file. Makes
    the directory if it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_toml(settings: Settings) -> str:
    """Returns the settings that are not None, as TOML. JSON's strings, numbers and booleans are valid TOML."""
    lines = [f"{name} = {json.dumps(getattr(settings, name))}" for name in ("theme", "fps", "ascii")]
    if settings.keys:
        lines += ["", "[keys]"] + [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in sorted(settings.keys.items())]
    chat = {f.name: getattr(settings.chat, f.name) for f in fields(settings.chat)}
    if any(value is not None for value in chat.values()):
        lines += ["", "[chat]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in chat.items() if value is not None]
    return "\n".join(lines) + "\n"
