"""The number of connections that fit into this process's limit of open files."""

from __future__ import annotations

import resource

OTHERS = 100  # open files that are not connections


def most_connections(wanted: int) -> int:
    """Returns `wanted`, or fewer if the limit of open files is lower."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - OTHERS))
