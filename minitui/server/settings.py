"""The settings that an operator chooses for a server: address, keys and limits."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from engine.errors import EngineError
from minitui.protocol import is_loopback
from minitui.server.origins import check_names

MIN_KEY_LENGTH = 8


class Role(IntEnum):
    """The rights of a caller. Each role includes the rights of the roles before it."""

    NOBODY = 0
    WATCH = 1  # telemetry and metrics
    CHAT = 2  # send requests and cancel them
    CONTROL = 3  # the gate, slow motion, the cache


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server. The defaults suit one user on one machine. Sizes are in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: dict[str, Role] = field(default_factory=dict, repr=False)  # API key -> role
    served_names: tuple[str, ...] = ()  # the model's names in requests and answers; empty: the engine's name
    trust_request_template: bool = False  # requests may replace the chat template
    record: Path | None = None  # the trace file to record to
    cors_origins: tuple[str, ...] = ()  # sites whose pages may use this server: "https://example.org", or "*"
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header besides localhost; "*.example.org": all below it
    open_metrics: bool = False  # /metrics needs no key
    ignore_unknown_fields: bool = False  # of requests; else they are refused
    hide_text: bool = False  # token ids of prompts and replies are masked in the telemetry
    max_body: int = 4 << 20
    body_s: float = 30.0  # a request's body must arrive within this time
    max_waiting: int = 128  # sequences that may wait while others run
    request_s: float = 600.0  # a reply that takes longer than this, time in the queue included, ends with an error
    stalled_reader_s: float = 20.0  # a client that reads nothing for this long is disconnected
    max_watchers: int = 256
    stored_responses: int = 1024  # responses that /v1/responses keeps for each API key …
    stored_bytes: int = 256 << 20  # … and the size of those of all keys; each key has an equal share
    drain_s: float = 3.0  # after SIGTERM, running replies get this much time to finish
    stalled_engine_s: float = 60.0  # /health answers 503 when one step or command takes longer than this

    def __post_init__(self) -> None:
        for key in self.keys:
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise EngineError(
                    f"an API key of {len(key)} characters is not valid: a key needs at least {MIN_KEY_LENGTH} "
                    "characters, all printable ASCII, without spaces; `openssl rand -hex 16` makes a key"
                )
        if "*" in self.cors_origins and not self.keys:
            raise EngineError(
                "--cors-origin '*' lets every web page use the engine, so a key is needed: "
                "set --api-key (or MINITUI_API_KEY), or name the allowed origins"
            )
        check_names(self.allowed_hosts)
        if not self.keys and not self.loopback:
            raise EngineError(
                f"listening on {self.host} lets other machines use the engine, so a key is needed: set --api-key "
                "(or MINITUI_API_KEY), or listen on 127.0.0.1"
            )

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the address."""
        return is_loopback(self.host)

    def role_of(self, key: str | None) -> Role:
        """Returns the role of a key. The time that this takes reveals nothing about the known keys."""
        if not self.keys:
            return Role.CONTROL
        given = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).digest()
        role = Role.NOBODY
        for known, granted in self.keys.items():
            if hmac.compare_digest(given, hashlib.sha256(known.encode()).digest()):
                role = max(role, granted)
        return role
