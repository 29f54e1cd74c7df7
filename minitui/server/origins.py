"""Host and Origin headers: the address that a browser uses, and the site of the page that sends a request.

With DNS rebinding, a foreign name resolves to this machine, but the browser still sends that name as Host. A foreign
page that uses the right name sends its own site as Origin. So both headers are checked.
"""

from __future__ import annotations

import re

AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,255}))(?::([0-9]{1,5}))?")


def authority(text: str) -> tuple[str, str] | None:
    """Returns (name, port or "") of a Host header; None if it is not an address.

    The name is in lower case, without brackets and final dot.
    """
    found = AUTHORITY.fullmatch(text)
    if found is None:
        return None
    name = (found[1] or found[2]).lower().removesuffix(".")
    return (name, found[3] or "") if name else None


def is_same_origin(origin: str, host: str) -> bool:
    """Does this Origin name the same server as this Host header?"""
    scheme, found, rest = origin.partition("://")
    return bool(found) and scheme.lower() in ("http", "https") and authority(rest) == authority(host) is not None
