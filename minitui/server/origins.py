"""Parses and compares the headers Host and Origin.

In Host, a browser sends the address of the request. In Origin, it sends the site of the page that makes the request.
With DNS rebinding, a foreign name resolves to this machine, but Host still has the foreign name. If a foreign page
sends a request to this server's own name, Origin still has the foreign site. So both headers are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.errors import EngineError

AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,255}))(?::([0-9]{1,5}))?")


def authority(text: str) -> tuple[str, str] | None:
    """Returns (name, port or "") from a Host header; None if the header is not an address. The name is in lower case,
    without brackets and without a final dot."""
    found = AUTHORITY.fullmatch(text)
    if found is None:
        return None
    name = (found[1] or found[2]).lower().removesuffix(".")
    return (name, found[3] or "") if name else None


def check_names(names: Iterable[str]) -> None:
    """Raises EngineError if a name of --allowed-host is not a host, or `*.` and a host."""
    for name in names:
        if authority(name.removeprefix("*.")) != (name.removeprefix("*.").lower(), ""):
            raise EngineError(
                f"--allowed-host {name!r} is not a host: give a name or an address without a port, as in "
                "chat.example.org or *.example.org; with API keys, every host is allowed"
            )


def is_allowed(name: str, names: Iterable[str]) -> bool:
    """Returns True if this host, in lower case, is one of the names of --allowed-host."""
    allowed = (each.lower() for each in names)
    return any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in allowed)


def is_same_origin(origin: str, host: str) -> bool:
    """Returns True if this Origin header and this Host header name the same server."""
    scheme, found, rest = origin.partition("://")
    return bool(found) and scheme.lower() in ("http", "https") and authority(rest) == authority(host) is not None
