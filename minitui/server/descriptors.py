"""How many connections fit into this process's limit of open files."""

from __future__ import annotations

import resource

OTHERS = 100  # files that are no connections


def most_connections(wanted: int) -> int:
    """`wanted`, or as many as the limit of open files allows."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - OTHERS))
