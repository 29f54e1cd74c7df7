"""Makes child processes end when their parent ends, even if the parent is killed (SIGKILL). Every child holds the read
end of a pipe, and only the parent holds the write end. When the parent ends, the kernel closes the write end, and each
child reads end-of-file."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import threading
import time

VARIABLE = "MINITUI_LIFELINE"  # the environment variable with the number of the pipe's file descriptor
GRACE_S = 2.0  # between SIGTERM and the forced exit


@functools.cache
def lifeline() -> int:
    """Returns the read end of the pipe that all children share. The caller passes it to each child. The caller also
    sets VARIABLE in the child's environment to the number of the file descriptor."""
    read, _ = os.pipe()  # the write end stays open until this process ends; children do not inherit it
    return read


def end_with_parent() -> None:
    """End this process when its parent ends, if the parent passed a lifeline. Call it early in `main`."""
    number = os.environ.pop(VARIABLE, "")  # removed, so that children of this process do not see it
    with contextlib.suppress(ValueError, OSError):
        if stat.S_ISFIFO(os.fstat(int(number)).st_mode):
            os.set_inheritable(int(number), False)
            threading.Thread(target=_watch, args=(int(number),), name="lifeline", daemon=True).start()


def _watch(pipe: int) -> None:
    with contextlib.suppress(OSError):
        os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
