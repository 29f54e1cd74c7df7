"""The processor cores that the engine computes on: one is left to the screen."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")  # of Linux


@cache  # `leave_a_core` changes what the system would answer
def physical_cores() -> list[set[int]]:
    """Returns the logical processors of each core that this process may use. Where unknown, each is a core."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[tuple[str, ...], set[int]] = {}
    for processor in sorted(usable):
        folder = TOPOLOGY / f"cpu{processor}" / "topology"
        try:
            place = tuple((folder / name).read_text().strip() for name in ("physical_package_id", "core_id"))
        except OSError:
            place = (str(processor),)
        cores.setdefault(place, set()).add(processor)
    return list(cores.values())


def default_threads() -> int:
    """Returns the number of threads that compute: one for each core but one, because the screen needs a core too. Two
    threads of one core would share its arithmetic."""
    return max(1, len(physical_cores()) - 1)


def leave_a_core() -> None:
    """Keep all threads of this process off the last core, if there are more than two. Linux only."""
    cores = physical_cores()
    if len(cores) < 3 or not hasattr(os, "sched_setaffinity"):
        return
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended, or the system does not allow this
            os.sched_setaffinity(int(task), set().union(*cores[:-1]))
