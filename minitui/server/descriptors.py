"""Limits connections so that this process stays within its limit of open files."""

from __future__ import annotations

import resource

RESERVED = 100  # open files for everything that is not a connection


def most_connections(wanted: int) -> int:
    """Returns `wanted`, or a smaller number of connections if the limit of open files requires it; at least 16."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - RESERVED))
