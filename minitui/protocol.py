"""What clients and servers share: facts about a server, names of tokenizer files, which hosts are local, and how many
ranks may exist."""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass, field
from typing import Annotated

from engine.info import EngineInfo, Maybe, Name, is_name
from engine.trace.kind import Bound, Counts, OrNone

MOST_RANKS = 64  # data parallel ranks of another engine, behind one address

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja",
    "chat_template.json", "special_tokens_map.json", "added_tokens.json",
)

Digests = Bound(lambda value: type(value) is dict and all(map(is_name, value)) and all(map(is_name, value.values())))


@dataclass(frozen=True, kw_only=True)
class ServerInfo(EngineInfo):
    """The answer of /minitui/info: of a minitui server, or of the recorder's telemetry beside vLLM."""

    server: Name = ""  # minitui's version
    began: Name = ""  # the name of this start of the engine
    role: Name = ""  # the caller's
    hide_text: Maybe = None
    bundled: Maybe = None  # the model is the one in minitui
    tokenizer_files: Annotated[dict[str, str], Digests] = field(default_factory=dict)  # name -> SHA-256
    # vLLM's
    api_port: OrNone = -1
    telemetry_port: OrNone = -1
    telemetry_ports: Counts = field(default_factory=list)  # of all ranks
    rank: OrNone = -1
    async_scheduling: Maybe = None


@functools.lru_cache(64)
def is_loopback(host: str) -> bool:
    """Returns whether this name or address is a loopback address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
