"""Makes simulated records in another process, as an engine does, so the measured process does nothing but display.

Simulated time runs as fast as real time. If the process cannot make records that fast, simulated time runs slower; no
records are left out. For a measurement the records are made in advance.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from engine.errors import InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.progress import Progress
from engine.trace.records import Packet, Record, packets
from engine.trace.state import State
from minitui.dev.simulator import LOADS, Load, Stress, spell
from minitui.sources.base import Source

EVERY_S = 0.01  # seconds between two messages, as in the engine's process
LONGEST_S = 0.1  # maximum simulated seconds in one message


class SimulatedSource(Source):
    """Simulated records for the Inspect screen. Only the simulated chats make requests."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.info = describe(load)
        self.made: deque[tuple[int, float]] = deque()  # (number of the last record of a message, when it was sent)

    async def start(self, on_progress: Progress) -> None:
        """Does nothing: the records are made from the beginning on."""
        self._ready.set()

    async def close(self) -> None:
        await self._stop()

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> NoReturn:
        raise InvalidRequest("simulated records answer no requests; `minitui chat` starts an engine")

    async def control(self, verb: str, **arguments: Any) -> NoReturn:
        raise InvalidRequest(f"simulated records do not support {verb!r}", "action")

    @property
    @abstractmethod
    def names(self) -> dict[str, str]:
        """The titles of the chats."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids."""

    @abstractmethod
    def gate(self) -> None:
        """Closes or opens the gate."""

    @abstractmethod
    def step(self) -> None:
        """Closes the gate if it is open, and runs one step."""


class StressProcess(SimulatedSource):
    """A load of LOADS, made by another process. `close` ends the process.

    The process makes the records of `ahead` simulated seconds before it sends the first one. These records then arrive
    exactly on time, and making them takes no CPU time from the application.
    """

    def __init__(self, load: str, warm_up: float = 8.0, ahead: float = 0.0) -> None:
        super().__init__(LOADS[load])
        self._names: dict[str, str] = {}
        self._words: list[str] = []
        self._packets: deque[Packet] = deque()
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minitui.dev.simulator_process", str(theirs.fileno()), load, str(warm_up),
                 str(ahead)],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._snapshot = self._connection.recv()
        self._connection.send("go")
        threading.Thread(target=self._read, name="stress", daemon=True).start()

    @property
    def names(self) -> dict[str, str]:
        return self._names

    def drain_records(self) -> list[Record]:
        return [record for packet in self.drain_packets() for record in packet.records()]

    def drain_packets(self) -> list[Packet]:
        return [self._packets.popleft() for _ in range(len(self._packets))]

    async def snapshot(self) -> dict[str, Any]:
        """Returns the state before the first record."""
        return self._snapshot

    def decode(self, ids: Sequence[int]) -> str:
        return spell(self._words, ids)

    def gate(self) -> None:
        self._connection.send("gate")

    def step(self) -> None:
        self._connection.send("step")

    async def close(self) -> None:
        """Ends the process."""
        await super().close()
        self._process.terminate()
        self._process.wait()

    def _read(self) -> None:
        """Runs in a thread: receives messages from the socket."""
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv_bytes()
                (sent,) = struct.unpack_from("d", message)
                packed, words, names = pickle.loads(memoryview(message)[8:])
                self._words += words
                if names:
                    self._names = {**self._names, **names}
                self._packets.extend(packed)
                if packed:
                    self.made.append((self._packets[-1].last, sent))


def describe(load: Load) -> EngineInfo:
    """Returns the `info` of a source with this load."""
    return EngineInfo(
        model="stress", device="make-believe", dtype="none", num_blocks=load.blocks, block_size=load.block_size
    )


def warmed(stress: Stress, seconds: float) -> State:
    """Simulates this many seconds; returns the state at their end."""
    load = stress.load
    state = State(load.blocks + 1, load.block_size, load.budget, load.rows)
    for _ in range(round(seconds / 0.25)):
        stress.run(0.25)
        state.apply_all(stress.drain())
    return state


class Maker:
    """Makes messages, each with the changes since the last message."""

    def __init__(self, stress: Stress) -> None:
        self.stress = stress
        self._words = 0
        self._names: dict[str, str] = {}

    def news(self) -> tuple[list[Record], list[str], dict[str, str]]:
        """Returns the new records, the new words and the changed names."""
        words = self.stress.words.words[self._words :]
        self._words += len(words)
        named = self.stress.group_names
        names = {group: name for group, name in named.items() if self._names.get(group) != name}
        self._names |= names
        return self.stress.drain(), words, names


def main(fd: int, load: str, warm_up: float, ahead: float) -> None:
    """Sends a snapshot, then messages until the application closes the connection. Runs in the other process."""
    connection, stress = Connection(fd), Stress(LOADS[load])
    snapshot = warmed(stress, warm_up).snapshot()
    maker = Maker(stress)
    made: list[tuple[float, bytes]] = []  # (seconds after the start, message)
    began = stress.now
    while stress.now - began < ahead:
        stress.run(EVERY_S)
        made.append((stress.now - began, _packed(maker.news())))
    connection.send(snapshot)
    connection.recv()
    with suppress(EOFError, OSError):
        start = time.monotonic()
        for due, news in made:
            time.sleep(max(0.0, start + due - time.monotonic()))
            _send(connection, news)
        _go_on(connection, maker)


def _go_on(connection: Connection, maker: Maker) -> None:
    """Sends messages in real time and handles the commands "gate" and "step"."""
    stress, last = maker.stress, time.monotonic()
    while True:
        while connection.poll(max(0.0, last + EVERY_S - time.monotonic())):
            command = connection.recv()
            if command == "gate":
                stress.gate(not stress.closed)
            elif command == "step":
                if not stress.closed:
                    stress.gate(True, "stepping")
                stress.run_steps(1)
        now = time.monotonic()
        stress.run(min(LONGEST_S, now - last))
        last = now
        _send(connection, _packed(maker.news()))


def _packed(news: tuple[list[Record], list[str], dict[str, str]]) -> bytes:
    records, words, names = news
    return pickle.dumps((packets(records), words, names), pickle.HIGHEST_PROTOCOL)


def _send(connection: Connection, news: bytes) -> None:
    """Sends the current time, then `news`. Both processes use the same clock."""
    connection.send_bytes(struct.pack("d", time.monotonic()) + news)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
