"""ZeroMQ sockets for KV events: the connection to a server's publisher, and the search for a publisher."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine.errors import EngineError
from minitui.protocol import MOST_RANKS
from minitui.sources.http import normalise
from minitui.vllm.kv_messages import MOST_BYTES

WAITING = 256  # messages that wait in memory; a message has at most MOST_BYTES
ADDRESS = re.compile(r"tcp://[^\s,*]+:\d{1,5}|ipc://[^\s,]+")
FIRST_PORT = 5557  # of vLLM and SGLang, without another one in --kv-events-config; data parallel rank n adds n
FIND_S = 1.0  # the longest wait for one port


def endpoints(text: str) -> tuple[str, str]:
    """Returns the addresses of the events and of the replay (empty: none). Raises EngineError with a sentence."""
    events, _, replay = text.partition(",")
    if replay.isdecimal():
        replay = f"{events.rpartition(':')[0]}:{replay}"
    if not ADDRESS.fullmatch(events) or (replay and not ADDRESS.fullmatch(replay)):
        raise EngineError(f"--kv-events {text!r}: give tcp://HOST:PORT, or tcp://HOST:PORT,tcp://HOST:REPLAY_PORT")
    return events, replay


@contextlib.contextmanager
def open_socket(kind: int, address: str, monitored: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yields a socket that connects to an address, and the socket of its connection's events (see `joined`)."""
    socket = zmq.asyncio.Context.instance().socket(kind)
    monitor = None
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, WAITING)
        socket.set(zmq.MAXMSGSIZE, MOST_BYTES)
        if "[" in address:
            socket.set(zmq.IPV6, 1)
        if monitored:
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        yield socket, monitor
    finally:
        if monitor is not None:
            socket.disable_monitor()
            monitor.close(0)
        socket.close()


async def joined(monitor: Any) -> AsyncIterator[bool]:
    """Yields True when the peer is a publisher (or a replay endpoint), and False when the connection is lost."""
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        yield event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED


@dataclass(frozen=True)
class Found:
    """`events`: for `endpoints`; empty: none. `ranks`: the data parallel ranks that publish. `tried`: as a sentence."""

    events: str
    ranks: int
    tried: str


async def find_events(url: str) -> Found:
    """Looks for KV events on the usual ports of a server's host; ZeroMQ's handshake tells whether a port is one."""
    host = urlsplit(normalise(url)).hostname or ""
    address = f"tcp://{f'[{host}]' if ':' in host else host}"
    first, ranks = f"{address}:{FIRST_PORT}", 0
    while ranks < MOST_RANKS and await _answers(zmq.SUB, f"{address}:{FIRST_PORT + ranks}"):
        ranks += 1
    if not ranks:
        return Found("", 0, f"no KV events are published at {first}")
    replay = FIRST_PORT + ranks
    if await _answers(zmq.DEALER, f"{address}:{replay}"):
        return Found(f"{first},{replay}", ranks, "")
    return Found(first, ranks, f"no replay endpoint was found at {address}:{replay}")


async def _answers(kind: int, address: str) -> bool:
    with open_socket(kind, address, monitored=True) as (_, monitor), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIND_S):
            async for found in joined(monitor):
                if found:
                    return True
    return False
