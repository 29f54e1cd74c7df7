"""Host and Origin headers: which address a browser believes it speaks to, and which page asks.

DNS rebinding gives a foreign page an address of this machine, but the browser then still sends the foreign name as
Host. A foreign page that uses the right name sends its own name as Origin. So both are checked.
"""

from __future__ import annotations

import re

AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,255}))(?::([0-9]{1,5}))?")


def authority(text: str) -> tuple[str, str] | None:
    """(name, port or "") of a Host header: in lower case, no brackets, no final dot. None if it is not an address."""
    found = AUTHORITY.fullmatch(text)
    if found is None:
        return None
    name = (found[1] or found[2]).lower().removesuffix(".")
    return (name, found[3] or "") if name else None


def is_same_origin(origin: str, host: str) -> bool:
    """Does a page of this Origin come from the server that this Host header names?"""
    scheme, found, rest = origin.partition("://")
    return bool(found) and scheme.lower() in ("http", "https") and authority(rest) == authority(host) is not None
