"""Starts and ends the engine process (engine/process/server.py) for its client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

CLOSE_S = 4.0  # seconds; a process that takes longer to end is killed


def start(log_file: Path) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that writes to `log_file`; return it with the client's end of its socket. Raises OSError."""
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    # The engine's waiting threads sleep instead of spinning, because the user interface needs the cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("KMP_BLOCKTIME", "0")
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log_file.open("ab") as log:
            process = subprocess.Popen(
                # -P: do not import files of the current directory by accident.
                [sys.executable, "-P", "-m", "engine.process.server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                start_new_session=True, env=environment,
            )  # fmt: skip
    except OSError:
        ours.close()
        raise
    return process, Connection(ours.detach())


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, and wait for it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a system call may delay the end of the process
            process.wait(timeout=CLOSE_S)
