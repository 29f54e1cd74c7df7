"""What the operator of a server chose: where it listens, who may do what, and how much of everything."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from engine.errors import EngineError
from minitui.protocol import is_loopback

MIN_KEY_LENGTH = 8


class Role(IntEnum):
    """What a caller may do; each includes the ones before it."""

    NOBODY = 0
    WATCH = 1  # telemetry and metrics
    CHAT = 2  # ask, and cancel what one asked
    CONTROL = 3  # the gate, slow motion, the cache


@dataclass(frozen=True)
class ServerSettings:
    """Defaults are for one machine and one user; sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: dict[str, Role] = field(default_factory=dict, repr=False)  # key -> what its bearer may do
    served_name: str = ""  # the model's name in answers; empty: the engine's
    record: Path | None = None  # a trace of everything the engine does
    cors_origins: tuple[str, ...] = ()  # web pages elsewhere that may use this server: "https://example.org", or "*"
    hide_text: bool = False  # token ids of prompts and replies are masked in the telemetry
    max_body: int = 4 << 20
    body_s: float = 30.0  # a request's body must have come by then
    max_waiting: int = 128  # sequences open beyond those that can run at once
    request_s: float = 600.0  # a reply ends with an error after this long, its time in the queue included
    stalled_reader_s: float = 20.0  # a reader that takes nothing for so long is given up
    max_watchers: int = 256
    drain_s: float = 3.0  # after SIGTERM, replies under way may go on for so long
    stalled_engine_s: float = 60.0  # /health fails when one step of the engine takes longer

    def __post_init__(self) -> None:
        for key in self.keys:
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise EngineError(
                    f"an API key of {len(key)} characters cannot be used: at least {MIN_KEY_LENGTH} printable ASCII "
                    "characters without spaces are needed, such as those of `openssl rand -hex 16`"
                )
        if "*" in self.cors_origins and not self.keys:
            raise EngineError(
                "--cors-origin '*' lets every web page that this machine's browser opens use the engine, which needs a "
                "key: set --api-key (or MINITUI_API_KEY), or name the origins"
            )
        if not self.keys and not self.loopback:
            raise EngineError(
                f"listening on {self.host} opens the engine to other machines, which needs a key: set --api-key "
                "(or MINITUI_API_KEY), or listen on 127.0.0.1"
            )

    @property
    def loopback(self) -> bool:
        """Only this machine can reach the address."""
        return is_loopback(self.host)

    def role_of(self, key: str | None) -> Role:
        """What the bearer of `key` may do. Takes the same time whichever key it is, and however much of it is right."""
        if not self.keys:
            return Role.CONTROL
        given = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).digest()
        role = Role.NOBODY
        for known, granted in self.keys.items():
            if hmac.compare_digest(given, hashlib.sha256(known.encode()).digest()):
                role = max(role, granted)
        return role
