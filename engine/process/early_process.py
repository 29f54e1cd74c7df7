"""Starts the engine process while its client still imports what it needs: the process then imports torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

KILL_S = 4.0  # seconds that a killed process may take to end

Started = tuple["subprocess.Popen[bytes]", socket.socket]  # and the client's end of its socket
_begun: dict[Path, Started] = {}


def begin(log_file: Path) -> None:
    """Start the process that the next client with this log file will use. It ends if this process ends first."""
    if log_file not in _begun:
        with contextlib.suppress(OSError):  # `take` tries again, and says why it fails
            _begun[log_file] = _start(log_file)


def take(log_file: Path) -> Started:
    """Returns the process that was begun for this log file, or starts one. Raises OSError."""
    return _begun.pop(log_file, None) or _start(log_file)


def _start(log_file: Path) -> Started:
    """Start a process that writes to `log_file`; return it with the client's end of its socket. Raises OSError."""
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    # The engine's waiting threads sleep instead of spinning, because the user interface needs the cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("KMP_BLOCKTIME", "0")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # the import of numpy would start a thread for each core
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log_file.open("ab") as log:
            process = subprocess.Popen(
                # -P: do not import files of the current directory by accident.
                [sys.executable, "-P", "-m", "engine.process.server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                start_new_session=True, env=environment,
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, and wait for it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a system call may delay the end of the process
            process.wait(timeout=KILL_S)
