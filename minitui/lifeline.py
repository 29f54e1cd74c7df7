"""Child processes that end when their parent dies, however it dies.

Every child holds the read end of one pipe, and only the parent holds its write end. The kernel closes that when the
parent ends, by SIGKILL too, and the child reads the end of the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import threading
import time

VARIABLE = "MINITUI_LIFELINE"
GRACE_S = 2.0  # between SIGTERM and the end by force


@functools.cache
def lifeline() -> int:
    """The file descriptor to pass on to child processes, its number in VARIABLE. One pipe serves all of them."""
    read, _ = os.pipe()  # the write end stays open as long as this process lives, and no child inherits it
    return read


def end_with_parent() -> None:
    """End this process when its parent is gone, if the parent passed a lifeline. Call it early in `main`."""
    number = os.environ.pop(VARIABLE, "")  # children of this process have another parent
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
