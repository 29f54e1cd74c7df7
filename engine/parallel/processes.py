"""Rank 0 starts the processes of the other ranks, sends them plans, and detects when one of them ends.

Each rank gets its plans over a socket, not through a collective. An idle rank blocks on its socket, at no cost and
without a timeout. When a process ends, its socket closes, and the process at the other end detects this at once. So
every rank exits when rank 0 ends, and rank 0 quickly detects a rank that has ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core.step import StepPlan
from engine.errors import DeviceLost, EngineError
from engine.model.config import ModelConfig

CLOSE_S = 3.0  # seconds; a rank that takes longer to end is killed
CAUSE_S = 2.0  # after a failed collective: seconds to wait for the report of the rank whose failure is the cause
DEATH_S = 0.3  # seconds to wait after a rank reports an error: often the cause is that another rank has ended


def device_of(device: torch.device, rank: int, size: int) -> torch.device:
    """Returns the device of a rank: the CPU, or a separate GPU for each rank, counted from `device`."""
    if device.type != "cuda":
        return device
    first, gpus = device.index or 0, torch.cuda.device_count()
    if first + size > gpus:
        raise EngineError(
            f"tensor_parallel_size {size} needs {size} GPUs from cuda:{first} on, but this machine has {gpus} GPU"
            f"{'' if gpus == 1 else 's'}: lower tensor_parallel_size"
        )
    return torch.device("cuda", first + rank)


class Workers:
    """The processes of all ranks except rank 0."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, directory: Path | None, on_lost: Callable[[str], None] | None
    ) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            raise EngineError(
                f"tensor_parallel_size is {config.tensor_parallel_size}, but torch {torch.__version__} was "
                "built without torch.distributed: install a build that has it, or set tensor_parallel_size to 1"
            )
        self.size = config.tensor_parallel_size
        self._on_lost = on_lost
        self._store = dist.TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()  # "loaded", "ready", or "" when a rank is lost
        self.failure = ""  # the first failure, as a sentence; empty: none
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for rank in range(1, self.size):
            self._start(rank, (model, config, directory, rank, self._store.port))

    def _start(self, rank: int, start: tuple[Any, ...]) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.process.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment,
            )
        connection = Connection(ours.detach())
        self._processes.append(process)
        self._connections.append(connection)
        connection.send_bytes(pickle.dumps(start, pickle.HIGHEST_PROTOCOL))
        threading.Thread(
            target=self._listen, args=(rank, connection, process), name=f"rank {rank}", daemon=True
        ).start()

    def meet(self) -> Any:
        """Wait until all ranks have loaded their weights; return the group's store. Raises EngineError if one fails."""
        self._await("loaded")
        return self._store

    def await_ready(self) -> None:
        """Wait until every rank can run plans."""
        self._await("ready")

    def _await(self, kind: str) -> None:
        missing = self.size - 1
        while missing:
            news = self._news.get()
            if self.failure:
                raise EngineError(self.failure)
            missing -= news == kind

    def send(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Raises DeviceLost if a rank has ended."""
        if self.failure:
            raise DeviceLost(self.failure)
        message = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            raise DeviceLost(self.cause() or f"a rank no longer accepts plans ({error})") from error

    def cause(self) -> str:
        """Wait up to CAUSE_S for the failure of a rank; return it as a sentence, empty if no rank has failed."""
        self._failed.wait(CAUSE_S)
        return self.failure

    def close(self) -> None:
        """End all processes; kill a process that does not end within CLOSE_S. After a failure, all processes are killed
        at once, because they may be waiting for the failed rank."""
        self._closing = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + (0.0 if self.failure else CLOSE_S)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _listen(self, rank: int, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        """Read the messages of a rank until it ends. Runs in a separate thread for each rank."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, sentence = pickle.loads(connection.recv_bytes())
                if kind == "failed":
                    self._failed.wait(DEATH_S)
                    self._lost(sentence)
                self._news.put(kind)
        status = process.wait()
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._lost(f"rank {rank} of {self.size} (process {process.pid}) ended {how}")

    def _lost(self, sentence: str) -> None:
        with self._lock:
            if self._closing or self.failure:
                return
            self.failure = sentence
        self._failed.set()
        self._news.put("")
        if self._on_lost is not None:
            self._on_lost(sentence)
