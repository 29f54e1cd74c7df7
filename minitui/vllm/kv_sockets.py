"""Where KV events are published: the addresses that a user gives, and the search for a publisher."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineError
from minitui.protocol import MOST_RANKS
from minitui.sources.http import close_client, httpx, load_json, normalise, open_client
from minitui.vllm.zmtp import connect

ADDRESS = re.compile(r"tcp://[^\s,*]+:\d{1,5}|ipc://[^\s,]+")
FIRST_PORT = 5557  # of vLLM and SGLang, without another one in --kv-events-config; data parallel rank n adds n
FIND_S = 1.0  # the longest wait for one port
ASK_S = 5.0  # the longest wait for SGLang's /server_info


def endpoints(text: str) -> tuple[str, str]:
    """Returns the addresses of the events and of the replay (empty: none). Raises EngineError with a sentence."""
    events, _, replay = text.partition(",")
    if replay.isdecimal():
        replay = f"{events.rpartition(':')[0]}:{replay}"
    if not _is_address(events) or (replay and not _is_address(replay)):
        raise EngineError(f"--kv-events {text!r}: give tcp://HOST:PORT, or tcp://HOST:PORT,tcp://HOST:REPLAY_PORT")
    return events, replay


def _is_address(text: str) -> bool:
    port = text.rpartition(":")[2]
    return bool(ADDRESS.fullmatch(text)) and (text.startswith("ipc:") or int(port) < 65536)


@dataclass(frozen=True)
class Found:
    """`events`: for `endpoints`; empty: none. `ranks`: the data parallel ranks that publish. `tried`: as a sentence.
    `second`: the address of rank 1."""

    events: str
    ranks: int
    tried: str
    second: str


async def find_events(url: str, key: str = "") -> Found:
    """Looks for KV events where SGLang says that it publishes them, and else on the usual ports of the server's host.
    ZeroMQ's handshake tells whether a port is a publisher's. `key`: of the server."""
    host = urlsplit(normalise(url)).hostname or ""
    address = f"tcp://{f'[{host}]' if ':' in host else host}"
    told = await _told_by_sglang(normalise(url), key)
    first, most, replay = told or (FIRST_PORT, MOST_RANKS, 0)
    ranks = 0
    while ranks < most and await _answers("SUB", f"{address}:{first + ranks}"):
        ranks += 1
    events, second = f"{address}:{first}", f"{address}:{first + 1}"
    if not ranks:
        return Found("", 0, f"no KV events are published at {events}", second)
    if told and not replay:
        return Found(events, ranks, "SGLang has no replay endpoint", second)
    replay = replay or first + ranks
    if await _answers("DEALER", f"{address}:{replay}"):
        return Found(f"{events},{replay}", ranks, "", second)
    return Found(events, ranks, f"no replay endpoint was found at {address}:{replay}", second)


async def _told_by_sglang(url: str, key: str) -> tuple[int, int, int] | None:
    """Returns the first port, the number of ranks and the port of the replay (0: none); None: SGLang says nothing.
    Without this, a port after the last one may be taken for one more rank: SGLang may publish its load there."""
    client = open_client(url, key)
    told: Any = None
    with contextlib.suppress(httpx.HTTPError, OSError, EngineError, LookupError, TypeError):
        async with asyncio.timeout(ASK_S):
            told = load_json((await client.get("/server_info")).content)["kv_events"]
    await close_client(client)
    if not isinstance(told, dict):
        return None
    numbers = [told.get(name, 0) for name in ("endpoint_port_base", "dp_size", "replay_endpoint_port_base")]
    if any(type(number) is not int or not 0 <= number < 65536 for number in numbers) or not all(numbers[:2]):
        return None
    return numbers[0], min(numbers[1], MOST_RANKS), numbers[2]


async def _answers(kind: str, address: str) -> bool:
    with contextlib.suppress(OSError):
        async with asyncio.timeout(FIND_S), connect(kind, address):
            return True
    return False
